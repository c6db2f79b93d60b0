"""One attempt on a gang that is whole: a message to its agents, and what they answer."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.agent import sent_log
from hopsgpu.backends.agent_registration import check_data
from hopsgpu.backends.grant import Lease, refuse_duplicates
from hopsgpu.backends.spark.token_renewal import Handover
from hopsgpu.control.channel import Message
from hopsgpu.control.server import Event
from hopsgpu.core.gang import Avoid, RankPlace, World
from hopsgpu.core.run_values import RankReport
from hopsgpu.display.progress import Progress
from hopsgpu.errors import Cancelled, HopsGpuError, RankFailed
from hopsgpu.launcher import rank_start
from hopsgpu.launcher.attempt_request import run_messages
from hopsgpu.launcher.background import Background, Work
from hopsgpu.launcher.outcome import Ends, ended, odd_end
from hopsgpu.launcher.publisher import Agents, Publisher
from hopsgpu.launcher.rank_call import Call
from hopsgpu.launcher.rank_output import Outputs
from hopsgpu.launcher.rank_start import Beginnings, Told
from hopsgpu.launcher.rendezvous import Meeting, Unmet, meet
from hopsgpu.launcher.retry_policy import Fault
from hopsgpu.launcher.return_values import Value, value_of

log = logging.getLogger(__name__)

_EVENT_SECONDS = 0.2
# SIGTERM, 5 s, SIGKILL, and the way of the news to the driver.
_STOP_SECONDS = 15.0
_QUIET_SECONDS = 2.0
# Spark asks YARN why a container ended before it fails the job.
_REASON_SECONDS = 5.0
# Whether all ranks raise the same is seen only if they are given the time for it.
_ALIKE_SECONDS = 0.5


@dataclass
class Trained:
    """What the ranks left.

    Attributes:
        reports: by rank.
        values: by rank, of those that returned.
        failure: the first by time.
        fault: whose it was, where there is a failure.
        avoid: the GPU or node that was to blame for it.
        suspect: the node that may be to blame for a lost executor, or None.
        warnings: what a person should know.
    """

    reports: dict[int, RankReport] = field(default_factory=dict)
    values: dict[int, Value] = field(default_factory=dict)
    failure: RankFailed | None = None
    fault: Fault = Fault.RANK
    avoid: Avoid = Avoid()
    suspect: str | None = None
    warnings: list[str] = field(default_factory=list)


class Training:
    """Drives the agents through one attempt; use `train_on`.

    Attributes:
        trained: what the ranks have left so far.
        meeting: where they met, once they have.
    """

    def __init__(
        self,
        lease: Lease,
        world: World,
        call: Call,
        outputs: Outputs,
        told: Told,
        cancelled: threading.Event,
    ) -> None:
        self._lease = lease
        self._world = world
        self._call = call
        self._outputs = outputs
        self._told = told
        self._cancelled = cancelled
        self._beginnings = Beginnings(world, told)
        self._ends = Ends(world, call.log_url)
        self._connected = {container.key for container in lease.containers}
        self._quiet_since: float | None = None
        self._failed_at: float | None = None
        self._stop_until: float | None = None
        self.trained = Trained()
        self.meeting: Meeting | None = None
        self._tokens = Handover(lease, call.run_id, self.trained.warnings)

    def run(self, met: Meeting | None = None) -> Trained:
        """Starts all ranks, waits for all, and stops them at the first failure.

        Args:
            met: where ranks on the same slots met before, to save the way to the agents and back;
                of one rank alone, as those of several meet in a store that serves one attempt.

        Raises:
            DiscoveryError: two containers were given the same GPU; nothing was started.
            Cancelled: the run was cancelled; its ranks have been stopped.
        """
        refuse_duplicates(self._lease.containers)
        if met is not None and self._cancelled.is_set():
            raise Cancelled(f"{self._call.run_id} was cancelled before its ranks started")
        meeting = met or meet(
            self._world, self._call, self._send, self._next_event, self._cancelled
        )
        if isinstance(meeting, Unmet):
            log.info(
                "%s: attempt %d: the ranks cannot meet, by the executor on %s%s",
                self._call.run_id,
                self._call.attempt,
                meeting.failure.host,
                ", whose agent does not answer" if meeting.silent else "",
            )
            self._drop(meeting.silent)
            self.trained.failure, self.trained.fault = meeting.failure, Fault.INFRASTRUCTURE
            self.trained.avoid = meeting.avoid
            self.trained.suspect = None if meeting.avoid.is_any else meeting.failure.host
            self._outputs.keep_agent_logs()
            return self.trained
        self.meeting = meeting
        try:
            self._tokens.look()
            self._start(meeting)
            self._await_ends()
        except BaseException:
            # On a gang that is held the ranks would go on.
            self._stop_all()
            raise
        if self._cancelled.is_set():
            raise Cancelled(f"{self._call.run_id} was cancelled; its ranks were stopped")
        self._conclude()
        return self.trained

    def _await_ends(self) -> None:
        """Takes what comes until all ranks have ended, and stops them where it is due."""
        timeout = self._call.timeout
        overdue_at = None if timeout is None else time.monotonic() + timeout
        while self._ends.pending:
            if self._stop_until is None:
                self._stop_where_due(overdue_at)
            elif time.monotonic() > self._stop_until:
                self._give_up()
                break
            self._tokens.look()
            event = self._next_event()
            if event is None:
                self._outputs.refresh()
                continue
            is_sign = self._ends.is_sign_of_life(event.message)
            if self._stop_until is not None and is_sign:
                # What was written until then may be much, and comes as fast as it is taken.
                self._stop_until = time.monotonic() + _STOP_SECONDS
            self._take(event)

    def grown_logs(self) -> list[tuple[str, Work]]:
        """For each log that has grown its URL, and what brings the new part to the lake."""
        return self._outputs.grown(self._call.logs)

    def log_sizes(self) -> dict[str, int]:
        """Bytes of each log so far, by its path in the run's directory."""
        below = self._call.logs.url.removeprefix(f"{self._call.directory.url}/")
        return {f"{below}/{name}": size for name, size in self._outputs.sizes().items()}

    def ranks(self) -> tuple[tuple[RankReport, bool], ...]:
        """A report of each rank that has started, in order, and whether it was seen to end."""
        told = []
        for rank, pid in sorted(self._beginnings.pids.copy().items()):
            place, report = self._place(rank), self.trained.reports.get(rank)
            going_on = RankReport(rank, place.role, place.container.host, place.gpus, pid)
            told.append((report or going_on, report is not None))
        return tuple(told)

    def keep_logs(self, background: Background) -> None:
        """Has the ranks' output brought to the lake."""
        for url, upload in self._outputs.take_over().uploads(self._call.logs):
            background.put(url, upload)

    def publisher(self, name: str) -> Publisher:
        """What publishes what the ranks that returned have left, as a model of this name."""
        returned = [
            rank
            for rank, report in self.trained.reports.items()
            if rank < self._world.size and not report.stopped
        ]
        agents = Agents(self._world, self._send, self._next_event, self._connected, self._cancelled)
        return Publisher(name, agents, returned)

    def _place(self, rank: int) -> RankPlace:
        return self._world.processes[rank]

    def _send(self, key: int, kind: str, payload: bytes = b"", **fields: Any) -> None:
        self._lease.server.send(key, kind, payload, run_id=self._call.run_id, **fields)

    def _next_event(self) -> Event | None:
        """The next event of this gang, or None; who is lost is noted, whoever asked."""
        event = self._event()
        if event is not None and event.message is None:
            self._connected.discard(event.peer)
            self._lease.gone.add(event.peer)
        if event is not None and event.message and event.message.kind == sent_log.KIND:
            index = self._world.of_container(event.peer)[0].node_rank
            self._outputs.take_agent_log(index, event.message.payload)
            return None
        return event

    def _event(self) -> Event | None:
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
        return Event(min(self._connected), None)

    def _is_ours(self, event: Event) -> bool:
        """Whether an event is of this gang, and no late word of an earlier launch on it."""
        if event.message is None or event.peer not in self._connected:
            return event.peer in self._connected
        said, call = event.message.fields, self._call
        return (said.get("run_id"), said.get("attempt", call.attempt)) == (
            call.run_id,
            call.attempt,
        )

    def _start(self, meeting: Meeting) -> None:
        self._world = meeting.world
        modules = self._call.modules
        for message in run_messages(self._call, meeting):
            self._lease.server.keep(message.key, modules.digest, modules.archive)
            self._send(message.key, "run", message.payload, **message.fields)

    def _stop_where_due(self, overdue_at: float | None) -> None:
        """Stops all ranks where one failed, time is over, or the chief has returned."""
        now = time.monotonic()
        if overdue_at is not None and now >= overdue_at and self._failed_at is None:
            self._ends.run_out_of_time()
            log.info(
                "%s: ranks %s have not ended within %g s",
                self._call.run_id,
                self._ends.overdue,
                self._call.timeout,
            )
        failed = self._failed_at is not None and now >= self._failed_at
        if self._cancelled.is_set() or failed or self._ends.overdue or self._is_done_with_servers():
            self._stop_until = now + _STOP_SECONDS
            log.info("%s: ranks that are left are stopped", self._call.run_id)
            self._stop_all(dump_stacks=bool(self._ends.overdue))

    def _stop_all(self, *, dump_stacks: bool = False) -> None:
        for container in self._lease.containers:
            self._send(container.key, "stop", dump_stacks=dump_stacks)

    def _is_done_with_servers(self) -> bool:
        """Whether the chief of a ParameterServerStrategy has returned; the rest never do."""
        return bool(self._world.servers) and 0 in self.trained.values

    def _give_up(self) -> None:
        """An agent that does not answer serves no further attempt."""
        silent = {self._place(rank).container.key for rank in self._ends.pending}
        self._drop(silent)
        for rank in sorted(self._ends.pending):
            self._outputs.lost(rank, "its agent did not answer")
            self.trained.warnings.append(
                f"rank {rank} was not seen to end: its agent did not answer for {_STOP_SECONDS:g} s"
            )

    def _drop(self, silent: Collection[int]) -> None:
        """Hangs up on agents that do not answer."""
        for key in silent:
            log.info("%s: agent %d does not answer, and is hung up on", self._call.run_id, key)
        self._lease.server.hang_up(silent)
        self._lease.gone.update(silent)
        self._connected.difference_update(silent)

    def _take(self, event: Event) -> None:
        message = event.message
        if message is None:
            self._lose(event)
        elif message.kind in rank_start.KINDS:
            self._beginnings.take(message)
        elif message.kind == "output":
            self._outputs.take(message["rank"], message.payload)
        elif message.kind == "record":
            self._outputs.take_record(message["rank"], message.payload)
        elif message.kind == "reports":
            self._outputs.take_reports(message["rank"], message.payload)
            self._told.metrics(self._outputs.metrics())
        elif message.kind == "warning":
            self._warn(message["text"])
        elif message.kind == "kept-tokens":
            self._tokens.kept(event.peer, message)
        elif message.kind == "failing" and self._failed_at is None:
            self._failed_at = time.monotonic() + (_ALIKE_SECONDS if message["raised"] else 0.0)
        elif message.kind == "ended":
            self._end(message)

    def _warn(self, text: str) -> None:
        if text not in self.trained.warnings:
            self.trained.warnings.append(text)

    def _end(self, message: Message) -> None:
        end = ended(self._place(int(message["rank"])), message)
        rank = end.place.rank
        alike = self._ends.end(end)
        log.debug(
            "%s: rank %d ended: %s%s",
            self._call.run_id,
            rank,
            end.signal or f"exit code {end.exit_code}",
            ", stopped" if end.stopped else "",
        )
        self._outputs.ended(rank)
        self.trained.reports[rank] = RankReport(
            rank=rank,
            role=end.place.role,
            host=end.place.container.host,
            gpus=end.place.gpus,
            pid=self._beginnings.pids[rank],
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
            log.info(
                "%s: first failure seen: rank %d on %s (%s)",
                self._call.run_id,
                rank,
                end.place.container.host,
                end.status or end.signal or f"exit code {end.exit_code}",
            )
            self._failed_at = time.monotonic() + (_ALIKE_SECONDS if alike else 0.0)

    def _lose(self, event: Event) -> None:
        """An executor's connection has ended, and so have its ranks that had not."""
        for place in self._world.of_container(event.peer):
            if place.rank in self._ends.pending:
                log.info(
                    "%s: rank %d lost with its executor on %s: %s",
                    self._call.run_id,
                    place.rank,
                    place.container.host,
                    event.reason or "its connection ended",
                )
                self._ends.lose(place, event.reason)
                self._outputs.lost(place.rank, event.reason)
                self._failed_at = time.monotonic()

    def _conclude(self) -> None:
        """Which failure was the first, and whose fault it was."""
        conclusion = self._ends.conclude(self._call.timeout, self._reason)
        if conclusion is not None:
            self._outputs.keep_agent_logs()
            self.trained.failure, self.trained.fault = conclusion.failure, conclusion.fault
            self.trained.avoid, self.trained.suspect = conclusion.avoid, conclusion.suspect
            log.info(
                "%s: attempt %d failed first by rank %s on %s; fault: %s",
                self._call.run_id,
                self._call.attempt,
                conclusion.failure.rank,
                conclusion.failure.host,
                conclusion.fault.value,
            )
        elif self._world.servers and 0 in self.trained.values:
            # Stopped as successful: the chief is the one with a value.
            none = Value(pickle.dumps(None))
            for rank in range(self._world.size):
                self.trained.values.setdefault(rank, none)
        elif len(self.trained.values) != self._world.size:
            missing = sorted(set(range(self._world.size)) - self.trained.values.keys())
            raise HopsGpuError(f"ranks {missing} ended without a value and without a failure")

    def _reason(self, host: str) -> str:
        """Why the executor on a node was lost; "" where neither Spark nor YARN has noticed."""
        job = self._lease.job
        reason = job.reason(_REASON_SECONDS)
        return self._lease.why_lost(reason if job.ended.is_set() else "", host)


@contextlib.contextmanager
def train_on(
    lease: Lease,
    world: World,
    call: Call,
    show: Progress,
    told: Told,
    cancelled: threading.Event,
) -> Iterator[Training]:
    """What drives one attempt; what is kept of its output is removed, or handed over, at the end.

    Args:
        lease: the gang.
        world: its ranks.
        call: what they run.
        show: shown every line of every rank.
        told: told how the ranks fare.
        cancelled: set when the run is no longer wanted.

    Raises:
        ConfigError: the executors' Python lacks what ranks with data need.
    """
    for container in lease.containers:
        # A gang that is held was not asked for with data.
        check_data(container, call.needs)
    with Outputs(world, show) as outputs:
        yield Training(lease, world, call, outputs, told, cancelled)
