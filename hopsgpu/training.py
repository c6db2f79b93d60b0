"""One launch on a gang that is whole: a message to its agents, and what they answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.errors import Cancelled, DiscoveryError, HopsGpuError, RankFailed, StoreError
from hopsgpu.frameworks import torch
from hopsgpu.gang import RankPlace, World, duplicate_gpu
from hopsgpu.modules import PackedModules
from hopsgpu.progress import Progress
from hopsgpu.results import RankReport
from hopsgpu.spark.lease import Lease
from hopsgpu.stores.models import ModelVersion
from hopsgpu.worker.channel import Message
from hopsgpu.worker.logs import LineSplitter
from hopsgpu.worker.server import Event

_EVENT_SECONDS = 0.2
# SIGTERM, 5 s, SIGKILL, and the way of the news to the driver.
_STOP_SECONDS = 15.0
_KEEP_SECONDS = 120.0
_ANSWER_SECONDS = 30.0
_QUIET_SECONDS = 2.0
# Spark asks YARN why a container ended before it fails the job.
_REASON_SECONDS = 5.0
_RETURNED = ("returned", "exited normally")


@dataclass(frozen=True)
class Call:
    """What every rank runs.

    Attributes:
        function: the pickled function with its arguments.
        modules: the user's own modules.
        environment: the user's variables and what all ranks share.
        run_id: of the run.
        run_url: its directory on the lake.
        attempt: counts from 0.
        memory: bytes that a rank may use with its descendants, None for no bound.
    """

    function: bytes
    modules: PackedModules
    environment: Mapping[str, str]
    run_id: str
    run_url: str
    attempt: int
    memory: int | None = None


@dataclass
class Trained:
    """What the ranks left.

    Attributes:
        reports: by rank.
        values: pickled, by rank, of those that returned.
        failure: the first, by its arrival at the driver; one for memory before others.
        warnings: what a person should know.
    """

    reports: dict[int, RankReport] = field(default_factory=dict)
    values: dict[int, bytes] = field(default_factory=dict)
    failure: RankFailed | None = None
    warnings: list[str] = field(default_factory=list)


class Training:
    """Drives the agents through one launch."""

    def __init__(
        self,
        lease: Lease,
        world: World,
        call: Call,
        progress: Progress,
        cancelled: threading.Event,
    ) -> None:
        self._lease = lease
        self._world = world
        self._call = call
        self._progress = progress
        self._cancelled = cancelled
        self._pids: dict[int, int] = {}
        self._lines = {place.rank: LineSplitter() for place in world.places}
        self._pending = {place.rank for place in world.places}
        self._unkept = set(self._pending)
        self._connected = {container.key for container in lease.containers}
        self._quiet_since: float | None = None
        self._explained = False
        self.trained = Trained()

    def _next_event(self) -> Event | None:
        """The next event; once the barrier job has ended and no more comes, all agents are lost.

        Spark can know of a lost node, and have ended the other tasks, while a connection of ours
        still seems to be there.
        """
        event = self._lease.server.next_event(_EVENT_SECONDS)
        if event is not None and not self._is_ours(event):
            return None
        if event is not None or not self._lease.job.ended.is_set():
            self._quiet_since = None
            return event
        now = time.monotonic()
        self._quiet_since = self._quiet_since or now
        if now - self._quiet_since < _QUIET_SECONDS or not self._connected:
            return None
        return Event(self._connected.pop(), None)

    def _is_ours(self, event: Event) -> bool:
        """Whether an event is not a late word of an earlier launch on the same gang."""
        message = event.message
        return message is None or message.fields.get("run_id", "") == self._call.run_id

    def run(self) -> Trained:
        """Starts all ranks, waits for all, and stops them at the first failure.

        Raises:
            DiscoveryError: two containers were given the same GPU; nothing was started.
            Cancelled: the run was cancelled; its ranks have been stopped.
        """
        _refuse_duplicates(self._lease)
        self._start(self._reserve())
        deadline: float | None = None
        while self._pending or self._unkept:
            stopping = self._cancelled.is_set() or self.trained.failure is not None
            if stopping and deadline is None:
                deadline = time.monotonic() + _STOP_SECONDS
                self._tell_all("stop")
            if deadline is None and not self._pending:
                # All have ended; a lake that hangs must not keep the GPUs for their logs.
                deadline = time.monotonic() + _KEEP_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                self.trained.warnings += [
                    f"the log of rank {rank} is not on the lake: no answer from its agent"
                    for rank in sorted(self._unkept)
                ]
                # An agent that does not answer serves no further launch.
                silent = self._pending | self._unkept
                self._lease.server.hang_up({self._place(rank).container.key for rank in silent})
                break
            event = self._next_event()
            if event is not None:
                self._take(event)
        if self._cancelled.is_set():
            raise Cancelled(f"{self._call.run_id} was cancelled; its ranks were stopped")
        return self.trained

    def publish(self, models_url: str, name: str) -> ModelVersion | None:
        """Has rank 0's agent publish its model directory; None where nothing is there.

        Raises:
            StoreError: the lake refused, or the agent was lost.
        """
        key = self._place(0).container.key
        self._lease.server.send(
            key, "publish", rank=0, name=name, models_url=models_url, run_id=self._call.run_id
        )
        while True:
            event = self._next_event()
            if self._cancelled.is_set():
                raise Cancelled(f"{self._call.run_id} was cancelled while it published {name!r}")
            if event is None or event.peer != key:
                continue
            if event.message is None:
                raise StoreError(f"{name!r} is not published: rank 0's executor was lost")
            if event.message.kind == "publish-failed":
                raise StoreError(f"{name!r} is not published: {event.message['reason']}")
            if event.message.kind == "published":
                version = event.message["version"]
                return version and ModelVersion(name, version, event.message["url"])

    def _place(self, rank: int) -> RankPlace:
        return self._world.places[rank]

    def _tell_all(self, kind: str) -> None:
        for container in self._lease.containers:
            self._lease.server.send(container.key, kind)

    def _reserve(self) -> tuple[str, int]:
        """Address and port of rank 0's rendezvous; its agent holds the port."""
        first = self._place(0).container
        self._lease.server.send(first.key, "reserve", run_id=self._call.run_id)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            event = self._next_event()
            if event is None:
                if self._cancelled.is_set():
                    raise Cancelled(f"{self._call.run_id} was cancelled before its ranks started")
                continue
            if event.message is None and event.peer in {c.key for c in self._lease.containers}:
                raise HopsGpuError("an executor was lost before its ranks were started")
            if event.message is not None and event.message.kind == "reserved":
                return first.address, int(event.message["port"])
        raise HopsGpuError(f"the agent on {first.host} did not answer for {_ANSWER_SECONDS:g} s")

    def _start(self, master: tuple[str, int]) -> None:
        call = self._call
        for container in self._lease.containers:
            ranks = [
                {
                    "environment": {
                        **call.environment,
                        **torch.environment(self._world, place, master),
                    },
                    "context": self._context(place),
                }
                for place in self._world.of_container(container.key)
            ]
            self._lease.server.send(
                container.key,
                "run",
                call.function + call.modules.archive,
                run_id=call.run_id,
                run_url=call.run_url,
                attempt=call.attempt,
                memory=call.memory,
                call_bytes=len(call.function),
                roots=call.modules.roots,
                ranks=ranks,
            )

    def _context(self, place: RankPlace) -> dict[str, Any]:
        return {
            "rank": place.rank,
            "local_rank": place.local_rank,
            "world_size": self._world.size,
            "host": place.container.host,
            "gpus": place.gpus,
            "role": "worker",
            "run_id": self._call.run_id,
            "attempt": self._call.attempt,
        }

    def _take(self, event: Event) -> None:
        message = event.message
        if message is None:
            self._lost(event.peer)
        elif message.kind == "started":
            self._pids[message["rank"]] = message["pid"]
        elif message.kind == "output":
            self._show(message["rank"], self._lines[message["rank"]].lines(message.payload))
        elif message.kind == "ended":
            self._ended(message)
        elif message.kind == "kept":
            self._unkept.discard(message["rank"])
            if message["problem"] is not None:
                self.trained.warnings.append(
                    f"the log of rank {message['rank']} is not on the lake: {message['problem']}"
                )

    def _show(self, rank: int, lines: list[str]) -> None:
        for line in lines:
            self._progress.line(rank, self._place(rank).container.host, line)

    def _ended(self, message: Message) -> None:
        rank = int(message["rank"])
        place = self._place(rank)
        self._show(rank, self._lines[rank].rest())
        self._pending.discard(rank)
        outcome = message["outcome"]
        returned = outcome.get("status") in _RETURNED
        stopped = bool(message["stopped"]) and not returned
        self.trained.reports[rank] = RankReport(
            rank=rank,
            role="worker",
            host=place.container.host,
            gpus=place.gpus,
            pid=self._pids[rank],
            exit_code=message["exit_code"],
            signal=message["signal"],
            peak_memory=message["peak_memory"],
            stopped=stopped,
        )
        if returned:
            self.trained.values[rank] = message.payload
            self.trained.warnings += _odd_ends(rank, message)
        elif not stopped and not self._explained:
            # A rank killed for its memory takes its neighbours along; theirs may come first.
            self._explained = outcome.get("status") == "over memory"
            if self._explained or self.trained.failure is None:
                self.trained.failure = rank_failed(place, message, self._log_url(rank))

    def _log_url(self, rank: int) -> str:
        return f"{self._call.run_url}/logs/rank-{rank}.log"

    def _lost(self, peer: int) -> None:
        self._connected.discard(peer)
        for place in self._world.of_container(peer):
            self._unkept.discard(place.rank)
            if place.rank not in self._pending:
                continue
            self._pending.discard(place.rank)
            if self.trained.failure is None:
                container = place.container
                reason = self._lease.job.reason(_REASON_SECONDS).rstrip(".")
                advice = "; memory_per_worker is what to raise" if "memory" in reason else ""
                self.trained.failure = RankFailed(
                    f"the executor of rank {place.rank} on {container.host} was lost"
                    f" (container {container.container_id}): {reason}{advice}. Its log: yarn logs"
                    f" -containerId {container.container_id}",
                    rank=place.rank,
                    host=container.host,
                    container=container.container_id,
                    gpus=place.gpus,
                )


