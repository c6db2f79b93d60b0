"""A launch as the driver sees it, against agents that are played over a real channel."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import xxhash

from hopsgpu.agent.model_upload import ModelFiles, dump_model_files, dump_parts
from hopsgpu.artifacts.manifest import VersionDescription
from hopsgpu.attempts import publisher as publisher_module
from hopsgpu.attempts.attempt import AttemptListener, AttemptRunner, open_attempt
from hopsgpu.attempts.attempt_watcher import WatchBounds
from hopsgpu.attempts.publisher import Publisher
from hopsgpu.attempts.rank_call import Call
from hopsgpu.attempts.rank_table import FunctionEntry, RankTable
from hopsgpu.attempts.retry_policy import FailureCause
from hopsgpu.attempts.return_values import Value
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.backends.spark.barrier_job import GangJob
from hopsgpu.cluster_managers.resources import NOTHING
from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.cluster_managers.yarn.lost_nodes import why_lost
from hopsgpu.control.channel import Channel, Message, new_secret
from hopsgpu.control.handshake import connect
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.core.gang import GangExecutor, World, assign_ranks
from hopsgpu.core.gpu_idle import IdleBounds
from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.display.base import NoDisplay
from hopsgpu.errors import Cancelled, ConfigError, DiscoveryError, GpusIdle, StoreError
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.rank import context as context_module
from hopsgpu.storage.digests import FileFacts
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.unit import plans

SECRET = new_secret()


@dataclass
class Job:
    """The barrier job's part that a launch looks at."""

    ended: threading.Event = field(default_factory=threading.Event)

    def reason(self, seconds: float) -> str:
        return "Container from a bad node: node2"

    def loss(self, seconds: float) -> str:
        return self.reason(seconds) if self.ended.wait(seconds) else ""


class Told(AttemptListener):
    """Is told how the ranks fare."""

    def __init__(self) -> None:
        self.runs: list[FunctionEntry] = []
        self.warnings: list[str] = []
        self.saves: list[tuple[int, int, bool, int | None]] = []
        self.requests: list[int | str] = []

    def on_save(self, rank: int, step: int, complete: bool, agreed: int | None) -> None:
        self.saves.append((rank, step, complete, agreed))

    def on_checkpoint_agreed(self, step: int) -> None:
        self.requests.append(step)

    def on_checkpoint_passed(self, step: int) -> None:
        self.requests.append(f"passed {step}")

    def on_checkpoint_given_up(self, reason: str) -> None:
        self.requests.append(reason)

    def on_placement(self, ranks: RankTable) -> None:
        self.ranks = ranks

    def on_entry(self, entered: FunctionEntry) -> None:
        self.runs.append(entered)

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


class Agent(threading.Thread):
    """Answers `run` by what it is given, and stays connected until the driver hangs up."""

    def __init__(self, port: int, answers: Callable[[Channel], Any]) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._answers = answers
        self.heard: list[str] = []
        self.run_message: Message | None = None
        # What it does at other messages, by their kind.
        self.further: dict[str, Callable[[Channel], Any]] = {}

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
                self.run_message = message
                await self._answers(channel)
            elif message.kind in self.further:
                await self.further[message.kind](channel)
        await channel.close()


@dataclass
class Server:
    """The driver's end of the channel, with attempts and agents, which end with the test."""

    control: ControlServer
    attempts: contextlib.ExitStack
    agents: list[Agent] = field(default_factory=list)

    def joined(self, answers: Callable[[Channel], Any]) -> tuple[Agent, int]:
        """An agent that is connected, and its key."""
        agent = Agent(self.control.port, answers)
        agent.start()
        self.agents.append(agent)
        event = self.control.next_event(HANG_SECONDS)
        assert event is not None
        return agent, event.peer


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    with serve(SECRET, "127.0.0.1") as running, contextlib.ExitStack() as attempts:
        server = Server(running, attempts)
        yield server
    for agent in server.agents:
        agent.join(HANG_SECONDS)
        assert not agent.is_alive(), "an agent goes on, and logs, in other tests"


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as running:
        yield running


def keep_all(keys: Collection[int]) -> bool:
    raise AssertionError("a training lets nobody go")


