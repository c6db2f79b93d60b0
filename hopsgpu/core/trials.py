"""What a search shows while it goes on, and what it leaves: frozen values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hopsgpu.core.results import GpuSeconds, Timeline

if TYPE_CHECKING:
    import optuna

RUNNING = "running"
COMPLETE = "complete"
PRUNED = "pruned"
FAILED = "failed"


class Writer(NamedTuple):
    """Who writes lines.

    Attributes:
        trial: its number.
        rank: of the trial's ranks.
    """

    trial: int
    rank: int


@dataclass(frozen=True)
class Moment:
    """How many GPUs were held and how many of them ran trials, from a point in time on.

    Attributes:
        time: seconds since the epoch.
        held: GPUs that were held (executors, of a search on CPUs).
        running: GPUs on which a trial ran (executors, of a search on CPUs).
    """

    time: float
    held: float
    running: float


@dataclass(frozen=True)
class TrialReport:
    """One trial of a search.

    Attributes:
        number: Optuna's, from 0.
        params: by name, as Optuna has them.
        state: "complete", "pruned", "failed"; "running" of one that has not ended.
        value: the metric that it returned, of a pruned one the last that it reported; or None.
        metrics: numbers that the function returned, by name.
        step: the last at which it reported the metric, or None.
        gpu: UUIDs of its GPUs, with "," between them; "" on CPUs.
        host: of its ranks, with "," between them.
        started: when its ranks were started the last time, seconds since the epoch; or None.
        ended: when they had ended; or None.
        tries: how often it was started.
        error: what failed, with the user's traceback; "" where nothing did.
        log: URL of the directory with its ranks' logs.
    """

    number: int
    params: Mapping[str, Any]
    state: str
    value: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    gpu: str = ""
    host: str = ""
    started: float | None = None
    ended: float | None = None
    tries: int = 1
    error: str = ""
    log: str = ""

    @property
    def duration(self) -> float | None:
        """Seconds from the start of its ranks to their end; None where it has not ended."""
        if self.started is None or self.ended is None:
            return None
        return self.ended - self.started


@dataclass(frozen=True)
class Best:
    """The best trial.

    Attributes:
        params: of it.
        value: its metric.
        number: of the trial.
    """

    params: Mapping[str, Any]
    value: float
    number: int


@dataclass(frozen=True)
class SearchStatus:
    """A search at a moment.

    Attributes:
        run_id: names the search.
        state: a GangState's value: "requested", "preparing", "waiting" until the first trial is
            started, "starting", "running", "releasing", "succeeded", "failed", "cancelled".
        elapsed: seconds since it was begun.
        wanted: trials that are to end in all.
        complete: trials that ended with a metric, those of an earlier run of the study among them.
        pruned: trials that the pruner ended.
        failed: trials that failed.
        executors: that are here.
        most: executors that it would have at most now.
        gpus: of an executor; 0 on CPUs.
        workers: ranks of a trial.
        waiting_for: why it has not more, in words with numbers; "" where it wants no more.
        direction: "minimize" or "maximize".
        metric: name of what is searched for, or None.
        best: so far, or None.
        running: trials that run, by number.
        recent: trials that ended last, the latest last; a bounded number.
        curve: best value so far after so many ended trials: pairs (trials ended, value), one for
            each time that it became better.
        moments: GPUs held and used over time.
    """

    run_id: str
    state: str
    elapsed: float
    wanted: int
    complete: int = 0
    pruned: int = 0
    failed: int = 0
    executors: int = 0
    most: int = 0
    gpus: int = 1
    workers: int = 1
    waiting_for: str = ""
    direction: str = "minimize"
    metric: str | None = None
    best: Best | None = None
    running: tuple[TrialReport, ...] = ()
    recent: tuple[TrialReport, ...] = ()
    curve: tuple[tuple[int, float], ...] = ()
    moments: tuple[Moment, ...] = ()

    @property
    def attempt(self) -> int:
        """0: its trials are tried again, and not the search."""
        return 0

    @property
    def ended(self) -> int:
        """Trials that have ended."""
        return self.complete + self.pruned + self.failed


@dataclass(frozen=True)
class SearchResult:
    """What a search left.

    Attributes:
        run_id: names the search's directory on the lake; `search(resume=run_id)` goes on with it.
        best: params, value and number of the best trial; None where none is complete.
        trials: all, in the order of their numbers, those of earlier runs of the study among them.
        study: Optuna's, for its plots and its further use.
        direction: "minimize" or "maximize".
        metric: name of what is searched for, or None.
        gpu_seconds: where the GPU time of this run went; `training` is that of trials.
        timeline: `granted` is when the first executor was ready, `started` when the function of
            the first trial ran, `returned` when the last trial had ended.
        moments: GPUs held and used over time.
        warnings: what a person should know.
    """

    run_id: str
    best: Best | None
    trials: tuple[TrialReport, ...]
    study: optuna.Study = field(repr=False)
    direction: str = "minimize"
    metric: str | None = None
    gpu_seconds: GpuSeconds = GpuSeconds()
    timeline: Timeline = Timeline()
    moments: tuple[Moment, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def states(self) -> Mapping[str, int]:
        """How many trials are in each state."""
        return Counter(trial.state for trial in self.trials)

    def plot(self, path: str | Path) -> None:
        """Writes a page with all trials and Optuna's plots, for a browser, to a local file.

        Args:
            path: of the file; one that is there is written over.
        """
        from hopsgpu.display.search_page import page

        Path(path).write_text(page(self), encoding="utf-8")

    def __repr__(self) -> str:
        # Trials are thousands; what a person looks for must be seen beside them.
        from hopsgpu.display.search_phrases import ends, shortened

        parts = [f"run_id={self.run_id!r}"]
        if self.best is not None:
            best = self.best
            parts.append(f"best={best.value:.6g} (trial {best.number}: {shortened(best.params)})")
        parts.append(ends(len(self.trials), self.states))
        parts += [f"warnings={self.warnings!r}"] if self.warnings else []
        parts += [str(self.timeline), str(self.gpu_seconds)]
        return f"SearchResult({', '.join(parts)})"

    def _repr_html_(self) -> str:
        from hopsgpu.display.search_cards import search_card

        return search_card(self)


@dataclass(frozen=True)
class AblationRow:
    """What the metric is without one component.

    Attributes:
        component: that was left out; "" of the whole.
        mean: over the seeds; None where no trial is complete.
        spread: sample standard deviation over the seeds; None of fewer than two.
        difference: the mean less that of the whole; None where one of them is missing.
        values: the metric of each seed whose trial is complete.
        failed: trials that failed.
    """

    component: str
    mean: float | None
    spread: float | None
    difference: float | None
    values: tuple[float, ...] = ()
    failed: int = 0


@dataclass(frozen=True)
class AblationResult:
    """What each component is worth: the metric without it, against that of the whole.

    Attributes:
        run_id: names the search's directory on the lake.
        rows: the whole first, then a row for each component.
        direction: "minimize" or "maximize".
        metric: name of what was measured, or None.
        search: its trials.
    """

    run_id: str
    rows: tuple[AblationRow, ...]
    direction: str
    metric: str | None
    search: SearchResult = field(repr=False)

    def __str__(self) -> str:
        from hopsgpu.display.ablation import text

        return text(self)

    def _repr_html_(self) -> str:
        from hopsgpu.display.ablation import card

        return card(self)
