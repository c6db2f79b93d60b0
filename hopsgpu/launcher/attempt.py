"""One attempt on a whole gang: the messages to its agents, and the handling of their answers."""

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
from hopsgpu.backends.spark.token_renewal import TokenSender
from hopsgpu.control.channel import Message
from hopsgpu.control.server import Event
from hopsgpu.core.gang import Exclusions, RankPlace, World
from hopsgpu.core.run_values import RankReport
from hopsgpu.display.progress import Progress
from hopsgpu.errors import Cancelled, HopsGpuError, RankFailed
from hopsgpu.launcher import rank_start
from hopsgpu.launcher.attempt_request import run_messages
from hopsgpu.launcher.background import Background, Work
from hopsgpu.launcher.outcome import RankEnds, ended_rank, odd_end
from hopsgpu.launcher.publisher import Agents, Publisher
from hopsgpu.launcher.rank_call import Call
from hopsgpu.launcher.rank_output import Outputs
from hopsgpu.launcher.rank_start import RankStartListener, RankStarts
from hopsgpu.launcher.rendezvous import Rendezvous, RendezvousFailure, rendezvous
from hopsgpu.launcher.retry_policy import Fault
from hopsgpu.launcher.return_values import Value, value_of

log = logging.getLogger(__name__)

_EVENT_SECONDS = 0.2
# Time for SIGTERM, 5 s of grace, SIGKILL, and the agents' messages to the driver.
_STOP_SECONDS = 15.0
_QUIET_SECONDS = 2.0
# Spark asks YARN why a container ended, and only then fails the job.
_REASON_SECONDS = 5.0
# After one rank's exception, others get this time to raise the same exception.
_ALIKE_SECONDS = 0.5


@dataclass
class Trained:
    """The results of an attempt.

    Attributes:
        reports: reports of the ranks that have ended, by rank.
        values: values of the ranks that returned, by rank.
        failure: the first failure by time, or None.
        fault: whose fault the failure was, if there is one.
        avoid: the GPU or node to blame for the failure.
        suspect: the node that may be to blame for a lost executor, or for a rank that failed
            because of the infrastructure; or None.
        warnings: warnings for people.
    """

    reports: dict[int, RankReport] = field(default_factory=dict)
    values: dict[int, Value] = field(default_factory=dict)
    failure: RankFailed | None = None
    fault: Fault = Fault.RANK
    avoid: Exclusions = Exclusions()
    suspect: str | None = None
    warnings: list[str] = field(default_factory=list)