@dataclass
class Launched:
    """An attempt on agents that are connected."""

    server: Server
    agents: list[Agent]
    allocation: GangAllocation
    world: World
    call: Call
    bounds: WatchBounds
    job: Job
    told: Told = field(default_factory=Told)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.training = self.again()

    @property
    def agent(self) -> Agent:
        (agent,) = self.agents
        return agent

    def again(self, **changes: Any) -> AttemptRunner:
        """Another attempt on the same agents, with changes to the call."""
        attempt = open_attempt(
            self.allocation,
            self.world,
            replace(self.call, **changes),
            NoDisplay(),
            self.told,
            self.cancelled,
            self.bounds,
        )
        return self.server.attempts.enter_context(attempt)


def launch(
    server: Server,
    answers: Callable[[Channel], Any],
    gpus: tuple[str, ...] = ("g0",),
    timeout: float | None = None,
    nodes: tuple[Node, ...] = (),
    tokens: Callable[[], bytes] = bytes,
    bounds: WatchBounds = WatchBounds(),  # noqa: B008 - frozen
    **more: Any,
) -> Launched:
    agent, key = server.joined(answers)
    containers = tuple(
        GangExecutor(key, f"container_{n}", "node1", "127.0.0.1", (gpu,))
        for n, gpu in enumerate(gpus)
    )
    job = Job()

    def why(reason: str, container: GangExecutor) -> str:
        return why_lost(reason, container.host, lambda: nodes, str)

    allocation = GangAllocation(
        server.control, containers, cast(GangJob, job), why, keep_all, tokens
    )
    call = plans.call(plans.plan(run_timeout=timeout, **more))
    return Launched(server, [agent], allocation, assign_ranks(containers, 1), call, bounds, job)


def launch_two(
    server: Server,
    *answers: Callable[[Channel], Any],
    servers: int = 0,
    clocks: tuple[float, ...] = (0.0, 0.0),
) -> Launched:
    """A gang of one rank in each of several containers, each played by an agent of its own."""
    agents, containers = [], []
    for number, answer in enumerate(answers):
        agent, key = server.joined(answer)
        agents.append(agent)
        name, node = f"container_{number}", f"node{number}"
        containers.append(GangExecutor(key, name, node, "127.0.0.1", (), clock=clocks[number]))

    def why(reason: str, host: str) -> str:
        return reason

    job = Job()
    allocation = GangAllocation(
        server.control, tuple(containers), cast(GangJob, job), why, keep_all, bytes
    )
    call = plans.call()
    world = assign_ranks(containers, 1, servers)
    return Launched(server, agents, allocation, world, call, WatchBounds(), job)


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


def test_late_words_of_an_earlier_launch_do_not_count(server: Server) -> None:
    launched = launch(server, return_late_words_and_a_value)
    assert launched.training.run().values == {0: Value(b"value")}
    assert launched.told.warnings == []


def test_a_value_comes_back(server: Server) -> None:
    launched = launch(server, return_a_value)
    assert launched.training.run().values == {0: Value(b"value")}
    (report,) = launched.told.ranks.reports
    assert report.pid == 7
    assert launched.told.warnings == []


def test_checkpoints_on_the_lake_are_told_to_the_listener(server: Server) -> None:
    async def save_and_return(channel: Channel) -> None:
        for step, agreed in ((1, None), (2, 30)):
            fields = {"rank": 0, "step": step, "complete": step == 2, "agreed": agreed}
            await channel.send("saved", run_id="run-1", attempt=0, **fields)
        await return_a_value(channel)

    launched = launch(server, save_and_return)
    launched.training.run()
    assert launched.told.saves == [(0, 1, False, None), (0, 2, True, 30)]


