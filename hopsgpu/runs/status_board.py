"""The status board of a run: its state, timeline, warnings, attempt, ranks and GPU time."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hopsgpu.attempts.rank_table import RankTable
from hopsgpu.core.gang import GangState, may_follow
from hopsgpu.core.gpu_losses import RankLosses, split_gpu_seconds, sum_gpu_seconds
from hopsgpu.core.run_values import GpuSeconds, RankReport, RunStatus, Timeline
from hopsgpu.core.scores import ScoreStatus
from hopsgpu.core.trials import SearchStatus
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason
from hopsgpu.display.progress import Shielded
from hopsgpu.errors import HopsGpuError
from hopsgpu.runs.gang_result import GangResult

if TYPE_CHECKING:
    from hopsgpu.artifacts.models import ModelVersion
    from hopsgpu.core.spec import LaunchPlan

log = logging.getLogger(__name__)

# The fate of the executors if the run's gang is held.
KEPT = "the gang keeps"
_LATELY_SECONDS = 1.0
_WITH_HOSTS = (GangState.WAITING, GangState.GRANTED, GangState.READY, GangState.PUBLISHING)


class StoppableDisplay(Protocol):
    """A display that may have stopped."""

    @property
    def problem(self) -> str | None:
        """Return why the display stopped, or None."""


class StatusBoard(ABC):
    """The known state of a run in progress: written by the run's threads, read by any thread.

    The allocator writes too: a board is the `Watcher` of its executors.

    Attributes:
        failed_rank: the rank that failed first and ended the run; or None.
    """

    def __init__(
        self,
        run_id: str,
        gpus: int,
        shown: StoppableDisplay,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run_id = run_id
        self._gpus = gpus
        self._shown = shown
        self._clock = clock
        self._lock = threading.Lock()
        self._state = GangState.REQUESTED
        self._passed: set[GangState] = set()
        self._why = NO_WAIT
        self._warnings: list[str] = []
        self.application = self.queue = ""
        self._timeline = Timeline(requested=clock())
        self._created_at = time.monotonic()
        self._duration: float | None = None
        self._waited = 0.0
        self._waiting_since: float | None = None
        self._parked_hosts: tuple[str, ...] = ()
        self.failed_rank: int | None = None

    def state(self, state: GangState, hosts: Sequence[str] = (), why: WaitReason = NO_WAIT) -> None:
        """Record a state; a state may be repeated with other hosts or another reason to wait."""
        with self._lock:
            if state is not self._state:
                if not may_follow(self._state, state):
                    raise HopsGpuError(f"{self.run_id} cannot go from {self._state} to {state}")
                log.debug("%s: %s after %s", self.run_id, state.value, self._state.value)
                self._on_state_left(self._state)
                now = self._clock()
                self._waited = self._count_waited(now)
                self._waiting_since = now if state is GangState.WAITING else None
                self._state = state
                self._passed.add(state)
            self._why = why
            self._set_granted_hosts(hosts)
            if state.is_terminal:
                self._duration = time.monotonic() - self._created_at
        self.show()

    def set_application(self, application: str, queue: str) -> None:
        """Set the ID of the Spark application and its queue, before the run starts."""
        self.application, self.queue = application, queue

    def _on_state_left(self, state: GangState) -> None:
        """Record that a state is over; called under the lock."""
        return

    def _set_granted_hosts(self, hosts: Sequence[str]) -> None:
        """Record the hosts granted so far, in the new state; called under the lock."""
        return

    def mark(self, point: str, at: float | None = None) -> None:
        """Record that a point of the timeline was passed.

        Args:
            at: seconds since the epoch; None for now.
        """
        with self._lock:
            self._mark(point, self._clock() if at is None else at)

    def _mark(self, point: str, at: float) -> None:
        self._timeline = dataclasses.replace(self._timeline, **{point: at})

    @abstractmethod
    def on_executors_arrived(self, times: Sequence[float]) -> None:
        """Record when executors arrived."""

    def on_parked(self, hosts: Sequence[str]) -> None:
        """Record the host of each executor that is parked at present; called often."""
        with self._lock:
            self._parked_hosts = tuple(hosts)

    @property
    def parked_gpus(self) -> Mapping[str, int]:
        with self._lock:
            return {
                host: n * self._gpus
                for host, n in Counter(self._parked_hosts).items()
                if self._gpus
            }

    def warn(self, text: str) -> None:
        """Record a warning; the same text is recorded once."""
        with self._lock:
            if text not in self._warnings:
                self._warnings.append(text)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the warnings so far; that the display stopped is one."""
        problem = self._shown.problem
        with self._lock:
            return (*self._all_warnings(), *(() if problem is None else (problem,)))

    def _all_warnings(self) -> Sequence[str]:
        return self._warnings

    @property
    def wait_reason(self) -> WaitReason:
        return self._why

    @property
    def attempt(self) -> int:
        """Return the number of the latest attempt, from 0."""
        return 0

    @property
    def ranks(self) -> tuple[tuple[RankReport, bool], ...]:
        """Return the reports of the latest attempt's ranks, as `RankTable.seen` does."""
        return ()

    @property
    def seconds_waited(self) -> float:
        """Return for how long, in all attempts, the run had too few executors to continue.

        The wait of a running elastic gang for its growth does not count.
        """
        now = self._clock()
        with self._lock:
            return self._count_waited(now)

    def min_executors(self, plan: LaunchPlan) -> int:
        """Return the number of executors without which the run cannot start."""
        return plan.least_executors

    def _count_waited(self, now: float) -> float:
        since = now if self._waiting_since is None else self._waiting_since
        return self._waited + max(now - since, 0.0)

    @property
    def timeline(self) -> Timeline:
        return self._timeline

    @property
    def executors_fate(self) -> str:
        """The fate of the run's executors, in words; read it when the run has ended."""
        with self._lock:
            return describe_fate(self._passed, self._timeline, self._gpus)

    @property
    def _elapsed_seconds(self) -> float:
        return self._duration or time.monotonic() - self._created_at

    @abstractmethod
    def status(self) -> RunStatus | SearchStatus | ScoreStatus: ...

    @abstractmethod
    def show(self) -> None:
        """Show the status on the run's display."""

    @abstractmethod
    def result(self) -> GangResult:
        """Return the run's result so far, without the values."""


