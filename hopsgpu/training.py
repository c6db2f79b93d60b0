"""One attempt on a gang that is whole: a message to its agents, and what they answer."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.background import Background
from hopsgpu.ending import Ends, ended, odd_end
from hopsgpu.errors import Cancelled, DiscoveryError, RankFailed, StoreError
from hopsgpu.frameworks import environment
from hopsgpu.gang import Avoid, RankPlace, World, duplicate_gpu
from hopsgpu.meeting import Meeting, meet
from hopsgpu.modules import PackedModules
from hopsgpu.output import Outputs
from hopsgpu.progress import Progress
from hopsgpu.results import RankReport
from hopsgpu.retries import Fault
from hopsgpu.spark.lease import Lease
from hopsgpu.stores.lake import Lake
from hopsgpu.stores.models import ModelVersion
from hopsgpu.values import Value, value_of
from hopsgpu.worker.channel import Message
from hopsgpu.worker.server import Event

_EVENT_SECONDS = 0.2
# SIGTERM, 5 s, SIGKILL, and the way of the news to the driver.
_STOP_SECONDS = 15.0
_QUIET_SECONDS = 2.0
# Spark asks YARN why a container ended before it fails the job.
_REASON_SECONDS = 5.0
# Whether all ranks raise the same is seen only if they are given the time for it.
_ALIKE_SECONDS = 0.5


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
        timeout: seconds that the ranks may take, None for no bound.
        visible: which GPUs a rank sees, as `frameworks.environment` takes it.
        frameworks: what the function imports of the packages that are slow to import.
        interface: of the network, that an administrator wants, or None.
    """

    function: bytes
    modules: PackedModules
    environment: Mapping[str, str]
    run_id: str
    run_url: str
    attempt: int
    memory: int | None = None
    timeout: float | None = None
    visible: str | None = None
    frameworks: tuple[str, ...] = ()
    interface: str | None = None

    @property
    def logs(self) -> Lake:
        """The directory of the ranks' logs; each attempt after the first has one of its own."""
        logs = Lake(self.run_url) / "logs"
        return logs / f"attempt-{self.attempt}" if self.attempt else logs

    def log_url(self, rank: int) -> str:
        """Where a rank's log is to be."""
        return (self.logs / f"rank-{rank}.log").url


@dataclass
class Trained:
    """What the ranks left.

    Attributes:
        reports: by rank.
        values: by rank, of those that returned.
        failure: the first by time.
        fault: whose it was, where there is a failure.
        avoid: the GPU or node that was to blame for it.
        warnings: what a person should know.
    """

    reports: dict[int, RankReport] = field(default_factory=dict)
    values: dict[int, Value] = field(default_factory=dict)
    failure: RankFailed | None = None
    fault: Fault = Fault.RANK
    avoid: Avoid = Avoid()
    warnings: list[str] = field(default_factory=list)