def test_a_checkpoint_is_requested_of_all_ranks(server: Server) -> None:
    heard: list[tuple[str, int]] = []

    async def answer(channel: Channel) -> None:
        """Has come to step 5, passes the first proposal, accepts the second, and returns."""
        launched.training.request_checkpoint()
        while (message := await channel.receive()) is not None:
            notify = functools.partial(channel.send, run_id="run-1", attempt=0)
            if message.kind != "steps":
                heard.append((message.kind, message["step"]))
            match message.kind:
                case "steps":
                    await notify("steps", number=message["number"], asked=[[0, 5]])
                case "propose":
                    accepts = heard.count(("abort", 6)) == 1
                    kind = "accepted" if accepts else "rejected"
                    await notify(kind, rank=0, step=message["step"])
                case "commit":
                    await notify("passed", rank=0, step=6)
                    await notify("passed", rank=0, step=7)
                    # Its rank has ended before the next one.
                    launched.training.request_checkpoint()
                    await return_a_value(channel)

    launched = launch(server, answer)
    assert launched.training.run().values == {0: Value(b"value")}
    assert heard == [("propose", 6), ("abort", 6), ("propose", 7), ("commit", 7)]
    assert launched.told.requests[:2] == [7, "passed 7"]
    assert launched.told.requests[2:] in ([], ["rank 0 has ended"])


def test_a_rank_that_ends_has_passed_an_agreed_step(server: Server) -> None:
    async def answer(channel: Channel) -> None:
        launched.training.request_checkpoint()
        while (message := await channel.receive()) is not None:
            notify = functools.partial(channel.send, run_id="run-1", attempt=0)
            match message.kind:
                case "steps":
                    await notify("steps", number=message["number"], asked=[[0, 5]])
                case "propose":
                    await notify("accepted", rank=0, step=message["step"])
                case "commit":
                    await return_a_value(channel)

    launched = launch(server, answer)
    launched.training.run()
    assert launched.told.requests == [6, "passed 6"]


def test_a_gang_runs_once_the_function_does_in_the_last_of_its_ranks(
    server: Server,
) -> None:
    def begins(rank: int, at: float) -> Callable[[Channel], Any]:
        async def answer(channel: Channel) -> None:
            await channel.send("started", run_id="run-1", rank=rank, pid=7)
            await channel.send("entered", run_id="run-1", rank=rank, time=at)
            await end(channel, b"", rank=rank, exit_code=0, outcome={"status": "returned"})

        return answer

    # The second node's clock is 15 s behind the driver's.
    launched = launch_two(server, begins(0, 30.0), begins(1, 20.0), clocks=(0.0, 15.0))
    assert sorted(launched.training.run().values) == [0, 1]
    first, last = launched.told.runs
    assert first in (
        FunctionEntry(1, 2, 30.0),
        FunctionEntry(1, 2, 35.0),
    ) and last == FunctionEntry(2, 2, 35.0)


def test_a_lost_node_is_seen_though_its_connection_seems_to_live(server: Server) -> None:
    lost = Node("node1:45454", "node1", "LOST", NOTHING, NOTHING)

    async def lose(_: Channel) -> None:
        launched.job.ended.set()

    launched = launch(server, lose, nodes=(lost,), bounds=WatchBounds(quiet=0.2))
    failure = launched.training.run().failure
    assert failure is not None
    assert (failure.error.rank, failure.suspect_host) == (0, "node1")
    assert launched.allocation.lost_keys == {0}
    message = str(failure.error)
    assert "container_0): its NodeManager was lost" in message
    assert "Container from a bad node: node2. " in message and "yarn logs" in message


def test_an_agent_that_does_not_answer_a_stop_serves_no_further_attempt(server: Server) -> None:
    launched = launch(server, say_nothing, timeout=0.2, bounds=WatchBounds(stop=0.3))
    failure = launched.training.run().failure
    launched.agent.join(HANG_SECONDS)
    assert not launched.agent.is_alive()
    assert launched.allocation.lost_keys == {0} and not launched.allocation.is_whole()
    assert "rank 0 is unknown" in launched.told.warnings[0]
    assert failure is not None
    assert "run_timeout=0.2 s" in str(failure.error)


async def return_late(channel: Channel) -> None:
    await channel.send("started", run_id="run-1", rank=0, pid=7)
    while (message := await channel.receive()) is not None:
        if message.kind == "stop":
            assert message["dump_stacks"] is True
            tail = ["Thread 0x1 (most recent call first):", '  File "train.py", line 7 in wait']
            await end(channel, exit_code=None, signal="SIGTERM", stopped=True, log_tail=tail)