class GangBoard(StatusBoard):
    """The status board of a gang's run."""

    def __init__(
        self,
        run_id: str,
        wanted: int,
        gpus: int,
        progress: Shielded,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(run_id, gpus, progress, clock)
        self._wanted = wanted
        self._progress = progress
        self._hosts: tuple[str, ...] = ()
        self._arrivals: tuple[float, ...] = ()
        self._departures: tuple[float, ...] = ()
        self._uploaded: float | None = None
        self._model: ModelVersion | None = None
        self._value: Any = None
        self._attempt = 0
        self._before = GpuSeconds()
        # The ranks of the latest attempt that has some.
        self._ranks: RankTable | None = None
        # Those whose losses are in the GPU seconds of earlier attempts.
        self._counted: RankTable | None = None
        self._shown_state: GangState | None = None
        self._shown_at = 0.0
        self._shown_seconds = GpuSeconds()
        self._attempt_warnings: list[str] = []
        self._metrics: tuple[Mapping[str, float], ...] = ()

    def _on_state_left(self, state: GangState) -> None:
        if state is GangState.PUBLISHING:
            self._uploaded = self._clock()
        if state is GangState.PREPARING:
            self._mark("prepared", self._clock())

    def _set_granted_hosts(self, hosts: Sequence[str]) -> None:
        if self._state in _WITH_HOSTS:
            self._hosts = tuple(hosts)
        if self._state.is_terminal:
            self._hosts = ()

    def on_executors_arrived(self, times: Sequence[float]) -> None:
        with self._lock:
            self._arrivals = tuple(times)

    def record_departures(self, times: Sequence[float]) -> None:
        """Record when executors without files to publish were released."""
        with self._lock:
            self._departures = tuple(times)

    def warn_of_attempt(self, text: str) -> None:
        """Record a warning that only counts if no other attempt follows."""
        with self._lock:
            if text not in self._attempt_warnings:
                self._attempt_warnings.append(text)

    def _all_warnings(self) -> Sequence[str]:
        return (*self._warnings, *self._attempt_warnings)

    def record_placement(self, ranks: RankTable) -> None:
        """Record that an attempt begins: its ranks have their places."""
        with self._lock:
            self._ranks = ranks
            self._attempt_warnings = []

    def record_metrics(self, metrics: Sequence[Mapping[str, float]]) -> None:
        with self._lock:
            self._metrics = tuple(metrics)
        self.show()

    def record_model(self, model: ModelVersion) -> None:
        with self._lock:
            self._model = model
            self._mark("published", self._clock())

    def record_value(self, value: Any) -> None:
        """Record rank 0's value, for the display of a run that has succeeded."""
        with self._lock:
            self._value = value

    def record_retry(self) -> None:
        """Record that the gang starts again; add up the GPU seconds until now separately."""
        now = self._clock()
        with self._lock:
            self._attempt += 1
            self._before, self._counted = self._seconds(now), self._ranks
            self._arrivals = (now,) * len(self._arrivals)
            self._timeline = dataclasses.replace(
                self._timeline, retried=now, granted=None, started=None, returned=None
            )
            self._metrics = ()

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def ranks(self) -> tuple[tuple[RankReport, bool], ...]:
        return () if self._ranks is None else self._ranks.started_ranks

    def status(self) -> RunStatus:
        now = self._clock()
        with self._lock:
            return RunStatus(
                run_id=self.run_id,
                state=self._state.value,
                attempt=self._attempt,
                granted=len(self._hosts),
                wanted=self._wanted,
                granted_hosts=self._hosts,
                waiting_for=self._why.sentence,
                waiting_details=self._why.details,
                elapsed=self._elapsed_seconds,
                ranks=self._reports,
                failed_rank=self.failed_rank,
                metrics=self._metrics,
                timeline=self._timeline,
                gpu_seconds=self._seconds_lately(now),
                application=self.application,
                queue=self.queue,
                model=self._model,
                value=self._value,
            )

    def show(self) -> None:
        self._progress.status(self.status())

    def result(self) -> GangResult:
        warnings = self.warnings
        with self._lock:
            return GangResult(
                run_id=self.run_id,
                metrics=self._metrics,
                warnings=warnings,
                ranks=self._reports,
                failed_rank=self.failed_rank,
                model=self._model,
                timeline=self._timeline,
                gpu_seconds=self._seconds(self._clock()),
                application=self.application,
                queue=self.queue,
            )

    @property
    def _reports(self) -> tuple[RankReport, ...]:
        """The reports of this attempt's ranks once all ranks have ended."""
        if self._ranks is None or self._timeline.returned is None:
            return ()
        return self._ranks.reports

    @property
    def seconds_held(self) -> float:
        now = self._clock()
        with self._lock:
            return self._seconds(now).held

    def _seconds_lately(self, now: float) -> GpuSeconds:
        """Return the GPU seconds until a second ago at most, or until the last change of state."""
        # Hundreds of ranks report each second, and each report is a status.
        if self._shown_state is not self._state or now >= self._shown_at + _LATELY_SECONDS:
            self._shown_state, self._shown_at = self._state, now
            self._shown_seconds = self._seconds(now)
        return self._shown_seconds

    def _seconds(self, now: float) -> GpuSeconds:
        return gpu_seconds(
            self._timeline,
            self._arrivals,
            self._gpus,
            now,
            self._before,
            self._departures,
            self._uploaded,
            self._lost_by_ranks,
        )

    @property
    def _lost_by_ranks(self) -> RankLosses:
        """The GPU seconds that the ranks of this attempt lost."""
        # Until the next attempt has its places, the ranks are those of the one before.
        if self._ranks is None or self._ranks is self._counted:
            return RankLosses()
        return self._ranks.losses(self._gpus)


def gpu_seconds(
    timeline: Timeline,
    arrivals: Sequence[float],
    gpus: int,
    now: float,
    before: GpuSeconds = GpuSeconds(),  # noqa: B008 - frozen
    departures: Sequence[float] = (),
    uploaded: float | None = None,
    losses: RankLosses = RankLosses(),  # noqa: B008 - frozen
) -> GpuSeconds:
    """Return how a run's GPU time was spent; times are seconds since the epoch.

    Args:
        now: the current time; stands for points that have not been passed yet.
        before: GPU seconds of earlier attempts, which are added.
        departures: when the executors without files to publish were seen to be gone; the others
            stay until the release.
        uploaded: when the upload of a model ended, whether or not it became a version.
    """
    end = timeline.released or now
    held = sum(max(end - arrival, 0.0) for arrival in arrivals) * gpus
    held -= sum(max(end - departure, 0.0) for departure in departures) * gpus
    all_gpus = len(arrivals) * gpus
    training = publishing = starting = 0.0
    if timeline.started is not None:
        training = ((timeline.returned or end) - timeline.started) * all_gpus
    if timeline.granted is not None:
        started = timeline.started or timeline.returned or end
        starting = max(started - timeline.granted, 0.0) * all_gpus
    uploaded = timeline.published or uploaded
    if timeline.returned is not None and uploaded is not None:
        stayed = all_gpus - len(departures) * gpus
        publishing = (uploaded - timeline.returned) * stayed
    return sum_gpu_seconds(
        [before, split_gpu_seconds(held, training, publishing, starting, losses)]
    )


def describe_fate(passed: Collection[GangState], timeline: Timeline, gpus: int) -> str:
    """Return where the executors of a run that has ended are, in words."""
    noun = "GPUs" if gpus else "executors"
    if GangState.RELEASING in passed:
        if timeline.released is None:
            return f"the release of its {noun} was not confirmed: `hopsgpu gpus` shows who has them"
        return f"its {noun} are back"
    if GangState.FINISHING in passed:
        return f"{KEPT} its {noun}"
    return f"it held no {noun}"