class Training:
    """Drives the agents through one attempt; use `train_on`."""

    def __init__(
        self,
        lease: Lease,
        world: World,
        call: Call,
        outputs: Outputs,
        told: Callable[[Sequence[Mapping[str, float]]], None],
        cancelled: threading.Event,
    ) -> None:
        self._lease = lease
        self._world = world
        self._call = call
        self._outputs = outputs
        self._told = told
        self._cancelled = cancelled
        self._pids: dict[int, int] = {}
        self._ends = Ends(world, call.log_url)
        self._connected = {container.key for container in lease.containers}
        self._quiet_since: float | None = None
        self._failed_at: float | None = None
        self._stop_until: float | None = None
        self.trained = Trained()

    def run(self) -> Trained:
        """Starts all ranks, waits for all, and stops them at the first failure.

        Raises:
            DiscoveryError: two containers were given the same GPU; nothing was started.
            Cancelled: the run was cancelled; its ranks have been stopped.
        """
        _refuse_duplicates(self._lease)
        meeting = meet(self._world, self._call, self._send, self._next_event, self._cancelled)
        if isinstance(meeting, RankFailed):
            self.trained.failure, self.trained.fault = meeting, Fault.INFRASTRUCTURE
            return self.trained
        self._start(meeting)
        timeout = self._call.timeout
        overdue_at = None if timeout is None else time.monotonic() + timeout
        while self._ends.pending:
            if self._stop_until is None:
                self._stop_where_due(overdue_at)
            elif time.monotonic() > self._stop_until:
                self._give_up()
                break
            event = self._next_event()
            if event is not None:
                self._take(event)
            else:
                self._outputs.refresh()
        if self._cancelled.is_set():
            raise Cancelled(f"{self._call.run_id} was cancelled; its ranks were stopped")
        self._conclude()
        return self.trained

    def keep_logs(self, background: Background) -> None:
        """Has the ranks' output brought to the lake."""
        logs, directory = self._outputs.take_over(), self._call.logs
        background.put(lambda: logs.upload(directory))

    def publish(self, models_url: str, name: str) -> ModelVersion | None:
        """Has rank 0's agent publish its model directory; None where nothing is there.

        Raises:
            StoreError: the lake refused, or the agent was lost.
            Cancelled: the run was cancelled meanwhile.
        """
        key = self._place(0).container.key
        self._send(key, "publish", rank=0, name=name, models_url=models_url)
        while True:
            event = self._next_event()
            if self._cancelled.is_set():
                raise Cancelled(f"{self._call.run_id} was cancelled while it published {name!r}")
            if event is None or event.peer != key:
                continue
            if event.message is None:
                self._lease.gone.add(key)
                raise StoreError(f"{name!r} is not published: rank 0's executor was lost")
            if event.message.kind == "publish-failed":
                raise StoreError(f"{name!r} is not published: {event.message['reason']}")
            if event.message.kind == "published":
                version = event.message["version"]
                return version and ModelVersion(name, version, event.message["url"])

    def _place(self, rank: int) -> RankPlace:
        return self._world.processes[rank]

    def _send(self, key: int, kind: str, payload: bytes = b"", **fields: Any) -> None:
        self._lease.server.send(key, kind, payload, run_id=self._call.run_id, **fields)

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
        """Whether an event is of this gang, and no late word of an earlier launch on it."""
        message = event.message
        if message is None:
            return event.peer in self._connected
        return bool(message.fields.get("run_id", "") == self._call.run_id)

    def _start(self, meeting: Meeting) -> None:
        call = self._call
        self._world = meeting.world
        for container in self._lease.containers:
            ranks = [
                {
                    # The user's variables may name other interfaces than ours.
                    "environment": {
                        **environment(self._world, place, meeting.endpoints, call.visible),
                        **call.environment,
                    },
                    "context": self._context(place),
                }
                for place in self._world.of_container(container.key)
            ]
            self._send(
                container.key,
                "run",
                call.function + call.modules.archive,
                run_url=call.run_url,
                attempt=call.attempt,
                memory=call.memory,
                frameworks=call.frameworks,
                shared=dict(call.environment),
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
            "role": place.role,
            "run_id": self._call.run_id,
            "attempt": self._call.attempt,
        }

    def _stop_where_due(self, overdue_at: float | None) -> None:
        """Stops all ranks where one failed, time is over, or the chief has returned."""
        now = time.monotonic()
        if overdue_at is not None and now >= overdue_at and self._failed_at is None:
            self._ends.run_out_of_time()
        failed = self._failed_at is not None and now >= self._failed_at
        if self._cancelled.is_set() or failed or self._ends.overdue or self._is_done_with_servers():
            self._stop_until = now + _STOP_SECONDS
            for container in self._lease.containers:
                self._send(container.key, "stop", dump_stacks=bool(self._ends.overdue))

    def _is_done_with_servers(self) -> bool:
        """Whether the chief of a ParameterServerStrategy has returned; the rest never do."""
        return bool(self._world.servers) and 0 in self.trained.values

    def _give_up(self) -> None:
        """An agent that does not answer serves no further attempt."""
        silent = {self._place(rank).container.key for rank in self._ends.pending}
        self._lease.server.hang_up(silent)
        self._lease.gone.update(silent)
        for rank in sorted(self._ends.pending):
            self._outputs.lost(rank, "its agent did not answer")
            self.trained.warnings.append(
                f"rank {rank} was not seen to end: its agent did not answer for {_STOP_SECONDS:g} s"
            )

    def _take(self, event: Event) -> None:
        message = event.message
        if message is None:
            self._lose(event)
        elif message.kind == "started":
            self._pids[message["rank"]] = message["pid"]
        elif message.kind == "output":
            self._outputs.take(message["rank"], message.payload)
        elif message.kind == "record":
            self._outputs.take_record(message["rank"], message.payload)
        elif message.kind == "reports":
            self._outputs.take_reports(message["rank"], message.payload)
            self._told(self._outputs.metrics())
        elif message.kind == "warning":
            self.trained.warnings.append(message["text"])
        elif message.kind == "ended":
            self._end(message)

    def _end(self, message: Message) -> None:
        end = ended(self._place(int(message["rank"])), message)
        rank = end.place.rank
        alike = self._ends.end(end)
        self._outputs.ended(rank)
        self.trained.reports[rank] = RankReport(
            rank=rank,
            role=end.place.role,
            host=end.place.container.host,
            gpus=end.place.gpus,
            pid=self._pids[rank],
            exit_code=end.exit_code,
            signal=end.signal,
            peak_memory=message["peak_memory"],
            gpu_utilisation=self._outputs.utilisation(rank),
            stopped=end.stopped and not end.has_returned,
        )
        self.trained.warnings += self._outputs.warnings(rank)
        if end.has_returned:
            if rank < self._world.size:
                self.trained.values[rank] = value_of(message)
            self.trained.warnings += odd_end(end)
        elif not end.stopped and self._failed_at is None:
            self._failed_at = time.monotonic() + (_ALIKE_SECONDS if alike else 0.0)

    def _lose(self, event: Event) -> None:
        """An executor's connection has ended, and so have its ranks."""
        self._connected.discard(event.peer)
        self._lease.gone.add(event.peer)
        for place in self._world.of_container(event.peer):
            if place.rank in self._ends.pending:
                self._ends.lose(place, event.reason)
                self._outputs.lost(place.rank, event.reason)
        self._failed_at = time.monotonic()

    def _conclude(self) -> None:
        """Which failure was the first, and whose fault it was."""
        conclusion = self._ends.conclude(self._call.timeout, self._reason)
        if conclusion is not None:
            self.trained.failure = conclusion.failure
            self.trained.fault, self.trained.avoid = conclusion.fault, conclusion.avoid
        elif self._world.servers:
            # Stopped as successful: the chief is the one with a value.
            none = Value(pickle.dumps(None))
            for rank in range(self._world.size):
                self.trained.values.setdefault(rank, none)

    def _reason(self) -> str:
        """Why Spark lost an executor; "" where it has not noticed."""
        job = self._lease.job
        reason = job.reason(_REASON_SECONDS)
        return reason if job.ended.is_set() else ""


@contextlib.contextmanager
def train_on(
    lease: Lease,
    world: World,
    call: Call,
    show: Progress,
    told: Callable[[Sequence[Mapping[str, float]]], None],
    cancelled: threading.Event,
) -> Iterator[Training]:
    """What drives one attempt; what is kept of its output is removed, or handed over, at the end.

    Args:
        lease: the gang.
        world: its ranks.
        call: what they run.
        show: shown every line of every rank.
        told: told the ranks' last metrics, by rank.
        cancelled: set when the run is no longer wanted.
    """
    with Outputs(world, show) as outputs:
        yield Training(lease, world, call, outputs, told, cancelled)


def _refuse_duplicates(lease: Lease) -> None:
    twice = duplicate_gpu(lease.containers)
    if twice is not None:
        gpu, one, other = twice
        raise DiscoveryError(
            f"{gpu} was given to two containers: {one.container_id} on {one.host} and"
            f" {other.container_id} on {other.host}. Is the lease directory of the nodes shared"
            " by all containers?"
        )
