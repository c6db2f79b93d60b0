"""A run: the handle that users hold, and the status board that the run keeps up to date."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from hopsgpu.core.boundary import public
from hopsgpu.core.gang import GangState, may_follow
from hopsgpu.core.run_values import GpuSeconds, RankReport, RunStatus, Timeline
from hopsgpu.display.progress import Progress
from hopsgpu.errors import Cancelled, HopsGpuError
from hopsgpu.launcher.gang_result import GangResult

log = logging.getLogger(__name__)

R = TypeVar("R")

# What becomes of the executors if the run's gang is held.
KEPT = "the gang keeps"
_WITH_HOSTS = (GangState.WAITING, GangState.GRANTED, GangState.READY, GangState.PUBLISHING)


class Board:
    """The status board of a run: written by the run's thread, read by any thread."""

    def __init__(self, run_id: str, wanted: int, gpus: int, progress: Progress) -> None:
        self.run_id = run_id
        self._wanted = wanted
        self._gpus = gpus
        self._progress = progress
        self._lock = threading.Lock()
        self._state = GangState.REQUESTED
        self._hosts: tuple[str, ...] = ()
        self._why = ""
        self._warnings: list[str] = []
        self._arrivals: tuple[float, ...] = ()
        self._departures: tuple[float, ...] = ()
        self._uploaded: float | None = None
        self._attempt = 0
        self._before = GpuSeconds()
        self._ranks: tuple[RankReport, ...] = ()
        self._metrics: tuple[Mapping[str, float], ...] = ()
        self._timeline = Timeline(requested=time.time())
        self._began = time.monotonic()
        self._took: float | None = None
        self._passed: set[GangState] = set()

    def state(self, state: GangState, hosts: Sequence[str] = (), why: str = "") -> None:
        """Record a state, or the same one again with other hosts or another reason to wait."""
        with self._lock:
            if state is not self._state:
                if not may_follow(self._state, state):
                    raise HopsGpuError(f"a run cannot go from {self._state} to {state}")
                if self._state is GangState.PUBLISHING:
                    self._uploaded = time.time()
                if self._state is GangState.PREPARING:
                    self._mark("prepared", time.time())
                log.debug("%s: %s after %s", self.run_id, state.value, self._state.value)
                self._state = state
                self._passed.add(state)
            self._why = why
            if state in _WITH_HOSTS:
                self._hosts = tuple(hosts)
            if state.is_terminal:
                self._hosts = ()
                self._took = time.monotonic() - self._began
        self._progress.status(self.status())

    def mark(self, point: str, at: float | None = None) -> None:
        """Record that a point of the timeline was passed, now or at this time since the epoch."""
        with self._lock:
            self._mark(point, time.time() if at is None else at)

    def _mark(self, point: str, at: float) -> None:
        self._timeline = dataclasses.replace(self._timeline, **{point: at})

    def arrived(self, times: Sequence[float]) -> None:
        """Record when the executors arrived."""
        with self._lock:
            self._arrivals = tuple(times)

    def departed(self, times: Sequence[float]) -> None:
        """Record when executors that were released before the others were seen to be gone."""
        with self._lock:
            self._departures = tuple(times)

    def warn(self, text: str) -> None:
        """Record a warning; the same text is recorded once."""
        with self._lock:
            if text not in self._warnings:
                self._warnings.append(text)

    def ranks(self, reports: Sequence[RankReport]) -> None:
        """Record the reports of the ranks."""
        with self._lock:
            self._ranks = tuple(reports)

    def metrics(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """Record the last metrics of each rank."""
        with self._lock:
            self._metrics = tuple(metrics)
        self._progress.status(self.status())

    def attempt(self, number: int) -> None:
        """Record that the gang starts again; add up the GPU seconds until now separately."""
        now = time.time()
        with self._lock:
            self._attempt = number
            self._before = self._seconds(now)
            self._arrivals = (now,) * len(self._arrivals)
            self._timeline = dataclasses.replace(
                self._timeline, retried=now, granted=None, started=None, returned=None
            )
            self._ranks, self._metrics = (), ()

    def status(self) -> RunStatus:
        """Return the run's status now."""
        with self._lock:
            return RunStatus(
                run_id=self.run_id,
                state=self._state.value,
                attempt=self._attempt,
                granted=len(self._hosts),
                wanted=self._wanted,
                granted_hosts=self._hosts,
                waiting_for=self._why,
                elapsed=self._took or time.monotonic() - self._began,
                ranks=self._ranks,
                metrics=self._metrics,
                timeline=self._timeline,
            )

    def result(self) -> GangResult:
        """Return the result without values: metrics, warnings, ranks, timeline, GPU seconds."""
        with self._lock:
            return GangResult(
                run_id=self.run_id,
                metrics=self._metrics,
                warnings=tuple(self._warnings),
                ranks=self._ranks,
                timeline=self._timeline,
                gpu_seconds=self._seconds(time.time()),
            )

    @property
    def held(self) -> str:
        """What has become of the run's executors, in words; read it when the run has ended."""
        with self._lock:
            return executors_fate(self._passed, self._timeline, self._gpus)

    def _seconds(self, now: float) -> GpuSeconds:
        return gpu_seconds(
            self._timeline,
            self._arrivals,
            self._gpus,
            now,
            self._before,
            self._departures,
            self._uploaded,
        )


def gpu_seconds(
    timeline: Timeline,
    arrivals: Sequence[float],
    gpus: int,
    now: float,
    before: GpuSeconds = GpuSeconds(),  # noqa: B008 - frozen
    departures: Sequence[float] = (),
    uploaded: float | None = None,
) -> GpuSeconds:
    """Return how a run's GPU time was spent.

    Args:
        timeline: the run's timeline.
        arrivals: when each executor arrived, in seconds since the epoch.
        gpus: number of GPUs of each executor.
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
    training = publishing = 0.0
    if timeline.started is not None:
        training = ((timeline.returned or end) - timeline.started) * all_gpus
    uploaded = timeline.published or uploaded
    if timeline.returned is not None and uploaded is not None:
        stayed = all_gpus - len(departures) * gpus
        publishing = (uploaded - timeline.returned) * stayed
    held, training = before.held + held, before.training + training
    return GpuSeconds(held, training, publishing, max(held - training - publishing, 0.0))


def executors_fate(passed: Collection[GangState], timeline: Timeline, gpus: int) -> str:
    """Return what has become of the executors of a run that has ended, in words.

    Args:
        passed: the states that the run passed.
        timeline: the run's timeline.
        gpus: number of GPUs of each executor.
    """
    what = "GPUs" if gpus else "executors"
    if GangState.RELEASING in passed:
        if timeline.released is None:
            return f"it could not be confirmed that its {what} are back: `hopsgpu gpus` shows them"
        return f"its {what} are back"
    if GangState.FINISHING in passed:
        return f"{KEPT} its {what}"
    return f"it held no {what}"


class Named(Protocol):
    """Something with a run's id."""

    @property
    def run_id(self) -> str:
        """The id of the run, which is also the name of its directory on the lake."""


class Noted(Named, Protocol):
    """The part of a status board that a handle needs."""

    @property
    def held(self) -> str:
        """What has become of the run's executors, in words; read it when the run has ended."""


class Handle(Generic[R]):
    """A handle on work that another thread does: to wait for it and to cancel it.

    Args:
        board: the run's status board.
        cancelled: event that cancels the work.
        work: does the work, and returns its result.
        start_thread: starts a thread that runs a function.
    """

    def __init__(
        self,
        board: Noted,
        cancelled: threading.Event,
        work: Callable[[], R],
        start_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        self._board = board
        self._cancelled = cancelled
        self._work = work
        self._finished = threading.Event()
        self._result: R | None = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        start_thread(self._body)

    @property
    def run_id(self) -> str:
        """The id of the run, which is also the name of its directory on the lake."""
        return self._board.run_id

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, at most so many seconds; return whether the run has ended."""
        return self._finished.wait(seconds)

    def cancel(self) -> None:
        """Cancel the run, in whatever state it is, so that it releases its executors.

        The method returns at once; `wait` waits for the end.
        """
        log.info("%s: to be cancelled", self.run_id)
        self._cancelled.set()

    @property
    def end(self) -> str:
        """How the run ended, in one line; read it only after the end."""
        if isinstance(self._error, Cancelled):
            how = "was cancelled"
        else:
            how = "had ended well" if self._error is None else "had failed"
        return f"{self.run_id} {how}, and {self._board.held}"

    @public
    def result(self) -> R:
        """Wait for the end and return the result.

        Raises:
            HopsGpuError: the run failed or was cancelled; `error.result` is the partial result.
        """
        self._finished.wait()
        if self._error is not None:
            # Otherwise a second call's traceback would also show the first call.
            raise self._error.with_traceback(self._trace)
        assert self._result is not None
        return self._result

    def _body(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            # Local variables of its frames would keep connections to the lake open until a garbage
            # collection.
            traceback.clear_frames(error.__traceback__)
            self._error, self._trace = error, error.__traceback__
        finally:
            self._finished.set()


class Run(Handle[GangResult]):
    """A run that `submit` started."""

    __module__ = "hopsgpu"

    def __init__(
        self,
        board: Board,
        cancelled: threading.Event,
        work: Callable[[], GangResult],
        start_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        self._stands = board
        super().__init__(board, cancelled, work, start_thread)

    def status(self) -> RunStatus:
        """Return the run's status now."""
        return self._stands.status()

    def __repr__(self) -> str:
        status = self.status()
        return f"<Run {status.run_id}: {status.state}, {status.elapsed:.1f} s>"

    def _repr_html_(self) -> str:
        from hopsgpu.display.cards import run_card

        return run_card(self.status())