def test_ranks_that_run_too_long_are_stopped_with_their_stacks(server: Server) -> None:
    launched = launch(server, return_late, timeout=0.2)
    failure = launched.training.run().failure
    assert failure is not None and failure.error.signal == "SIGTERM"
    said = str(failure.error)
    assert "run_timeout=0.2 s" in said and "train.py" in said
    assert launched.told.ranks.reports[0].stopped


async def raise_an_error(channel: Channel) -> None:
    await channel.send("started", run_id="run-1", rank=0, pid=7)
    error = {"status": "raised", "error": "ValueError: no", "traceback": "frames"}
    await end(channel, outcome=error)


def test_a_failure_is_told_with_whose_fault_it_was(server: Server) -> None:
    launched = launch(server, raise_an_error)
    trained = launched.training.run()
    assert trained.failure is not None and launched.told.warnings == []
    assert "raised ValueError: no" in str(trained.failure.error)
    assert trained.failure.cause is FailureCause.RANK
    assert trained.values == {}


def test_cancel_stops_the_ranks(server: Server) -> None:
    async def cancel(_: Channel) -> None:
        launched.cancelled.set()

    launched = launch(server, cancel, bounds=WatchBounds(stop=0.3))
    with pytest.raises(Cancelled):
        launched.training.run()
    agent = launched.agent
    assert until(lambda: agent.heard == ["reserve", "keep", "run", "stop"]), agent.heard


async def returned(channel: Channel, rank: int) -> None:
    await channel.send("started", run_id="run-1", rank=rank, pid=rank)
    known = {"rank": rank, "exit_code": 0, "outcome": {"status": "returned"}}
    await end(channel, b"value", **known)


def test_the_log_of_an_agent_whose_rank_failed_is_kept(server: Server) -> None:
    async def fail(channel: Channel) -> None:
        await channel.send("started", run_id="run-1", rank=0, pid=7)
        await channel.send("agent-log", b"what it did", run_id="run-1", attempt=0)
        await end(channel)

    training = launch(server, fail).training
    assert training.run().failure is not None
    assert training.log_sizes() == {"logs/agent-0.log": 11, "logs/rank-0.log": 0}


def test_an_executor_lost_after_its_rank_returned_fails_nobody_but_the_publishing(
    server: Server,
) -> None:
    async def first(channel: Channel) -> None:
        await returned(channel, 0)
        await channel.close()

    async def second(channel: Channel) -> None:
        await asyncio.to_thread(until, lambda: launched.allocation.lost_keys == {0})
        await returned(channel, 1)

    launched = launch_two(server, first, second)
    training = launched.training
    trained = training.run()
    assert trained.failure is None
    assert trained.values == {0: Value(b"value"), 1: Value(b"value")}
    assert launched.allocation.lost_keys == {0}
    with pytest.raises(StoreError, match="'net' .*rank 0's executor"):
        training.publisher("net").find_files()


async def leave(channel: Channel, left: dict[int, ModelFiles]) -> None:
    await channel.send("left", dump_model_files(left), run_id="run-1")


def two_that_left(
    server: Server, tmp_path: Path, *facts: dict[str, FileFacts]
) -> tuple[Launched, Publisher]:
    """A gang of two that have returned, with what they say that they have uploaded."""
    ranks = [functools.partial(returned, rank=rank) for rank in range(2)]
    launched = launch_two(server, *ranks)
    for rank, agent in enumerate(launched.agents):
        told = {rank: facts[rank]} if rank < len(facts) else {}
        left = {rank: ModelFiles(len(facts[rank]), 4)} if told else {rank: ModelFiles(0, 0)}
        agent.further["left"] = functools.partial(leave, left=left)
        agent.further["publish"] = functools.partial(
            Channel.send, kind="uploaded", payload=dump_parts(told), run_id="run-1"
        )
    assert launched.training.run().failure is None
    return launched, launched.training.publisher("net")


def uploaded(store: Path, rank: int, name: str, content: bytes) -> None:
    """Puts a file where the part of a rank lies while it is published."""
    (staging,) = (store / "net" / "_staging").iterdir()
    (staging / str(rank)).mkdir(parents=True, exist_ok=True)
    (staging / str(rank) / name).write_bytes(content)


def facts_of(content: bytes) -> FileFacts:
    return FileFacts(len(content), xxhash.xxh3_128(content).hexdigest())


