"""The GPU time of one run over its lifetime, as points of a curve. Pure functions of values."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.core.run_values import GpuSeconds

# Most points of a run in its record, however long the run.
_MAX_POINTS = 100
# Far less than a table in hours shows.
_TOLERATED_SECONDS = 1.0


@dataclass(frozen=True)
class UsePoint:
    """The GPU seconds of a run from its request until a point in time.

    Attributes:
        time: seconds since the epoch.
        held, training, publishing: as in `GpuSeconds`.
        waited: seconds in which the run waited for its executors, times the GPUs without which it
            could not start.
    """

    time: float
    held: float = 0.0
    training: float = 0.0
    publishing: float = 0.0
    waited: float = 0.0

    @property
    def total(self) -> GpuUse:
        return GpuUse(self.held, self.training, self.publishing, self.waited)

    def round_values(self) -> UsePoint:
        return UsePoint(*(round(value, 3) for value in dataclasses.astuple(self)))


Points = tuple[UsePoint, ...]
_COUNTED = tuple(field.name for field in dataclasses.fields(UsePoint) if field.name != "time")


def add_point(points: Sequence[UsePoint], seconds: GpuSeconds, waited: float, now: float) -> Points:
    """Return the points of a run, with its GPU seconds until now as the last point.

    Points on a straight line between two others are left out, so that a usual run has one point for
    each of its phases. If there are too many points, every second one is dropped.

    Args:
        points: the points so far, at least that of the request.
        waited: the run's GPU seconds of waiting until now.
    """
    # A clock that was set back must not put points out of order.
    now = max(now, points[-1].time)
    new = UsePoint(now, seconds.held, seconds.training, seconds.publishing, waited)
    kept = list(points)
    if len(kept) > 1 and _is_between(kept[-2], kept[-1], new):
        kept.pop()
    kept.append(new)
    if len(kept) > _MAX_POINTS:
        del kept[1:-1:2]
    return tuple(kept)


def _is_between(first: UsePoint, middle: UsePoint, last: UsePoint) -> bool:
    if not first.time < middle.time < last.time:
        return False
    expected = _at(first, last, middle.time)
    return all(abs(expected[n] - getattr(middle, n)) <= _TOLERATED_SECONDS for n in _COUNTED)


def _at(first: UsePoint, last: UsePoint, time: float) -> Mapping[str, float]:
    """Return the values of a line at a time between its ends, which are not at the same time."""
    share = (time - first.time) / (last.time - first.time)
    return {
        name: getattr(first, name) + share * (getattr(last, name) - getattr(first, name))
        for name in _COUNTED
    }


@dataclass(frozen=True)
class GpuUse:
    """GPU seconds of a run, or of several, within a period."""

    held: float = 0.0
    training: float = 0.0
    publishing: float = 0.0
    waited: float = 0.0

    @property
    def idle(self) -> float:
        """GPU seconds that were held, without those of training and publishing."""
        return max(self.held - self.training - self.publishing, 0.0)

    def __add__(self, other: GpuUse) -> GpuUse:
        return GpuUse(*(getattr(self, name) + getattr(other, name) for name in _COUNTED))


def use_between(points: Sequence[UsePoint], began: float, ended: float) -> GpuUse:
    """Return the GPU seconds in the period [began, ended), spread evenly between two points."""
    before, after = _until(points, began), _until(points, ended)
    return GpuUse(*(max(after[name] - before[name], 0.0) for name in _COUNTED))


def _until(points: Sequence[UsePoint], time: float) -> Mapping[str, float]:
    following = bisect_left(points, time, key=lambda point: point.time)
    if not following:
        return dict.fromkeys(_COUNTED, 0.0)
    last = points[following - 1]
    if following == len(points):
        return {name: getattr(last, name) for name in _COUNTED}
    return _at(last, points[following], time)