def _refuse_duplicates(lease: Lease) -> None:
    twice = duplicate_gpu(lease.containers)
    if twice is not None:
        gpu, one, other = twice
        raise DiscoveryError(
            f"{gpu} was given to two containers: {one.container_id} on {one.host} and"
            f" {other.container_id} on {other.host}. Is the lease directory of the nodes shared"
            " by all containers?"
        )


def _odd_ends(rank: int, message: Message) -> list[str]:
    warnings = []
    if message["outcome"]["status"] == "exited normally":
        warnings.append(f"rank {rank} called sys.exit(0); its value is None")
    if message["signal"] or message["exit_code"]:
        how = message["signal"] or f"exit code {message['exit_code']}"
        over = message["outcome"].get("error")
        why = f": it used more memory than it may: {over}" if over else ""
        warnings.append(f"rank {rank} returned, and then its process ended with {how}{why}")
    return warnings


def rank_failed(place: RankPlace, message: Message, log_url: str) -> RankFailed:
    """The error of a rank's end: where, how, the user's traceback and the last of its log."""
    container, outcome = place.container, message["outcome"]
    tail = tuple(message["log_tail"])
    where = (
        f"rank {place.rank} on {container.host} (container {container.container_id},"
        f" GPU {', '.join(place.gpus) or 'none'})"
    )
    parts = [f"{where} {_how(message)}"]
    if outcome.get("traceback"):
        parts.append(outcome["traceback"].rstrip())
    elif tail:
        parts.append("the last lines of its log:\n" + "\n".join(f"  {line}" for line in tail))
    parts.append(f"whole log: {log_url}")
    return RankFailed(
        "\n".join(parts),
        rank=place.rank,
        host=container.host,
        container=container.container_id,
        gpus=place.gpus,
        exit_code=message["exit_code"],
        signal=message["signal"],
        traceback=outcome.get("traceback"),
        log_tail=tail,
        log_url=log_url,
    )


def _how(message: Message) -> str:
    outcome = message["outcome"]
    match outcome.get("status"):
        case "raised":
            return f"raised {outcome['error']}"
        case "exited":
            return f"called sys.exit: exit code {message['exit_code']}"
        case "unpicklable":
            return f"returned {outcome['error']}; return plain data, or leave it in model_dir"
        case "too large":
            return f"returned a value of {outcome['error']}; leave large results in model_dir"
        case "over memory":
            return f"used more memory than it may: {outcome['error']}"
        case "not started":
            return f"could not be started: {outcome['error']}"
    if message["signal"]:
        return f"was ended by {message['signal']}"
    return f"ended with exit code {message['exit_code']} and without a value"