def test_parts_of_several_ranks_become_one_version(server: Server, tmp_path: Path) -> None:
    parts = {"a": facts_of(b"from 0")}, {"b": facts_of(b"from 1")}
    launched, publisher = two_that_left(server, tmp_path, *parts)

    async def upload(channel: Channel, rank: int) -> None:
        uploaded(tmp_path, rank, "ab"[rank], f"from {rank}".encode())
        await channel.send("uploaded", dump_parts({rank: parts[rank]}), run_id="run-1")

    for rank, agent in enumerate(launched.agents):
        agent.further["publish"] = functools.partial(upload, rank=rank)
    left = publisher.find_files()
    assert set(left) == {0, 1} and publisher.idle_agents(left) == set()
    version = publisher.publish(
        f"file://{tmp_path}", left, VersionDescription(run_id="run-1", framework="jax")
    )
    assert (version.name, version.version) == ("net", 1)
    target = version.download(tmp_path / "back")
    assert (target / "a").read_bytes() == b"from 0"
    assert (target / "b").read_bytes() == b"from 1"
    assert (version.manifest["run_id"], version.manifest["framework"]) == ("run-1", "jax")


def test_rank_without_files_does_not_publish(server: Server, tmp_path: Path) -> None:
    launched, publisher = two_that_left(server, tmp_path, {"a": facts_of(b"from 0")})
    left = publisher.find_files()
    assert left == {0: ModelFiles(1, 4)}
    assert publisher.idle_agents(left) == {1}
    assert launched.agents[1].heard[-1] == "left"


def uploading(
    server: Server, tmp_path: Path, *contents: tuple[str, bytes]
) -> tuple[list[Agent], Publisher]:
    """A gang of two, each of which uploads a file when it is told to."""
    parts = [{name: facts_of(content)} for name, content in contents]
    launched, publisher = two_that_left(server, tmp_path, *parts)
    agents = launched.agents

    async def upload(channel: Channel, rank: int) -> None:
        uploaded(tmp_path, rank, *contents[rank])
        await channel.send("uploaded", dump_parts({rank: parts[rank]}), run_id="run-1")

    for rank in range(len(contents)):
        agents[rank].further["publish"] = functools.partial(upload, rank=rank)
    return agents, publisher


def test_a_conflict_between_ranks_leaves_no_version_and_keeps_what_was_uploaded(
    server: Server, tmp_path: Path
) -> None:
    _, publisher = uploading(server, tmp_path, ("w", b"from 0"), ("w", b"from 1"))
    with pytest.raises(StoreError, match="0 and 1 .*'w'") as refused:
        publisher.publish(f"file://{tmp_path}", publisher.find_files(), VersionDescription())
    assert not [path for path in (tmp_path / "net").iterdir() if path.name.isdigit()]
    (staging,) = (tmp_path / "net" / "_staging").iterdir()
    message = str(refused.value)
    assert "ranks 0, 1 " in message and f" file://{staging}/<rank>" in message
    assert f" {time.tzname[time.localtime().tm_isdst]}, " in message
    assert [(staging / str(rank) / "w").read_bytes() for rank in range(2)] == [b"from 0", b"from 1"]


def test_uploaded_files_are_kept_if_the_version_is_refused(server: Server, tmp_path: Path) -> None:
    agents, publisher = uploading(server, tmp_path, ("a", b"from 0"))
    upload = agents[0].further["publish"]

    async def upload_and_stand_in_the_way(channel: Channel) -> None:
        (tmp_path / "net" / "_claims").write_text("")
        await upload(channel)

    agents[0].further["publish"] = upload_and_stand_in_the_way
    with pytest.raises(StoreError, match=r"_claims.* rank 0 uploaded .* in .*_staging"):
        publisher.publish(f"file://{tmp_path}", publisher.find_files(), VersionDescription())
    (staging,) = (tmp_path / "net" / "_staging").iterdir()
    assert (staging / "0" / "a").read_bytes() == b"from 0"


