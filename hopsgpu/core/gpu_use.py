"""The GPU time of one run over its lifetime, as points of a curve. Pure functions of values."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.core.run_values import GpuSeconds

# A run of months has no more points than this in its record.
_MOST_POINTS = 100
# Far less than what a table in hours shows.
_TOLERATED_SECONDS = 1.0


@dataclass(frozen=True)
class UsePoint:
    """The GPU seconds of a run from its request until a point in time.

    Attributes:
        time: seconds since the epoch.
        held: GPU seconds held, as `GpuSeconds.held`.
        training: GPU seconds of training.
        publishing: GPU seconds of publishing.
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
        """Return the GPU seconds until this point."""
        return GpuUse(self.held, self.training, self.publishing, self.waited)

    def rounded(self) -> UsePoint:
        """Return the point with all values rounded to the millisecond."""
        return UsePoint(*(round(value, 3) for value in dataclasses.astuple(self)))


Points = tuple[UsePoint, ...]
_COUNTED = tuple(field.name for field in dataclasses.fields(UsePoint) if field.name != "time")


def extended(points: Sequence[UsePoint], seconds: GpuSeconds, waited: float, now: float) -> Points:
    """Return the points of a run, with its GPU seconds until now as the last.

    Points on a straight line between two others are left out, so that the usual run has one for
    each of its phases. A run with many others keeps every second of them.

    Args:
        points: the points so far, at least that of the request.
        seconds: the run's GPU seconds until now.
        waited: its GPU seconds of waiting until now.
        now: seconds since the epoch.
    """
    # A clock that was set back must not put points out of order.
    now = max(now, points[-1].time)
    new = UsePoint(now, seconds.held, seconds.training, seconds.publishing, waited)
    kept = list(points)
    if len(kept) > 1 and _is_between(kept[-2], kept[-1], new):
        kept.pop()
    kept.append(new)
    if len(kept) > _MOST_POINTS:
        del kept[1:-1:2]
    return tuple(kept)


def _is_between(first: UsePoint, middle: UsePoint, last: UsePoint) -> bool:
    """Return whether a point is on the line from one to another."""
    if not first.time < middle.time < last.time:
        return False
    expected = _at(first, last, middle.time)
    return all(abs(expected[n] - getattr(middle, n)) <= _TOLERATED_SECONDS for n in _COUNTED)


def _at(first: UsePoint, last: UsePoint, time: float) -> Mapping[str, float]:
    """Return what a line has at a time between its ends, which are not at the same time."""
    share = (time - first.time) / (last.time - first.time)
    return {
        name: getattr(first, name) + share * (getattr(last, name) - getattr(first, name))
        for name in _COUNTED
    }


@dataclass(frozen=True)
class GpuUse:
    """GPU seconds of a run, or of several, within a period.

    Attributes:
        held: GPU seconds held.
        training: GPU seconds of training.
        publishing: GPU seconds of publishing.
        waited: GPU seconds of waiting.
    """

    held: float = 0.0
    training: float = 0.0
    publishing: float = 0.0
    waited: float = 0.0

    @property
    def idle(self) -> float:
        """Return the GPU seconds that were held, without those of training and publishing."""
        return max(self.held - self.training - self.publishing, 0.0)

    def __add__(self, other: GpuUse) -> GpuUse:
        return GpuUse(*(getattr(self, name) + getattr(other, name) for name in _COUNTED))


def use_between(points: Sequence[UsePoint], began: float, ended: float) -> GpuUse:
    """Return the GPU seconds in the period [began, ended).

    Between two points they are spread evenly over the time.

    Args:
        points: the run's points, in the order of their times.
        began: begin of the period, in seconds since the epoch.
        ended: its end.
    """
    before, after = _until(points, began), _until(points, ended)
    return GpuUse(*(max(after[name] - before[name], 0.0) for name in _COUNTED))


def _until(points: Sequence[UsePoint], time: float) -> Mapping[str, float]:
    """Return the GPU seconds before a point in time."""
    following = bisect_left(points, time, key=lambda point: point.time)
    if not following:
        return dict.fromkeys(_COUNTED, 0.0)
    last = points[following - 1]
    if following == len(points):
        return {name: getattr(last, name) for name in _COUNTED}
    return _at(last, points[following], time)
