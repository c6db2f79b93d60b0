"""Updates of a run's record and logs on the lake while it runs, and checks for cancel requests."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hopsgpu.artifacts.runs import CANCEL
from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_use import Points, UsePoint, add_point
from hopsgpu.core.redaction import redact
from hopsgpu.core.run_record import EnvironmentRecord, FailureRecord, RankRecord, RunRecord
from hopsgpu.core.wait_reasons import NO_WAIT
from hopsgpu.core.waits import WaitHistory
from hopsgpu.errors import StoreError
from hopsgpu.runs import run_details
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.run_details import RunDetails
from hopsgpu.runs.status_board import StatusBoard
from hopsgpu.storage.background import Work
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

# The real one takes time, and is added in the background.
_UNKNOWN_ENVIRONMENT = EnvironmentRecord(hopsgpu="", python="")
# Appends per second, so that the logs of a large gang do not keep the NameNode busy.
_MAX_APPENDS = 40


@dataclass(frozen=True)
class RecordingIntervals:
    """How often a run is checked and its files are written, in seconds.

    Attributes:
        record: readers regard a run as lost if its record is older than
            `core.run_record.LOST_SECONDS`.
    """

    poll: float = 1.0
    record: float = 10.0
    cancel: float = 2.5
    log: float = 3.0


class LogSource(Protocol):
    """An attempt whose logs are written to the lake while it runs."""

    def grown_logs(self) -> Sequence[tuple[str, Work]]:
        """Return for each log that has grown its URL, and a function that appends the new part."""

    def log_sizes(self) -> Mapping[str, int]:
        """Return the bytes of each log so far, by its path in the run's directory."""


