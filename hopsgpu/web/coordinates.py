"""Parallel coordinates of a search's trials: where each line is. Pure.

Each parameter has an axis, and the metric has the last one; each trial is a line across them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.core.trials import COMPLETE, TrialReport, finite_value
from hopsgpu.display.search_phrases import number

# More lines are illegible.
MAX_LINES = 400
_MAX_AXES = 10
_MAX_LABELS = 8
# Ratio of the largest and the smallest value from which an axis is logarithmic.
_LOG_RATIO = 50.0
RANKS = 5


@dataclass(frozen=True)
class Axis:
    """A parameter, or the metric.

    Attributes:
        labels: texts with their places in [0, 1], from the bottom.
        is_log: whether equal ratios have equal distances.
    """

    name: str
    labels: tuple[tuple[float, str], ...]
    is_log: bool = False


@dataclass(frozen=True)
class TrialLine:
    """A trial.

    Attributes:
        places: its place on each axis in [0, 1]; None where it has no value.
        rank: 0 for the best fifth of the trials shown, up to 4 for the worst.
    """

    number: int
    places: tuple[float | None, ...]
    rank: int
    words: str


@dataclass(frozen=True)
class Coordinates:
    """A picture of trials.

    Attributes:
        axes: the axes, that of the metric last.
        lines: the trials, the best last, so that it is in front.
        left_out: number of complete trials that are not shown, the worst ones.
        axes_left_out: number of parameters that are not shown.
    """

    axes: tuple[Axis, ...]
    lines: tuple[TrialLine, ...]
    left_out: int = 0
    axes_left_out: int = 0


def coordinates(trials: Sequence[TrialReport], metric: str, *, is_minimized: bool) -> Coordinates:
    """Return the picture of the complete trials; the best ones of many.

    Args:
        trials: the trials, whose parameters and values may be anything that JSON can be.
    """
    sign = 1.0 if is_minimized else -1.0
    valued = [(trial, finite_value(trial)) for trial in trials if trial.state == COMPLETE]
    complete = [(trial, value) for trial, value in valued if value is not None]
    complete.sort(key=lambda pair: sign * pair[1])
    shown = complete[:MAX_LINES]
    # Trials may have different parameters: a space may be a function.
    names = list(dict.fromkeys(name for trial, _ in shown for name in trial.params))
    columns = [_column(name, [trial.params.get(name) for trial, _ in shown]) for name in names]
    kept = columns[:_MAX_AXES]
    kept.append(_column(metric, [value for _, value in shown]))
    lines = [
        TrialLine(
            trial.number,
            tuple(places[at] for _, places in kept),
            at * RANKS // max(len(shown), 1),
            _words(metric, value, trial.params),
        )
        for at, (trial, value) in enumerate(shown)
    ]
    return Coordinates(
        tuple(axis for axis, _ in kept),
        tuple(reversed(lines)),
        len(complete) - len(shown),
        len(columns) + 1 - len(kept),
    )


def _words(metric: str, value: float, params: Mapping[str, Any]) -> str:
    pairs = [f"{metric} {number(value)}", *(f"{n} {number(v)}" for n, v in params.items())]
    return ", ".join(pairs[: _MAX_AXES + 1])


def _column(name: str, values: Sequence[Any]) -> tuple[Axis, Sequence[float | None]]:
    """Return an axis, and the place of each value on it."""
    if all(value is None or _is_number(value) for value in values):
        numbers = [None if value is None else float(value) for value in values]
        return _numeric(name, numbers)
    texts = [None if value is None else number(value) for value in values]
    kinds = sorted({text for text in texts if text is not None})
    at = {text: 0.5 if len(kinds) == 1 else n / (len(kinds) - 1) for n, text in enumerate(kinds)}
    step = -(-len(kinds) // _MAX_LABELS)
    labels = tuple((at[text], text) for text in kinds[::step])
    return Axis(name, labels), [None if text is None else at[text] for text in texts]


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _numeric(name: str, values: Sequence[float | None]) -> tuple[Axis, Sequence[float | None]]:
    numbers = [value for value in values if value is not None]
    least, most = min(numbers, default=0.0), max(numbers, default=0.0)
    is_log = least > 0 and most / least >= _LOG_RATIO
    low, high = (math.log(least), math.log(most)) if is_log else (least, most)
    span = high - low

    def place(value: float | None) -> float | None:
        if value is None:
            return None
        at = math.log(value) if is_log else value
        return (at - low) / span if span and math.isfinite(span) else 0.5

    if not numbers:
        return Axis(name, ()), [None for _ in values]
    ends = ((0.0, number(least)), (1.0, number(most))) if most > least else ((0.5, number(most)),)
    return Axis(name, ends, is_log), [place(value) for value in values]
