"""Which checkpoints are kept: the last ones, and the best by a metric."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.errors import ConfigError

# The bound of the steps of `report` too. A step is the name of a directory.
MAX_STEP = 2**63 - 1
_SIGNS = {"min": -1.0, "max": 1.0}


@dataclass(frozen=True)
class CheckpointOptions:
    """How a checkpoint is saved; `check_options` checks the values.

    Attributes:
        keep: number of last steps to keep.
        best: "min" if the smallest metric is the best, "max" if the largest is.
        position: the position in the launch's data, for its record; None without data.
        agreed: the last step at which `should_checkpoint` told the rank to save, or None.
    """

    step: int
    keep: int = 3
    metric: float | None = None
    best: str = "min"
    position: Mapping[str, Any] | None = None
    agreed: int | None = None


def check_options(step: object, keep: object, metric: object, best: object) -> CheckpointOptions:
    """Check a user's arguments; numbers may be NumPy's or torch's.

    A metric that is NaN or infinite counts as None, because it is never the best.

    Raises:
        ConfigError: `step` is not an int in [0, 2**63), `keep` not one in [1, 2**63), `metric` not
            a number or None, or `best` not "min" or "max".
    """
    if not isinstance(best, str) or best not in _SIGNS:
        raise ConfigError(f"best={best!r}: must be 'min' or 'max'")
    number = None if metric is None else _number(metric)
    if number is not None and not math.isfinite(number):
        number = None
    return CheckpointOptions(check_step(step), _integer("keep", keep, 1), number, best)


def check_step(step: object) -> int:
    """Return a step as an int; raise ConfigError unless it is an integer in [0, 2**63)."""
    return _integer("step", step, 0)


def steps_to_remove(
    existing: Collection[int], scores: Mapping[int, tuple[float | None, str]], keep: int
) -> frozenset[int]:
    """Return the steps to remove after a save: all but the last `keep` complete steps and the best.

    An incomplete step is removed too once `keep` later steps are complete: no rank will complete
    it.

    Args:
        existing: all steps of which anything exists.
        scores: for each complete step its metric, or None, and "min" or "max" for which metric is
            the best; the newest direction counts.
    """
    if len(scores) <= keep:
        return frozenset()
    oldest = sorted(scores)[-keep]
    sign = newest_direction([scores[step] for step in sorted(scores)])
    scored = [(sign * metric, step) for step, (metric, _) in scores.items() if metric is not None]
    kept = {step for _, step in [max(scored)]} if scored else set()
    return frozenset(step for step in existing if step < oldest) - kept


def newest_direction(scores: Sequence[tuple[float | None, str]]) -> float:
    """Return 1 if the largest metric is the best, -1 if the smallest is or if there is no metric.

    Args:
        scores: metrics with "min" or "max", the newest last; the last entry with a metric decides.
    """
    return next((_SIGNS[best] for metric, best in reversed(scores) if metric is not None), -1.0)


def _integer(name: str, value: Any, minimum: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if isinstance(value, bool) or not minimum <= number <= MAX_STEP:
        try:
            shown = f"{value!r:.99}"
        except ValueError:  # an int with more digits than Python converts to text
            shown = "a number too long to be shown"
        raise ConfigError(f"{name}={shown}: must be an integer ≥ {minimum} and < 2**63")
    return number


def _number(value: Any) -> float:
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError(f"a {type(value).__name__}")
        # torch warns if a tensor that still has a gradient, such as a loss, is converted.
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"metric={value!r:.99}: must be a number, or a value that float() accepts ({error})"
        ) from error