def test_uploaded_files_are_kept_if_those_of_another_rank_are_invalid(
    server: Server, tmp_path: Path
) -> None:
    agents, publisher = uploading(server, tmp_path, ("a", b"from 0"))
    agents[1].further["left"] = functools.partial(
        leave, left={1: ModelFiles(0, 0, "file='b:1': no")}
    )
    with pytest.raises(StoreError, match=r"'net' .* rank 1 .* file='b:1': no\. .* rank 0 "):
        publisher.publish(f"file://{tmp_path}", publisher.find_files(), VersionDescription())
    assert "publish" not in agents[1].heard
    (staging,) = (tmp_path / "net" / "_staging").iterdir()
    assert (staging / "0" / "a").read_bytes() == b"from 0"


def test_nothing_is_uploaded_without_valid_files(server: Server, tmp_path: Path) -> None:
    _, publisher = two_that_left(server, tmp_path)
    with pytest.raises(StoreError, match="rank 1 .*: odd$"):
        publisher.publish(f"file://{tmp_path}", {1: ModelFiles(0, 0, "odd")}, VersionDescription())
    assert not (tmp_path / "net").exists()


def test_a_run_that_is_cancelled_while_it_publishes_leaves_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, publisher = uploading(server, tmp_path, ("a", b"from 0"))

    def cancelled(*_: object) -> None:
        raise Cancelled("not wanted any more")

    left = publisher.find_files()
    monkeypatch.setattr(publisher_module.publication, "commit", cancelled)
    with pytest.raises(Cancelled):
        publisher.publish(f"file://{tmp_path}", left, VersionDescription())
    assert not list((tmp_path / "net" / "_staging").iterdir())


def test_an_upload_that_fails_stops_the_others(server: Server, tmp_path: Path) -> None:
    parts = {"a": facts_of(b"from 0")}, {"b": facts_of(b"from 1")}
    launched, publisher = two_that_left(server, tmp_path, *parts)
    agents = launched.agents

    async def refuse(channel: Channel) -> None:
        await channel.send(
            "publish-failed", reason="the quota is full", trouble="quota", run_id="run-1"
        )

    async def wait(channel: Channel) -> None: ...

    agents[0].further["publish"] = refuse
    agents[1].further["publish"] = wait
    agents[1].further["stop"] = functools.partial(
        Channel.send, kind="publish-failed", reason="stopped", trouble="", run_id="run-1"
    )
    with pytest.raises(StoreError, match="'net' .*: the quota is full") as refused:
        publisher.publish(f"file://{tmp_path}", publisher.find_files(), VersionDescription())
    assert refused.value.kind == "quota"
    assert "stop" not in agents[0].heard
    assert agents[1].heard[-1] == "stop"
    assert not list((tmp_path / "net" / "_staging").iterdir())


def test_lost_executor_or_a_cancelled_run_abandons_the_publish(
    server: Server, tmp_path: Path
) -> None:
    parts = {"a": facts_of(b"from 0")}, {"b": facts_of(b"from 1")}
    launched, publisher = two_that_left(server, tmp_path, *parts)
    agents = launched.agents

    async def wait(channel: Channel) -> None: ...

    agents[0].further |= {"publish": wait, "stop": Channel.close}
    agents[1].further["publish"] = Channel.close
    with pytest.raises(StoreError, match="'net' .* rank 1's executor"):
        publisher.publish(f"file://{tmp_path}", publisher.find_files(), VersionDescription())
    assert not list((tmp_path / "net" / "_staging").iterdir())
    launched.cancelled.set()
    with pytest.raises(Cancelled, match="'net'"):
        launched.training.publisher("net").find_files()


def test_only_saves_that_go_up_for_too_long_are_no_reason_to_wait(server: Server) -> None:
    async def save_on(channel: Channel) -> None:
        await channel.send("started", run_id="run-1", rank=0, pid=7)
        launched.cancelled.set()
        with contextlib.suppress(ConnectionError):
            while True:
                told.append(time.monotonic())
                await channel.send("saving", run_id="run-1", rank=0)
                await asyncio.sleep(0.1)

    told: list[float] = []
    launched = launch(server, save_on, bounds=WatchBounds(stop=3.5, saving=4.0))
    with pytest.raises(Cancelled):
        launched.training.run()
    assert 4.0 < time.monotonic() - told[0] < HANG_SECONDS
    assert "did not answer" in launched.told.warnings[0]


