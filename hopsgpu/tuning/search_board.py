"""The status board of a search: how its trials and executors are."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Mapping

from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED, Best, SearchStatus, TrialReport
from hopsgpu.display.progress import ShieldedSearch
from hopsgpu.executors.executors_board import ExecutorsBoard
from hopsgpu.executors.item_placement import PlacementTerms

_RECENT = 50


class SearchBoard(ExecutorsBoard):
    """The status board of a search."""

    def __init__(
        self,
        run_id: str,
        terms: PlacementTerms,
        gpus: int,
        direction: str,
        metric: str | None,
        progress: ShieldedSearch,
    ) -> None:
        super().__init__(run_id, terms, gpus, progress)
        self._direction = direction
        self._metric = metric
        self._progress = progress
        self._running: dict[int, TrialReport] = {}
        self._recent: deque[TrialReport] = deque(maxlen=_RECENT)
        self._counts = {COMPLETE: 0, PRUNED: 0, FAILED: 0}
        self._best: Best | None = None
        self._curve: list[tuple[int, float]] = []

    def add_ended_trials(self, reports: Iterable[TrialReport]) -> None:
        with self._lock:
            for report in reports:
                self._count(report)

    def record_start(self, report: TrialReport, ranks: int) -> None:
        with self._lock:
            self._running[report.number] = report
            self._account.change_slots(ranks, time.time())

    def record_report(self, number: int, step: int, value: float) -> None:
        with self._lock:
            running = self._running.get(number)
            if running is not None:
                self._running[number] = dataclasses.replace(running, step=step, value=value)

    def find_running(self, number: int) -> TrialReport | None:
        """Return what is known of a running trial; None if the trial does not run."""
        with self._lock:
            return self._running.get(number)

    def record_end(
        self,
        number: int,
        ranks: int,
        report: TrialReport | None,
        losses: RankLosses = RankLosses(),  # noqa: B008 - frozen
    ) -> None:
        """Record that a trial's ranks are gone.

        Args:
            report: report of the trial if it has ended; None if it is put back.
        """
        with self._lock:
            self._running.pop(number, None)
            self._account.change_slots(-ranks, time.time())
            self._account.add_losses(losses)
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

    def line(self, number: int, rank: int, host: str, *texts: str) -> None:
        self._progress.line(number, rank, host, *texts)

    def status(self) -> SearchStatus:
        with self._lock:
            return SearchStatus(
                run_id=self.run_id,
                state=self._state.value,
                elapsed=self._elapsed_seconds,
                wanted=self._terms.items,
                complete=self._counts[COMPLETE],
                pruned=self._counts[PRUNED],
                failed=self._counts[FAILED],
                executors=self._ready_count,
                most=self._max_count,
                gpus=self._gpus,
                workers=self._terms.ranks,
                waiting_for=self._why.sentence,
                waiting_details=self._why.details,
                direction=self._direction,
                metric=self._metric,
                best=self._best,
                running=tuple(report for _, report in sorted(self._running.items())),
                recent=tuple(self._recent),
                curve=tuple(self._curve),
                moments=tuple(self._account.moments),
                gpu_seconds=self._gpu_seconds(),
                application=self.application,
                queue=self.queue,
            )

    @property
    def best(self) -> Best | None:
        """Return the best trial so far; None if none is complete."""
        return self._best


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
