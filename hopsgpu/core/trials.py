"""What a search shows while it goes on, and what it leaves: frozen values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hopsgpu.core.run_values import GpuSeconds, Timeline

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

    __module__ = "hopsgpu"

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

    __module__ = "hopsgpu"

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

    __module__ = "hopsgpu"

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
class SearchOutcome:
    """What a search left, as values; `SearchResult` is what users get of it."""

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

    __module__ = "hopsgpu"

    component: str
    mean: float | None
    spread: float | None
    difference: float | None
    values: tuple[float, ...] = ()
    failed: int = 0


@dataclass(frozen=True)
class AblationOutcome:
    """What an ablation left, as values; `AblationResult` is what users get of it."""

    run_id: str
    rows: tuple[AblationRow, ...]
    direction: str
    metric: str | None
    search: SearchOutcome = field(repr=False)
