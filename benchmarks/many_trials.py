"""A search of 10,000 trials on 256 executors, which are simulated: what it costs the driver."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import optuna

from hopsgpu.attempts.rank_call import PackedFunction
from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.backends.gang_allocation import Job
from hopsgpu.backends.gang_request import Request
from hopsgpu.control.channel import Channel, Message, new_secret
from hopsgpu.control.peer import DriverEndpoint, connect_to_driver
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.core.gang import GangExecutor, GangState
from hopsgpu.core.spec import ExecutorShape, GangSpec, GpuRequest, LaunchPlan
from hopsgpu.display.progress import search_progress_of
from hopsgpu.executors.item_placement import PlacementTerms
from hopsgpu.linux import allow_descriptors
from hopsgpu.packaging.modules import PackedModules
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.storage.background import Background
from hopsgpu.storage.lake import LakePath
from hopsgpu.tuning.journal import Journal
from hopsgpu.tuning.sampler_thread import SamplerThread, open_study
from hopsgpu.tuning.search_board import SearchBoard
from hopsgpu.tuning.search_loop import SearchLoop
from hopsgpu.tuning.search_options import SearchArguments, SearchOptions

EXECUTORS = 256
TRIALS = 10_000
# Seconds of a trial: 85 of them end in a second.
_SHORTEST, _LONGEST = 1.0, 5.0
_HEARTBEAT = 30.0
_SPAWN = multiprocessing.get_context("spawn")
_NUMBER = b"\x80\x04K\x01."  # pickle.dumps(1)


def measure(executors: int = EXECUTORS, trials: int = TRIALS) -> Mapping[str, float]:
    """Print and return the driver's share of a core, and how long executors had no trial."""
    ours, theirs = _SPAWN.Pipe()
    driver = _SPAWN.Process(target=_drive, args=(theirs, executors, trials))
    driver.start()
    theirs.close()
    try:
        told: dict[str, float] = ours.recv()
    finally:
        driver.join()
    print(
        f"\n{trials} trials of {_SHORTEST:g} to {_LONGEST:g} s on {executors} simulated executors"
    )
    print(
        f"  {told['seconds']:.0f} s; the driver took {told['share']:.0%} of a core (target: under"
    )
    print(f"  one), and {told['memory']:.0f} MiB; sampler: random, asked ahead")
    print(
        f"  from a trial's end to the next on its executor: {told['gap']:.1f} ms,"
        f" 99 %: {told['gap 99']:.1f} ms"
    )
    return told


def _drive(results: Connection, executors: int, trials: int) -> None:
    """The driver's process."""
    allow_descriptors(4 * executors)
    secret = new_secret()
    ours, theirs = _SPAWN.Pipe()
    with (
        tempfile.TemporaryDirectory() as directory,
        serve(secret, "127.0.0.1", heartbeat=_HEARTBEAT) as server,
    ):
        simulating = _SPAWN.Process(target=_simulate, args=(theirs, executors))
        simulating.start()
        try:
            driver = DriverEndpoint("127.0.0.1", server.port, secret, None, heartbeat=_HEARTBEAT)
            figures = _search(server, Path(directory), executors, trials, lambda: ours.send(driver))
            server.disconnect_all()
            gaps = sorted(ours.recv())
        finally:
            simulating.kill()
            simulating.join()
    figures |= {"gap": statistics.median(gaps), "gap 99": gaps[int(0.99 * (len(gaps) - 1))]}
    results.send(figures)


