"""Which checkpoints are kept: the last of them, and the best by a metric."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.errors import ConfigError

# As of the steps of `report`; a step is a directory's name.
_MOST = 2**63 - 1
_SIGNS = {"min": -1.0, "max": 1.0}


@dataclass(frozen=True)
class Saving:
    """What is said of a checkpoint when it is saved; `wanted` checks it.

    Attributes:
        step: 0 and above.
        keep: how many of the last steps are kept.
        metric: a finite number, or None.
        best: whether the "min" or the "max" of the metric is the best.
    """

    step: int
    keep: int = 3
    metric: float | None = None
    best: str = "min"


def wanted(step: object, keep: object, metric: object, best: object) -> Saving:
    """What is said of a checkpoint, as a user gives it.

    Args:
        step: an int in [0, 2**63), NumPy's and torch's too.
        keep: an int in [1, 2**63).
        metric: a number, NumPy's and torch's too, or None; NaN and the infinities count as None,
            as they are never the best.
        best: "min" or "max".

    Raises:
        ConfigError: anything else.
    """
    if not isinstance(best, str) or best not in _SIGNS:
        raise ConfigError(f"best={best!r}: must be 'min' or 'max'")
    number = None if metric is None else _number(metric)
    if number is not None and not math.isfinite(number):
        number = None
    return Saving(_whole("step", step, 0), _whole("keep", keep, 1), number, best)


def superseded(
    there: Collection[int], scores: Mapping[int, tuple[float | None, str]], keep: int
) -> frozenset[int]:
    """The steps to remove after a save.

    A step that is not complete is never finished once so many later ones are.

    Args:
        there: all steps of which anything is there.
        scores: by step, of those that are complete: the metric, or None, and whether its "min" or
            "max" is the best, of which the newest counts. The best is kept besides.
        keep: how many complete steps are kept.
    """
    if len(scores) <= keep:
        return frozenset()
    oldest = sorted(scores)[-keep]
    sign = newest_direction([score for _, score in sorted(scores.items())])
    scored = [(sign * metric, step) for step, (metric, _) in scores.items() if metric is not None]
    kept = {step for _, step in [max(scored)]} if scored else set()
    return frozenset(step for step in there if step < oldest) - kept


def newest_direction(found: Sequence[tuple[float | None, str]]) -> float:
    """1 where the largest metric is the best and -1 where the smallest is, as was said last.

    Args:
        found: metrics, or None, with "min" or "max", the newest last.
    """
    return next((_SIGNS[best] for metric, best in reversed(found) if metric is not None), -1.0)


def _whole(name: str, given: Any, least: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        number = least - 1
    if isinstance(given, bool) or not least <= number <= _MOST:
        try:
            shown = f"{given!r:.99}"
        except ValueError:  # an int of more digits than Python writes out
            shown = "a number too long to be shown"
        raise ConfigError(f"{name}={shown}: must be an integer ≥ {least} and < 2**63")
    return number


def _number(given: Any) -> float:
    try:
        if isinstance(given, (str, bytes, bytearray)):
            raise TypeError("a text")
        # torch warns where a number is made of what still has a gradient, as a loss has.
        return float(given.detach() if hasattr(given, "detach") else given)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"metric={given!r:.99}: must be a number, or a value that float() accepts ({error})"
        ) from error
