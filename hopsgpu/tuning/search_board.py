"""The status board of a search: how its trials and executors are."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hopsgpu.core.gang import GangState
from hopsgpu.core.run_values import GpuSeconds
from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED, Best, Moment, SearchStatus, TrialReport
from hopsgpu.display.progress import ShieldedSearch
from hopsgpu.launcher.gang_result import GangResult
from hopsgpu.launcher.status_board import StatusBoard
from hopsgpu.tuning.gpu_accounting import GpuAccount
from hopsgpu.tuning.scheduler import SearchTerms

_RECENT = 50


class _Executors(Protocol):
    """The part of an ElasticLease that is used."""

    @property
    def held(self) -> int:
        """Return the number of executors that are held."""

    @property
    def waiting_for(self) -> str:
        """Return why there are not more executors."""


class SearchBoard(StatusBoard):
    """The status board of a search.

    Args:
        run_id: run id of the search.
        terms: terms of the search.
        gpus: number of GPUs of an executor.
        direction: "minimize" or "maximize".
        metric: name of the metric that is optimized, or None.
        progress: the display.
    """

    def __init__(
        self,
        run_id: str,
        terms: SearchTerms,
        gpus: int,
        direction: str,
        metric: str | None,
        progress: ShieldedSearch,
    ) -> None:
        super().__init__(run_id, gpus, progress)
        self._terms = terms
        self._direction = direction
        self._metric = metric
        self._progress = progress
        self._tally = GpuAccount(gpus, terms.slots)
        self._held = self._here = self._most = 0
        self._running: dict[int, TrialReport] = {}
        self._recent: deque[TrialReport] = deque(maxlen=_RECENT)
        self._counts = {COMPLETE: 0, PRUNED: 0, FAILED: 0}
        self._best: Best | None = None
        self._curve: list[tuple[int, float]] = []

    def _leave(self, state: GangState) -> None:
        """Do nothing: a search's preparation has no point in the timeline."""

    def _granted(self, hosts: Sequence[str]) -> None:
        """Do nothing: executors arrive one by one, and `executors` records them."""

    def _mark(self, point: str, at: float) -> None:
        """Record that a point was passed; the first time counts."""
        if getattr(self._timeline, point) is None:
            super()._mark(point, at)

    def arrived(self, times: Sequence[float]) -> None:
        """Do nothing: executors arrive one by one, and `executors` records them."""

    def executors(self, lease: _Executors, here: int, most: int) -> None:
        """Record the executors.

        Args:
            lease: acquires them.
            here: number of executors that are ready.
            most: number of executors that the search would use now.
        """
        held, why = lease.held, lease.waiting_for
        with self._lock:
            if held != self._held:
                self._tally.executors(held - self._held, time.time())
            self._held, self._here, self._most, self._why = held, here, most, why

    def before(self, reports: Iterable[TrialReport]) -> None:
        """Record the ended trials of earlier runs of the study."""
        with self._lock:
            for report in reports:
                self._count(report)

    def runs(self, at: float) -> None:
        """Record that the function of a trial runs.

        The trial's thread calls this; the next update of the display shows it.

        Args:
            at: when the function started, in seconds since the epoch.
        """
        self.mark("started", at)
        with self._lock:
            if self._state is GangState.STARTING:
                self._state = GangState.RUNNING

    def started(self, report: TrialReport, ranks: int) -> None:
        """Record a trial whose ranks are started."""
        with self._lock:
            self._running[report.number] = report
            self._tally.slots(ranks, time.time())

    def reported(self, number: int, step: int, value: float) -> None:
        """Record the last report of a running trial."""
        with self._lock:
            running = self._running.get(number)
            if running is not None:
                self._running[number] = dataclasses.replace(running, step=step, value=value)

    def running(self, number: int) -> TrialReport | None:
        """Return what is known of a running trial; None if the trial does not run."""
        with self._lock:
            return self._running.get(number)

    def left(self, number: int, ranks: int, report: TrialReport | None) -> None:
        """Record that a trial's ranks are gone.

        Args:
            number: number of the trial.
            ranks: number of its ranks.
            report: report of the trial if it has ended; None if it is put back.
        """
        with self._lock:
            self._running.pop(number, None)
            self._tally.slots(-ranks, time.time())
            if report is not None:
                self._count(report)
                self._recent.append(report)

    def _count(self, report: TrialReport) -> None:
        self._counts[report.state] += 1
        if report.state == COMPLETE and report.value is not None and self._is_better(report.value):
            self._best = Best(report.params, report.value, report.number)
            self._curve.append((sum(self._counts.values()), report.value))

    def _is_better(self, value: float) -> bool:
        if self._best is None:
            return True
        least = self._direction == "minimize"
        return value < self._best.value if least else value > self._best.value

    def show(self) -> None:
        self._progress.status(self.status())

    def line(self, trial: int, rank: int, host: str, *texts: str) -> None:
        """Show output of a trial."""
        self._progress.line(trial, rank, host, *texts)

    def result(self) -> GangResult:
        return GangResult(
            run_id=self.run_id,
            warnings=self.warnings,
            timeline=self.timeline,
            gpu_seconds=self.gpu_seconds(),
        )

    def status(self) -> SearchStatus:
        with self._lock:
            return SearchStatus(
                run_id=self.run_id,
                state=self._state.value,
                elapsed=self._elapsed,
                wanted=self._terms.trials,
                complete=self._counts[COMPLETE],
                pruned=self._counts[PRUNED],
                failed=self._counts[FAILED],
                executors=self._here,
                most=self._most,
                gpus=self._gpus,
                workers=self._terms.workers,
                waiting_for=self._why,
                direction=self._direction,
                metric=self._metric,
                best=self._best,
                running=tuple(report for _, report in sorted(self._running.items())),
                recent=tuple(self._recent),
                curve=tuple(self._curve),
                moments=tuple(self._tally.moments),
            )

    @property
    def best(self) -> Best | None:
        """Return the best trial so far; None if none is complete."""
        return self._best

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Return the GPUs held and used over time."""
        with self._lock:
            return tuple(self._tally.moments)

    def gpu_seconds(self) -> GpuSeconds:
        """Return how the GPU time was spent until now, or until the release."""
        with self._lock:
            return self._tally.seconds(self._timeline.released or time.time())


def about(report: TrialReport) -> Mapping[str, object]:
    """Return what Optuna keeps of a trial besides its parameters and value; JSON."""
    return {
        "gpu": report.gpu,
        "host": report.host,
        "started": report.started,
        "ended": report.ended,
        "tries": report.tries,
        "error": report.error,
        "metrics": dict(report.metrics),
        "step": report.step,
        "log": report.log,
    }