def test_ranks_that_only_save_are_not_too_late(server: Server) -> None:
    async def save(channel: Channel) -> None:
        await channel.send("started", run_id="run-1", rank=0, pid=7)
        for _ in range(9):
            await channel.notify("saving", run_id="run-1", rank=0)
            await asyncio.sleep(0.5)
        await end(channel, exit_code=0, outcome={"status": "returned"})

    launched = launch(server, save, timeout=3.5)
    trained = launched.training.run()
    assert trained.failure is None and list(trained.values) == [0]
    assert "stop" not in launched.agent.heard


def test_the_others_are_stopped_before_a_failed_rank_has_saved(server: Server) -> None:
    stopped = threading.Event()

    async def fail(channel: Channel) -> None:
        await channel.send("started", run_id="run-1", rank=0, pid=7)
        await channel.notify("failing", run_id="run-1", rank=0, raised=False)

    async def stop(channel: Channel) -> None:
        stopped.set()
        await end(channel, exit_code=1, signal=None, outcome={})

    launched = launch(server, fail)
    launched.agent.further["stop"] = stop
    launched.training.run()
    assert stopped.is_set()


def test_ranks_know_where_to_go_on_from(server: Server) -> None:
    launched = launch(server, return_a_value, paths={"resume": "file:///runs/run-0"})
    agent = launched.agent
    assert launched.training.run().failure is None
    assert agent.run_message is not None
    context = agent.run_message["ranks"][0]["context"]
    assert context["checkpoint_dir"] == "file:///runs/run-1/checkpoints"
    assert context["resume_dir"] == "file:///runs/run-0/checkpoints"
    assert context["log_dir_url"] == "file:///runs/run-1/tensorboard"


def test_failure_after_the_chiefs_return_is_none(server: Server) -> None:
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

    trained = launch_two(server, chief, worker, servers=1).training.run()
    assert trained.failure is None
    assert trained.values == {0: Value(b"value"), 1: Value(pickle.dumps(None))}


def test_an_executor_lost_before_the_start(server: Server) -> None:
    launched = launch(server, say_nothing)
    server.control.disconnect_all()
    launched.agent.join(HANG_SECONDS)
    failure = launched.training.run().failure
    assert failure is not None
    assert "before its ranks" in str(failure.error)
    assert failure.cause is FailureCause.INFRASTRUCTURE
    assert launched.allocation.lost_keys == {0}


def test_gpu_in_two_containers_prevents_the_start(server: Server) -> None:
    launched = launch(server, say_nothing, gpus=("g0", "g0"))
    with pytest.raises(DiscoveryError, match="g0 .*: container_0 on"):
        launched.training.run()
    assert launched.agent.heard == []


def test_fresh_tokens_reach_the_agents_before_the_ranks_start(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlServer, "certificate", b"of an encrypted channel")
    launched = launch(server, return_a_value, tokens=lambda: b"HDTS")
    agent = launched.agent
    digest = hashlib.sha256(b"HDTS").hexdigest()
    agent.further["tokens"] = lambda channel: channel.send(
        "kept-tokens", run_id="run-1", digest=digest
    )
    assert launched.training.run().failure is None
    assert agent.heard[:4] == ["reserve", "keep", "tokens", "run"]


def test_tokens_do_not_go_in_the_clear(server: Server) -> None:
    launched = launch(server, return_a_value, tokens=lambda: b"HDTS")
    launched.training.run()
    assert "tokens" not in launched.agent.heard
    assert launched.told.warnings == []  # the plan has one, with the date


def test_ranks_that_met_before_are_started_without_another_meeting(server: Server) -> None:
    launched = launch(server, return_a_value)
    launched.training.run()
    rendezvous, agent = launched.training.rendezvous, launched.agent
    assert rendezvous is not None
    again = launched.again()
    assert again.run(rendezvous).values.keys() == {0}
    assert agent.heard == ["reserve", "keep", "run", "run"]
    assert again.rendezvous is rendezvous
    launched.cancelled.set()
    with pytest.raises(Cancelled, match="ranks started"):
        again.run(rendezvous)
    assert agent.heard == ["reserve", "keep", "run", "run"], "what is not wanted was started"


