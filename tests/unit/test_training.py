"""A launch as the driver sees it, against agents that are played over a real channel."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from hopsgpu import training as training_module
from hopsgpu.call import Call
from hopsgpu.errors import Cancelled, DiscoveryError, StoreError
from hopsgpu.gang import Container, assign_ranks
from hopsgpu.modules import PackedModules
from hopsgpu.output import Outputs
from hopsgpu.progress import Off
from hopsgpu.retries import Fault
from hopsgpu.spark.jobs import GangJob
from hopsgpu.spark.lease import Lease
from hopsgpu.stores.lake import Lake
from hopsgpu.training import Training
from hopsgpu.values import Value
from hopsgpu.worker.channel import Channel, new_secret
from hopsgpu.worker.handshake import connect
from hopsgpu.worker.server import ControlServer, serve
from hopsgpu.yarn.amounts import NOTHING
from hopsgpu.yarn.lost_nodes import why_lost
from hopsgpu.yarn.snapshot import Node
from tests.conftest import until

SECRET = new_secret()
SECONDS = 10.0


@dataclass
class Job:
    """The barrier job's part that a launch looks at."""

    ended: threading.Event = field(default_factory=threading.Event)

    def reason(self, seconds: float) -> str:
        return "Container from a bad node: node2"


class Agent(threading.Thread):
    """Answers `run` by what it is given, and stays connected until the driver hangs up."""

    def __init__(self, port: int, answers: Callable[[Channel], Any]) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._answers = answers
        self.heard: list[str] = []

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        channel = await connect("127.0.0.1", self._port, SECRET)
        await channel.send("hello")
        while (message := await channel.receive()) is not None:
            self.heard.append(message.kind)
            if message.kind == "reserve":
                await channel.send(
                    "reserved",
                    run_id="run-1",
                    ports=list(range(4242, 4242 + message["ports"])),
                    store=None,
                    address="127.0.0.1",
                    interface="lo",
                )
            elif message.kind == "run":
                await self._answers(channel)
        await channel.close()


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with serve(SECRET, "127.0.0.1") as running:
        yield running


def launch(
    server: ControlServer,
    answers: Callable[[Channel], Any],
    gpus: tuple[str, ...] = ("g0",),
    timeout: float | None = None,
    nodes: tuple[Node, ...] = (),
) -> tuple[Training, Agent, Job, threading.Event]:
    agent = Agent(server.port, answers)
    agent.start()
    event = server.next_event(SECONDS)
    assert event is not None
    containers = tuple(
        Container(event.peer, f"container_{n}", "node1", "127.0.0.1", (gpu,))
        for n, gpu in enumerate(gpus)
    )
    job, cancelled = Job(), threading.Event()

    def why(reason: str, host: str) -> str:
        return why_lost(reason, host, lambda: nodes, str)

    lease = Lease(server, containers, cast(GangJob, job), why)
    modules = PackedModules(b"", 0, ())
    call = Call(b"f", modules, {}, "run-1", Lake("file:///runs/run-1"), 0, timeout=timeout)
    world = assign_ranks(containers, 1)
    training = Training(lease, world, call, Outputs(world, Off()), lambda _: None, cancelled)
    return training, agent, job, cancelled


def launch_two(
    server: ControlServer, *answers: Callable[[Channel], Any], servers: int = 0
) -> tuple[Training, list[Agent]]:
    """A gang of one rank in each of several containers, each played by an agent of its own."""
    agents, containers = [], []
    for number, answer in enumerate(answers):
        agents.append(Agent(server.port, answer))
        agents[-1].start()
        event = server.next_event(SECONDS)
        assert event is not None
        containers.append(
            Container(event.peer, f"container_{number}", f"node{number}", "127.0.0.1", ())
        )
    lease = Lease(server, tuple(containers), cast(GangJob, Job()), lambda reason, host: reason)
    call = Call(b"f", PackedModules(b"", 0, ()), {}, "run-1", Lake("file:///runs/run-1"), 0)
    world = assign_ranks(containers, 1, servers)
    cancelled = threading.Event()
    return Training(lease, world, call, Outputs(world, Off()), lambda _: None, cancelled), agents


async def say_nothing(channel: Channel) -> None: ...


async def return_a_value(channel: Channel, run_id: str = "run-1", value: bytes = b"value") -> None:
    await channel.send("started", run_id=run_id, rank=0, pid=7)
    await end(channel, value, run_id=run_id, exit_code=0, outcome={"status": "returned"})


async def end(channel: Channel, value: bytes = b"", **known: Any) -> None:
    told = {
        "run_id": "run-1",
        "rank": 0,
        "value": None,
        "exit_code": 1,
        "signal": None,
        "peak_memory": 1,
        "outcome": {},
        "log_tail": [],
        "time": 0.0,
        "stopped": False,
        "oom_kills": 0,
        "gpu_events": [],
    }
    await channel.send("ended", value, **told | known)


async def return_late_words_and_a_value(channel: Channel) -> None:
    await return_a_value(channel, "run-0", b"another's")
    await return_a_value(channel)


def test_late_words_of_an_earlier_launch_do_not_count(server: ControlServer) -> None:
    training, _, _, _ = launch(server, return_late_words_and_a_value)
    trained = training.run()
    assert trained.values == {0: Value(b"value")}
    assert trained.warnings == []


def test_a_value_comes_back(server: ControlServer) -> None:
    training, _, _, _ = launch(server, return_a_value)
    trained = training.run()
    assert trained.values == {0: Value(b"value")}
    assert trained.reports[0].pid == 7
    assert trained.warnings == []