def _search(
    server: ControlServer, directory: Path, executors: int, trials: int, bring: Any
) -> dict[str, float]:
    terms, shape = PlacementTerms(trials, executors), ExecutorShape(1, 0, 0, 1024)
    given = _arguments(terms)
    run = LakePath(f"file://{directory}/run")
    run.make()
    plan = LaunchPlan(
        given.spec, 1, 1, shape, "", {}, {"root": f"file://{directory}", "run": run.url}
    )
    board = SearchBoard("simulated", terms, 0, "minimize", None, given.progress)
    journal = Journal(run / "journal.log")
    study = open_study(journal, "simulated", "minimize", given.sampler, given.pruner)
    cancelled = threading.Event()
    request = Request("simulated", replace(plan, executors=executors), cancelled, board)
    asker = SamplerThread(study, given.options.space, lambda: loop.on_sampler_news())
    background = Background("simulated")
    active = ActiveRun(plan, given.application, board, cancelled, background)
    loop = SearchLoop(given, active, asker, journal, 0, None)
    asker.start()
    board.state(GangState.WAITING)
    cpu, began = time.process_time(), time.monotonic()
    loop.run(_Simulated(request, server, bring))
    took = time.monotonic() - began
    used = time.process_time() - cpu
    asker.close(60)
    background.flush(60)
    assert board.status().complete == trials, board.status()
    statm = Path("/proc/self/statm").read_text().split()
    resident = int(statm[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {"seconds": took, "share": used / took, "memory": resident}


def _arguments(terms: PlacementTerms) -> SearchArguments:
    return SearchArguments(
        terms=terms,
        spec=GangSpec("simulated", gpus=GpuRequest(0), memory_per_worker=2**30),
        options=SearchOptions(
            train_fn=measure,
            space={"x": optuna.distributions.FloatDistribution(0, 1)},
            trials=terms.items,
            max_concurrent=terms.max_running,
        ),
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=optuna.pruners.NopPruner(),
        timeout=None,
        function=PackedFunction(_NUMBER, PackedModules(b"", 0, ())),
        code="",
        progress=search_progress_of("off"),
        application=_NoApplication(),  # type: ignore[arg-type]
        python_env=None,
        named=None,
        resume=None,
    )


class _NoApplication:
    """There is no Spark."""

    interface = None
    gpu_idle_warning = None


class _Going:
    """What runs an agent; a `Job`."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def reason(self, seconds: float) -> str:
        return ""


class _Simulated(ElasticAllocator):
    """Executors that all come at once."""

    def __init__(self, request: Request, server: ControlServer, bring: Any) -> None:
        super().__init__(request, server)
        self._bring = bring
        self._brought = False
        self._going = _Going()

    @property
    def held_count(self) -> int:
        return len(self.ready_executors)

    @property
    def starting_count(self) -> int:
        return 0

    @property
    def wait_reason(self) -> str:
        return ""

    def set_wanted(self, executors: int, at_once: int, *, least: int = 1) -> None:
        if not self._brought:
            self._brought = True
            self._bring()

    @property
    def reclaimed_count(self) -> int:
        return 0

    def offer(self, executors: int, giving: int) -> None:
        return

    def _start_release(self, leaving: Mapping[int, GangExecutor]) -> None:
        return

    def _abandon_job(self, job: Job) -> None:
        return

    def _job_of(self, hello: Message) -> Job | None:
        return self._going

    def _record_arrival(self, container: GangExecutor) -> None:
        return

    def _explain_loss(self, reason: str, host: str) -> str:
        return reason

    def _read_tokens(self) -> bytes:
        return b""


def _simulate(pipe: Connection, agents: int) -> None:
    """The process of all agents; it tells how long each waited for its next trial, in ms."""
    allow_descriptors(agents)
    driver: DriverEndpoint = pipe.recv()
    gaps: list[float] = []
    asyncio.run(_agents(driver, agents, gaps))
    pipe.send(gaps)


async def _agents(driver: DriverEndpoint, agents: int, gaps: list[float]) -> None:
    await asyncio.gather(*(_agent(driver, random.Random(n), gaps) for n in range(agents)))


async def _agent(driver: DriverEndpoint, chance: random.Random, gaps: list[float]) -> None:
    channel = await connect_to_driver(driver)
    ended: float | None = None
    while (message := await channel.receive()) is not None:
        if message.kind == "reserve":
            await _say(channel, message, "reserved", ports=[1] * int(message["ports"]), store=None)
        elif message.kind == "run":
            if ended is not None:
                gaps.append(1000 * (time.monotonic() - ended))
            await _say(channel, message, "started", rank=0, pid=1)
            await asyncio.sleep(chance.uniform(_SHORTEST, _LONGEST))
            ended = time.monotonic()
            await _end(channel, message)


async def _say(channel: Channel, message: Message, kind: str, **fields: Any) -> None:
    about = {"run_id": message["run_id"], "address": "127.0.0.1", "interface": ""}
    await channel.send(kind, **about, **fields)


async def _end(channel: Channel, message: Message) -> None:
    await channel.send(
        "ended",
        _NUMBER,
        run_id=message["run_id"],
        attempt=message["attempt"],
        rank=0,
        value=None,
        exit_code=0,
        signal=None,
        peak_memory=1,
        outcome={"status": "returned"},
        log_tail=(),
        time=time.time(),
        stopped=False,
        oom_kills=0,
        gpu_events=[],
        pruned=False,
    )