def test_data_on_a_held_gang_whose_python_cannot_read_it(server: Server) -> None:
    launched = launch(server, say_nothing)
    lacking = tuple(
        replace(one, missing_modules=("pyarrow",)) for one in launched.allocation.containers
    )
    launched.allocation = replace(launched.allocation, containers=lacking)
    with pytest.raises(ConfigError, match="node1 .*pyarrow.* data="):
        launched.again(data=(b"shard",))
    launched.again(data=())
    # It may bring its own.
    launched.again(data=(b"shard",), python_env=PythonEnv("x", "hdfs:///x", "", 0))


def test_what_data_needs_is_asked_of_executors_unless_an_environment_may_bring_it() -> None:
    env = PythonEnv("x", "hdfs:///x", "", 0)
    assert plans.request(None, has_data=True).needs == ("numpy", "pyarrow")
    assert plans.request(None).needs == ()
    assert plans.request(None, has_data=True, python_env=env).needs == ()


def test_rank_without_packages_for_data_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Python that python_env= brought nobody else knows."""
    (tmp_path / context_module.DATA).touch()
    monkeypatch.setattr(context_module, "missing_modules", lambda names: ["numpy", "pyarrow"])
    with pytest.raises(ConfigError, match="numpy and pyarrow, .*python_env="):
        context_module._open_data(str(tmp_path / "context.json"), 1)


def sampled(*utilisations: float | None) -> bytes:
    """What an agent folds of its rank's samples of one GPU."""
    gpus = [
        {"time": float(second), "uuid": "g0"} | ({} if busy is None else {"utilisation": busy})
        for second, busy in enumerate(utilisations)
    ]
    return json.dumps({"step": None, "metrics": {}, "gpus": gpus}).encode() + b"\n"


def leaves_idle(
    dumped: threading.Event, utilisation: float | None, returns_after: float | None = None
) -> Callable[[Channel], Any]:
    """An agent whose rank's GPU has this utilisation until it is stopped, or returns."""

    async def answer(channel: Channel) -> None:
        begun = time.monotonic()
        await channel.send("started", run_id="run-1", rank=0, pid=7)
        # Of the time before the function runs.
        await channel.send("blocked", run_id="run-1", rank=0, data=0.5, checkpoints=0.0)
        await channel.send("entered", run_id="run-1", rank=0, time=time.time())
        await channel.send("blocked", run_id="run-1", rank=0, data=2.0, checkpoints=0.25)
        receiving = asyncio.ensure_future(channel.receive())
        while not receiving.done():
            await channel.send("reports", sampled(utilisation), run_id="run-1", rank=0)
            await asyncio.wait([receiving], timeout=0.05)
            if returns_after is not None and time.monotonic() > begun + returns_after:
                receiving.cancel()
                await asyncio.wait([receiving])
                await end(channel, b"value", exit_code=0, outcome={"status": "returned"})
                return
        message = receiving.result()
        assert message is not None and message.kind == "stop"
        if message["dump_stacks"]:
            dumped.set()
        await end(channel, exit_code=None, signal="SIGTERM", stopped=True)

    return answer


def idle_after(warning: float | None, timeout: float | None) -> WatchBounds:
    return WatchBounds(idle=IdleBounds(warning, timeout))


def test_a_gang_whose_gpus_idle_is_told_and_then_ended_with_its_stacks(server: Server) -> None:
    dumped = threading.Event()
    launched = launch(server, leaves_idle(dumped, 0.0), bounds=idle_after(0.5, 2.5))
    failure = launched.training.run().failure
    assert dumped.is_set()
    assert failure is not None and isinstance(failure.error, GpusIdle)
    assert failure.cause is FailureCause.IDLE and failure.error.seconds >= 2.5
    (warning,) = launched.told.warnings
    assert "GPU has idled for " in warning
    assert "hopsgpu runs cancel run-1" in warning
    assert launched.told.ranks.losses(1) == RankLosses(1.5, 0.25, 0.0)


@pytest.mark.parametrize("utilisation", [None, 0.5])
def test_a_gang_that_trains_or_of_which_nothing_is_known_goes_on(
    server: Server, utilisation: float | None
) -> None:
    answers = leaves_idle(threading.Event(), utilisation, returns_after=3.0)
    launched = launch(server, answers, bounds=idle_after(0.1, 0.2))
    assert launched.training.run().values == {0: Value(b"value")}
    assert launched.told.warnings == []
