"""The outcome of a trial, computed from what its ranks left, without side effects."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_SHOWN = 200


class NoMetric(Exception):
    """The function returned no valid metric; the message says why, for the user."""


def metric_of(returned: object, metric: str | None) -> tuple[float, dict[str, float]]:
    """Return the metric in what a function returned, and all numbers in it.

    Args:
        returned: a number, or a mapping of names to numbers.
        metric: name of the number that counts; None if there is only one.

    Raises:
        NoMetric: the metric is missing, is no number, or is NaN.
    """
    if isinstance(returned, Mapping):
        name = metric if metric is not None or len(returned) != 1 else next(iter(returned))
        if name is None:
            listed = ", ".join(map(str, returned))
            raise NoMetric(
                f"the function returned several numbers ({listed:.{_SHOWN}}): name the metric with"
                " metric="
            )
        if name not in returned:
            listed = ", ".join(map(str, returned)) or "nothing"
            raise NoMetric(
                f"the function returned no metric {name!r}; it returned {listed:.{_SHOWN}}"
            )
        value = _number(returned[name])
        converted = {str(key): _number_or_none(item) for key, item in returned.items()}
        numbers = {key: number for key, number in converted.items() if number is not None}
    else:
        value = _number(returned)
        numbers = {metric: value} if metric is not None else {}
    if math.isnan(value):
        raise NoMetric("the metric that the function returned is NaN")
    return value, numbers


def _number(value: Any) -> float:
    number = _number_or_none(value)
    if number is None:
        raise NoMetric(f"the function returned {value!r:.{_SHOWN}}; the metric must be a number")
    return number


def _number_or_none(value: Any) -> float | None:
    if value is None or isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # RuntimeError: a torch tensor with several elements.
        return None


class Reports:
    """Parses the reports of a trial's first rank, from chunks of its file that may end anywhere.

    Args:
        metric: name of the metric that counts; None if only one is reported.

    Attributes:
        several: names of the metrics, if several are reported and none is named; else empty.
    """

    def __init__(self, metric: str | None) -> None:
        self._metric = metric
        self._rest = b""
        self.several: tuple[str, ...] = ()

    def take(self, chunk: bytes) -> list[tuple[int, float]]:
        """Return pairs (step, metric), one for each report that the chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        reports = (self._read(line) for line in lines)
        return [report for report in reports if report is not None]

    def _read(self, line: bytes) -> tuple[int, float] | None:
        try:
            record = json.loads(line)
            # GPU samples in the same file have no metrics.
            metrics = dict(record.get("metrics", ()))
            name = self._name(metrics)
            return (int(record["step"]), float(metrics[name])) if name in metrics else None
        except (ValueError, TypeError, KeyError, AttributeError):
            # A full disk cut the line off, and the writer got the error; or others wrote it.
            return None

    def _name(self, metrics: Mapping[str, Any]) -> str | None:
        if self._metric is None and len(metrics) == 1:
            return next(iter(metrics))
        if self._metric is None and metrics:
            self.several = tuple(metrics)
        return self._metric