def test_a_lost_node_is_seen_though_its_connection_seems_to_live(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_module, "_QUIET_SECONDS", 0.2)
    lost = Node("node1:45454", "node1", "LOST", NOTHING, NOTHING)
    training, _, job, _ = launch(server, say_nothing, nodes=(lost,))
    threading.Timer(0.3, job.ended.set).start()
    trained = training.run()
    assert trained.failure is not None
    assert (trained.failure.rank, trained.suspect) == (0, "node1")
    said = str(trained.failure)
    assert "was lost (container container_0): its NodeManager was lost: the ResourceManager" in said
    assert "Spark says: Container from a bad node: node2. Its log: yarn logs" in said


def test_an_agent_that_does_not_answer_a_stop_serves_no_further_attempt(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_module, "_STOP_SECONDS", 0.3)
    training, agent, _, _ = launch(server, say_nothing, timeout=0.2)
    trained = training.run()
    agent.join(SECONDS)
    assert not agent.is_alive()
    assert training._lease.gone == {0}
    assert "rank 0 was not seen to end: its agent did not answer" in trained.warnings[0]
    assert "was still running after run_timeout=0.2 s" in str(trained.failure)


async def return_late(channel: Channel) -> None:
    await channel.send("started", run_id="run-1", rank=0, pid=7)
    while (message := await channel.receive()) is not None:
        if message.kind == "stop":
            assert message["dump_stacks"] is True
            tail = ["Thread 0x1 (most recent call first):", '  File "train.py", line 7 in wait']
            await end(channel, exit_code=None, signal="SIGTERM", stopped=True, log_tail=tail)


def test_ranks_that_run_too_long_are_stopped_with_their_stacks(server: ControlServer) -> None:
    training, _, _, _ = launch(server, return_late, timeout=0.2)
    failure = training.run().failure
    assert failure is not None and failure.signal == "SIGTERM"
    assert "run_timeout=0.2 s" in str(failure) and "train.py" in str(failure)
    assert training.trained.reports[0].stopped


async def raise_an_error(channel: Channel) -> None:
    await channel.send("started", run_id="run-1", rank=0, pid=7)
    error = {"status": "raised", "error": "ValueError: no", "traceback": "frames"}
    await end(channel, outcome=error)


def test_a_failure_is_told_with_whose_fault_it_was(server: ControlServer) -> None:
    training, _, _, _ = launch(server, raise_an_error)
    trained = training.run()
    assert "raised ValueError: no" in str(trained.failure)
    assert trained.fault is Fault.RANK
    assert trained.values == {}


def test_cancel_stops_the_ranks(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "_STOP_SECONDS", 0.3)
    training, agent, _, cancelled = launch(server, say_nothing)
    threading.Timer(0.3, cancelled.set).start()
    with pytest.raises(Cancelled):
        training.run()
    assert agent.heard == ["reserve", "run", "stop"]


async def returned(channel: Channel, rank: int) -> None:
    await channel.send("started", run_id="run-1", rank=rank, pid=rank)
    known = {"rank": rank, "exit_code": 0, "outcome": {"status": "returned"}}
    await end(channel, b"value", **known)


def test_an_executor_lost_after_its_rank_returned_fails_nobody_but_the_publishing(
    server: ControlServer,
) -> None:
    async def first(channel: Channel) -> None:
        await returned(channel, 0)
        await channel.close()

    async def second(channel: Channel) -> None:
        await asyncio.to_thread(until, lambda: training._lease.gone == {0}, SECONDS)
        await returned(channel, 1)

    training, _ = launch_two(server, first, second)
    trained = training.run()
    assert trained.failure is None
    assert trained.values == {0: Value(b"value"), 1: Value(b"value")}
    assert training._lease.gone == {0}
    with pytest.raises(StoreError, match="'net' is not published: rank 0's executor was lost"):
        training.publish("file:///models", "net")


def test_what_follows_from_the_chiefs_return_is_no_failure(server: ControlServer) -> None:
    async def chief(channel: Channel) -> None:
        await channel.send("started", run_id="run-1", rank=0, pid=1)
        known = {"exit_code": 0, "outcome": {"status": "returned"}, "time": 5.0}
        await end(channel, b"value", **known)
        await channel.send("started", run_id="run-1", rank=2, pid=3)
        await end(channel, rank=2, stopped=True, exit_code=None, signal="SIGTERM", time=7.0)

    async def worker(channel: Channel) -> None:
        await channel.send("started", run_id="run-1", rank=1, pid=2)
        error = {"status": "raised", "error": "UnavailableError: chief", "traceback": ""}
        await end(channel, rank=1, outcome=error, time=5.1)

    training, _ = launch_two(server, chief, worker, servers=1)
    trained = training.run()
    assert trained.failure is None
    assert trained.values == {0: Value(b"value"), 1: Value(pickle.dumps(None))}


def test_an_executor_lost_before_the_start(server: ControlServer) -> None:
    training, agent, _, _ = launch(server, say_nothing)
    server.end_all()
    agent.join(SECONDS)
    trained = training.run()
    assert "before its ranks were started" in str(trained.failure)
    assert trained.fault is Fault.INFRASTRUCTURE
    assert training._lease.gone == {0}


def test_one_gpu_in_two_containers_starts_nothing(server: ControlServer) -> None:
    training, agent, _, _ = launch(server, say_nothing, gpus=("g0", "g0"))
    with pytest.raises(DiscoveryError, match="g0 was given to two containers: container_0 on"):
        training.run()
    assert agent.heard == []