class Recording:
    """Keeps a run's record and logs on the lake up to date, without ever waiting for the lake.

    Args:
        run: the run; its `cancelled` is set if a cancel request is found on the lake.
        details: returns what the record shows and the run's board does not know.
    """

    def __init__(
        self,
        run: ActiveRun[StatusBoard],
        details: Callable[[], RunDetails],
        clock: Callable[[], float] = time.time,
        intervals: RecordingIntervals = RecordingIntervals(),  # noqa: B008 - immutable
    ) -> None:
        self._intervals = intervals
        self._run = run
        self._details = details
        self._clock = clock
        self._directory = run.directory()
        self._cancel_request = LakePath(self._directory.url, should_fail_fast=True) / CANCEL
        self._lock = threading.Lock()
        self._followed: LogSource | None = None
        self._logs: dict[str, int] = {}
        self._logs_at = 0.0
        self._next_log = 0
        # The record has the state of the working directory at the run's begin.
        self._environment = functools.cache(lambda: run_details.environment(run.application))
        self._use: Points = ()
        self._waits = WaitHistory()

    def put(
        self,
        state: str,
        error: str | None = None,
        reason: EndReason | None = None,
        failure: FailureRecord | None = None,
    ) -> None:
        """Have the run's state written to its record.

        Args:
            state: value of a GangState.
            error: the error that ended the run, `failure` the same in short; or None.
            reason: why the run ended; None before its end.
        """
        with self._lock:
            self._run.background.put(self._key, self._work(state, error, reason, failure))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep record and logs up to date, and check for a cancel request, until the exit."""
        ended = threading.Event()
        name = f"hopsgpu-{self._run.run_id}-watch"
        threading.Thread(target=self._watch, args=(ended,), name=name, daemon=True).start()
        try:
            yield
        finally:
            # Wait for an update in progress, so that the record that is put next is the latest.
            with self._lock:
                ended.set()

    @contextlib.contextmanager
    def following(self, attempt: LogSource) -> Iterator[None]:
        """Append an attempt's logs to the lake until the exit; begin no append afterwards."""
        with self._lock:
            self._followed = attempt
            self._logs_at = time.monotonic() + self._intervals.log
        try:
            yield
        finally:
            with self._lock:
                self._logs |= attempt.log_sizes()
                self._followed = None

    @property
    def _key(self) -> str:
        return f"the record of {self._run.run_id}"

    def _work(
        self,
        state: str,
        error: str | None = None,
        reason: EndReason | None = None,
        failure: FailureRecord | None = None,
    ) -> Work:
        if self._followed is not None:
            self._logs |= self._followed.log_sizes()
        board, application, plan = self._run.board, self._run.application, self._run.plan
        result, now = board.result(), self._clock()
        needed = board.min_executors(plan) * plan.shape.gpus
        points = self._use or (UsePoint(result.timeline.requested or now),)
        self._use = add_point(points, result.gpu_seconds, board.seconds_waited * needed, now)
        is_over = GangState(state).is_terminal
        why = NO_WAIT if is_over else board.wait_reason
        self._waits.record(why, now)
        details = self._details()
        record = RunRecord(
            run_id=result.run_id,
            name=plan.spec.name,
            user=application.user,
            application=application.id,
            state=state,
            attempt=board.attempt,
            error=error,
            reason=reason,
            failure=failure,
            waiting_for=why.sentence,
            waiting_details=why.details,
            waits=self._waits.waits,
            updated=now,
            timeline=result.timeline,
            gpu_seconds=result.gpu_seconds,
            use=tuple(point.round_values() for point in self._use),
            call=details.call,
            model=None if result.model is None else result.model.url,
            data=details.data,
            spec=replace(plan.spec, env_vars=redact(plan.spec.env_vars)),
            python_env=None if details.python_env is None else details.python_env.as_fields(),
            queue=plan.queue,
            executors=plan.executors,
            executor=plan.shape,
            aside={} if is_over else board.parked_gpus,
            ranks=tuple(RankRecord(**vars(rank), has_ended=ended) for rank, ended in board.ranks),
            metrics=tuple(result.metrics),
            logs=dict(self._logs),
            worlds=result.worlds,
            warnings=result.warnings,
            environment=_UNKNOWN_ENVIRONMENT,
            search=details.search,
            score=details.score,
        )

        def write() -> None:
            environment = self._environment()
            run_details.write(self._directory, replace(record, environment=environment))

        return write

    def _watch(self, ended: threading.Event) -> None:
        now, intervals = time.monotonic(), self._intervals
        state, record_at, cancel_at = "", now + intervals.record, now + intervals.cancel
        while not ended.wait(intervals.poll):
            board = self._run.board
            now, before, state = time.monotonic(), state, board.status().state
            with self._lock:
                if ended.is_set():
                    return
                self._waits.record(board.wait_reason, self._clock())
                if state != before or now >= record_at:
                    self._run.background.try_put(self._key, self._work(state))
                    record_at = now + intervals.record
                if now >= self._logs_at:
                    self._append_logs(now)
            if now >= cancel_at:
                key = f"the check for a cancel request of {self._run.run_id}"
                self._run.background.try_put(key, self._check_cancel_request)
                cancel_at = now + intervals.cancel

    def _append_logs(self, now: float) -> None:
        if self._followed is None:
            return
        grown = list(self._followed.grown_logs())
        self._logs_at = now + max(self._intervals.log, len(grown) / _MAX_APPENDS)
        # Begin where the last call stopped, so that all logs have their turn on a slow lake.
        first = self._next_log % len(grown) if grown else 0
        for count, (url, work) in enumerate([*grown[first:], *grown[:first]]):
            if not self._run.background.try_put(url, work):
                self._next_log = first + count
                return

    def _check_cancel_request(self) -> None:
        # A lake that does not answer must not end the run; the check is soon repeated.
        with contextlib.suppress(StoreError):
            if self._cancel_request.exists():
                if not self._run.cancelled.is_set():
                    log.info("%s: the lake has a request to cancel the run", self._run.run_id)
                self._run.cancelled.set()
