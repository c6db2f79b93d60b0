"""Searches as values: what a display is told and shows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import optuna

from hopsgpu.core.run_values import GpuSeconds, Timeline
from hopsgpu.core.trials import (
    COMPLETE,
    FAILED,
    PRUNED,
    RUNNING,
    Best,
    Moment,
    SearchStatus,
    TrialReport,
)
from hopsgpu.tuning.search_results import SearchResult

ERROR = """rank 0 on node1 (container_1, GPU-0) failed with exit code 1
Traceback (most recent call last):
  File "train.py", line 3, in train
ValueError: <lr> is too large
whole log: hdfs://nowhere/runs/s-1/trials/7"""


def trial(number: int, state: str = COMPLETE, **given: object) -> TrialReport:
    """A trial on one of four GPUs, which took two seconds."""
    parts: dict[str, object] = {
        "params": {"lr": 10.0 ** -(1 + number % 5), "optimizer": ("adam", "sgd")[number % 2]},
        "value": None if state == FAILED else 1 / (1 + number),
        "gpu": f"GPU-{number % 4}a2b3c4d-0000-0000",
        "host": f"node{1 + number % 2}",
        "started": 1000.0 + number,
        "ended": None if state == RUNNING else 1002.0 + number,
        "error": ERROR if state == FAILED else "",
    }
    return TrialReport(number, state=state, **(parts | given))  # type: ignore[arg-type]


def status(ended: int, running: int = 4, **given: object) -> SearchStatus:
    """A search of which so many trials have ended: all are complete, each better than the last."""
    best = trial(ended - 1) if ended else None
    parts: dict[str, object] = {
        "state": "running",
        "elapsed": ended / 2,
        "wanted": 60,
        "complete": ended,
        "executors": 4,
        "most": 8,
        "waiting_for": "node2 is <full>",
        "best": best and Best(best.params, best.value, best.number),  # type: ignore[arg-type]
        "running": tuple(trial(ended + n, RUNNING, step=n) for n in range(running)),
        "recent": tuple(trial(n) for n in range(max(ended - 20, 0), ended)),
        "curve": tuple((n + 1, 1 / (1 + n)) for n in range(ended)),
        "moments": tuple(Moment(1000.0 + n, min(n, 4), min(n, 3)) for n in range(ended)),
    }
    return SearchStatus("s-1", **(parts | given))  # type: ignore[arg-type]


def study_of(trials: Sequence[TrialReport]) -> optuna.Study:
    """Optuna's, with the same trials."""
    study = optuna.create_study()
    kinds = {
        "lr": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True),
        "optimizer": optuna.distributions.CategoricalDistribution(("adam", "sgd")),
    }
    states = {
        COMPLETE: optuna.trial.TrialState.COMPLETE,
        PRUNED: optuna.trial.TrialState.PRUNED,
        FAILED: optuna.trial.TrialState.FAIL,
    }
    for one in trials:
        study.add_trial(
            optuna.trial.create_trial(
                params=dict(one.params),
                distributions=kinds,
                value=one.value if one.state == COMPLETE else None,
                state=states[one.state],
            )
        )
    return study


def result(trials: Sequence[TrialReport], **given: object) -> SearchResult:
    """What a search left."""
    complete = [one for one in trials if one.state == COMPLETE]
    best = min(complete, key=lambda one: one.value or math.inf, default=None)
    parts: dict[str, object] = {
        "best": best and Best(best.params, best.value, best.number),  # type: ignore[arg-type]
        "trials": tuple(trials),
        "study": study_of(trials),
        "metric": "loss",
        "gpu_seconds": GpuSeconds(held=40.0, training=36.0, idle=4.0),
        "timeline": Timeline(requested=999.0, granted=1000.0),
        "moments": tuple(Moment(1000.0 + n / 2, min(n, 4), min(n, 3)) for n in range(40)),
    }
    return SearchResult("s-1", **(parts | given))  # type: ignore[arg-type]