class Training:
    """Drives the agents through one attempt; use `train_on`.

    Attributes:
        trained: the results so far.
        meeting: where the ranks meet, once it is known.
    """

    def __init__(
        self,
        lease: Lease,
        world: World,
        call: Call,
        outputs: Outputs,
        told: RankStartListener,
        cancelled: threading.Event,
    ) -> None:
        self._lease = lease
        self._world = world
        self._call = call
        self._outputs = outputs
        self._told = told
        self._cancelled = cancelled
        self._beginnings = RankStarts(world, told)
        self._ends = RankEnds(world, call.log_url)
        self._connected = {container.key for container in lease.containers}
        self._quiet_since: float | None = None
        self._failed_at: float | None = None
        self._stop_until: float | None = None
        self.trained = Trained()
        self.meeting: Rendezvous | None = None
        self._tokens = TokenSender(lease, call.run_id, self.trained.warnings)

    def run(self, met: Rendezvous | None = None) -> Trained:
        """Start all ranks, wait for all, and stop them at the first failure.

        Args:
            met: the meeting of an earlier rank in the same slot, which saves a round trip to the
                agent. It is for a single rank only: several ranks meet in a store that serves one
                attempt.

        Raises:
            DiscoveryError: two containers were given the same GPU; nothing was started.
            Cancelled: the run was cancelled; its ranks have been stopped.
            ConfigError: a node lacks the configured interface, or modules that the call needs.
        """
        refuse_duplicates(self._lease.containers)
        if met is not None and self._cancelled.is_set():
            raise Cancelled(f"{self._call.run_id} was cancelled before its ranks started")
        meeting = met or rendezvous(
            self._world, self._call, self._send, self._next_event, self._cancelled
        )
        if isinstance(meeting, RendezvousFailure):
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
            # On a held gang the ranks would continue otherwise.
            self._stop_all()
            raise
        if self._cancelled.is_set():
            raise Cancelled(f"{self._call.run_id} was cancelled; its ranks were stopped")
        self._conclude()
        return self.trained

    def _await_ends(self) -> None:
        """Process events until all ranks have ended, and stop the ranks when it is due."""
        timeout = self._call.plan.spec.run_timeout
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
                # Much output may still be on its way, and arrives only as fast as it is processed.
                self._stop_until = time.monotonic() + _STOP_SECONDS
            self._take(event)

    def grown_logs(self) -> list[tuple[str, Work]]:
        """Return for each log that has grown its URL, and a function that appends the new part."""
        return self._outputs.grown(self._call.logs)

    def log_sizes(self) -> dict[str, int]:
        """Return the bytes of each log so far, by its path in the run's directory."""
        below = self._call.logs.url.removeprefix(f"{self._call.directory.url}/")
        return {f"{below}/{name}": size for name, size in self._outputs.sizes().items()}

    def ranks(self) -> tuple[tuple[RankReport, bool], ...]:
        """Return, in order, the report of each rank that has started, and whether it has ended."""
        told = []
        for rank, pid in sorted(self._beginnings.pids.copy().items()):
            place, report = self._place(rank), self.trained.reports.get(rank)
            going_on = RankReport(rank, place.role, place.container.host, place.gpus, pid)
            told.append((report or going_on, report is not None))
        return tuple(told)

    def keep_logs(self, background: Background) -> None:
        """Have the ranks' output written to the lake in the background."""
        for url, upload in self._outputs.take_over().uploads(self._call.logs):
            background.put(url, upload)

    def publisher(self, name: str) -> Publisher:
        """Return a publisher of what the workers that returned have left, for this model name."""
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
        """Return the next event of this gang, or None; record lost agents and keep agents' logs."""
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
        """Return the next event; once the barrier job has ended, also report silent agents as lost.

        Spark may detect a lost node, and end the other tasks, while the control channel's
        connection to that node still seems to be open. So if no event arrives for a while after
        the end of the job, this returns the loss of a connected agent.
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
        """Return whether an event is of this gang, and not a late message of an earlier launch."""
        if event.message is None or event.peer not in self._connected:
            return event.peer in self._connected
        said, call = event.message.fields, self._call
        return (said.get("run_id"), said.get("attempt", call.attempt)) == (
            call.run_id,
            call.attempt,
        )

    def _start(self, meeting: Rendezvous) -> None:
        self._world = meeting.world
        modules = self._call.function.modules
        for message in run_messages(self._call, meeting):
            self._lease.server.keep(message.key, modules.digest, modules.archive)
            self._send(message.key, "run", message.payload, **message.fields)

    def _stop_where_due(self, overdue_at: float | None) -> None:
        """Stop all ranks if one failed, time is up, the run is cancelled, or the chief returned."""
        now = time.monotonic()
        if overdue_at is not None and now >= overdue_at and self._failed_at is None:
            self._ends.run_out_of_time()
            log.info(
                "%s: ranks %s have not ended within %g s",
                self._call.run_id,
                self._ends.overdue,
                self._call.plan.spec.run_timeout,
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
        """Return whether a ParameterServerStrategy's chief has returned; the others never do."""
        return bool(self._world.servers) and 0 in self.trained.values

    def _give_up(self) -> None:
        """Drop the agents that do not answer; they serve no further attempt."""
        silent = {self._place(rank).container.key for rank in self._ends.pending}
        self._drop(silent)
        for rank in sorted(self._ends.pending):
            self._outputs.lost(rank, "its agent did not answer")
            self.trained.warnings.append(
                f"rank {rank} was not seen to end: its agent did not answer for {_STOP_SECONDS:g} s"
            )

    def _drop(self, silent: Collection[int]) -> None:
        """Disconnect agents that do not answer."""
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
        end = ended_rank(self._place(int(message["rank"])), message)
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
        """Record that an executor was lost, and with it those of its ranks that still ran."""
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
        """Determine the first failure and its fault, or complete the values.

        Raises:
            HopsGpuError: ranks have neither a value nor a failure.
        """
        conclusion = self._ends.conclude(self._call.plan.spec.run_timeout, self._reason)
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
            # The others were stopped as successful; only the chief has a value.
            none = Value(pickle.dumps(None))
            for rank in range(self._world.size):
                self.trained.values.setdefault(rank, none)
        elif len(self.trained.values) != self._world.size:
            missing = sorted(set(range(self._world.size)) - self.trained.values.keys())
            raise HopsGpuError(f"ranks {missing} ended without a value and without a failure")

    def _reason(self, host: str) -> str:
        """Return why the executor on a node was lost; "" if neither Spark nor YARN knows."""
        job = self._lease.job
        reason = job.reason(_REASON_SECONDS)
        return self._lease.why_lost(reason if job.ended.is_set() else "", host)


@contextlib.contextmanager
def train_on(
    lease: Lease,
    world: World,
    call: Call,
    show: Progress,
    told: RankStartListener,
    cancelled: threading.Event,
) -> Iterator[Training]:
    """Provide the `Training` of one attempt; on exit, discard its output unless taken over.

    Args:
        lease: the gang.
        world: its ranks.
        call: the call that they run.
        show: displays every line of every rank.
        told: is notified of the ranks' progress.
        cancelled: event that cancels the run.

    Raises:
        ConfigError: the executors' Python lacks what ranks with data need.
    """
    for container in lease.containers:
        # A held gang was requested without knowing whether its launches have data.
        check_data(container, call.needs)
    with Outputs(world, show) as outputs:
        yield Training(lease, world, call, outputs, told, cancelled)
