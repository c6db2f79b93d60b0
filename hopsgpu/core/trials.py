"""The status of a search while it runs, and its results: frozen values."""

from __future__ import annotations

import math
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
    """The process that writes lines."""

    trial: int
    rank: int


@dataclass(frozen=True)
class Moment:
    """The number of GPUs (of executors, on CPUs) that were held, and that ran trials, from `time`
    on.
    """

    time: float
    held: float
    running: float


@dataclass(frozen=True)
class TrialReport:
    """One trial of a search.

    Attributes:
        number: Optuna's number, from 0.
        params: parameters by name, as Optuna has them.
        state: "complete", "pruned", "failed"; "running" if the trial has not ended.
        value: the metric that the trial returned, or the last that a pruned trial reported; or
            None.
        metrics: numbers that the function returned, by name.
        step: the last step at which the trial reported the metric, or None.
        gpu: UUIDs of its GPUs, joined by ","; "" on CPUs.
        host: hosts of its ranks, joined by ",".
        started: when its ranks were last started, seconds since the epoch; or None.
        ended: when they had ended; or None.
        tries: how often the trial was started.
        error: what failed, with the user's traceback; "" if nothing did.
        log: URL of the directory that has its ranks' logs.
    """

    __module__ = "hopsgpu.types"

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
        """Return the seconds from the start of its ranks to their end; None if it has not ended."""
        if self.started is None or self.ended is None:
            return None
        return self.ended - self.started


def finite_value(trial: TrialReport) -> float | None:
    """Return a trial's metric; None if it has none, or one that is not finite."""
    value = trial.value
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Best:
    """The best trial.

    Attributes:
        params: its parameters.
        value: its metric.
        number: the trial's number.
    """

    __module__ = "hopsgpu.types"

    params: Mapping[str, Any]
    value: float
    number: int


@dataclass(frozen=True)
class SearchStatus:
    """The status of a search at one moment.

    Attributes:
        run_id: the search's id.
        state: a GangState's value: "requested", "preparing", "waiting" until the first trial is
            started, "starting", "running", "releasing", "succeeded", "failed", "cancelled".
        elapsed: seconds since the search began.
        wanted: number of trials that are to end in all.
        complete: trials that ended with a metric, including those of earlier runs of the study.
        pruned: trials that the pruner ended.
        failed: trials that failed.
        executors: executors that have arrived.
        most: largest number of executors that the search would use now.
        gpus: GPUs of an executor; 0 on CPUs.
        workers: ranks of a trial.
        waiting_for: why the search has no more executors, as one sentence; "" if it wants no more.
        direction: "minimize" or "maximize".
        metric: name of the metric that is optimised, or None.
        best: the best trial so far, or None.
        running: trials that run, by number.
        recent: trials that ended last, the latest last; a bounded number.
        curve: best value so far after a number of ended trials: pairs (trials ended, value), one
            for each improvement.
        moments: GPUs held and used over time.
        gpu_seconds: how the GPU time has been spent so far; `training` is that of the trials.
        application: ID of the Spark application.
        queue: its YARN queue; "" without YARN.
        waiting_details: further phrases about `waiting_for`, the most useful first.
    """

    __module__ = "hopsgpu.types"

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
    gpu_seconds: GpuSeconds = GpuSeconds()
    application: str = ""
    queue: str = ""
    waiting_details: tuple[str, ...] = ()

    @property
    def attempt(self) -> int:
        """Return 0, because trials are tried again, but not the search."""
        return 0

    @property
    def ended(self) -> int:
        """Return the number of trials that have ended."""
        return self.complete + self.pruned + self.failed


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of a search, as values; users get it as a `SearchResult`."""

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
    application: str = ""
    queue: str = ""

    @property
    def states(self) -> Mapping[str, int]:
        """Return how many trials are in each state."""
        return Counter(trial.state for trial in self.trials)


@dataclass(frozen=True)
class AblationRow:
    """The metric without one component.

    Attributes:
        component: the component that was left out; "" for the whole.
        mean: mean over the seeds; None if no trial is complete.
        spread: sample standard deviation over the seeds; None for fewer than two.
        difference: the mean minus that of the whole; None if one of them is missing.
        values: the metric of each seed whose trial is complete.
        failed: number of trials that failed.
    """

    __module__ = "hopsgpu.types"

    component: str
    mean: float | None
    spread: float | None
    difference: float | None
    values: tuple[float, ...] = ()
    failed: int = 0


@dataclass(frozen=True)
class AblationOutcome:
    """The outcome of an ablation, as values; users get it as an `AblationResult`."""

    run_id: str
    rows: tuple[AblationRow, ...]
    direction: str
    metric: str | None
    search: SearchOutcome = field(repr=False)
