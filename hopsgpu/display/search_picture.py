"""The data that a live display shows of a search, of bounded size; nothing here draws."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from hopsgpu.core.trials import Moment, SearchStatus, TrialReport, Writer
from hopsgpu.display.picture import LogTail, Point, StatusScene
from hopsgpu.display.search_phrases import label

# Number of running trials that have a row.
SHOWN_TRIALS = 12
_ENDED = 8
_POINTS = 240


@dataclass(frozen=True)
class SearchPicture:
    """A search at a moment.

    Attributes:
        elapsed: seconds since its start.
        running: the first trials that run, by host and GPU.
        seconds: how long each of them has run; None if it has not started.
        ended: the trials that ended last, the latest first.
        curve: best value by the number of trials, evenly spaced.
        held: held GPUs by seconds since the first moment, averaged over short intervals.
        used: GPUs on which trials ran, likewise.
        recent: the last lines of all trials.
    """

    status: SearchStatus
    elapsed: float
    running: tuple[TrialReport, ...]
    seconds: tuple[float | None, ...]
    ended: tuple[TrialReport, ...]
    curve: tuple[Point, ...]
    held: tuple[Point, ...]
    used: tuple[Point, ...]
    recent: LogTail


class SearchScene(StatusScene[SearchStatus]):
    """The reports of a search so far.

    Args:
        now: seconds by any clock.
        wall: returns the seconds since the epoch.
    """

    def __init__(
        self, status: SearchStatus, now: float, wall: Callable[[], float] = time.time
    ) -> None:
        super().__init__(status, now)
        self._wall = wall

    def line(self, writer: Writer, host: str, texts: Sequence[str]) -> None:
        self._take(texts, label(writer, host, self._status.workers))

    def picture(self, now: float) -> SearchPicture:
        status, elapsed, recent = self._snapshot(now)
        running = sorted(status.running, key=attrgetter("host", "gpu", "number"))[:SHOWN_TRIALS]
        wall = self._wall()
        held, used = held_and_used(status.moments)
        return SearchPicture(
            status=status,
            elapsed=elapsed,
            running=tuple(running),
            seconds=tuple(None if t.started is None else max(wall - t.started, 0) for t in running),
            ended=tuple(reversed(status.recent[-_ENDED:])),
            curve=curve_of(status.curve, status.ended),
            held=held,
            used=used,
            recent=recent,
        )


def curve_of(curve: Sequence[tuple[int, float]], ended: int) -> tuple[Point, ...]:
    """Return the best value so far at evenly spaced numbers of ended trials.

    Args:
        curve: pairs (trials ended, value), one for each improvement.
    """
    points = [(float(at), value) for at, value in curve if math.isfinite(value)]
    return evenly(points, float(ended)) if points else ()


def held_and_used(
    moments: Sequence[Moment], until: float | None = None
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Return the GPUs held, and those on which trials ran, by seconds since the first moment.

    Args:
        until: seconds since the epoch, by default the last moment.
    """
    if not moments:
        return (), ()
    first = moments[0].time
    last = (moments[-1].time if until is None else until) - first
    held = [(m.time - first, m.held) for m in moments]
    used = [(m.time - first, m.running) for m in moments]
    return average(held, last), average(used, last)


def evenly(steps: Sequence[Point], last: float) -> tuple[Point, ...]:
    """Return a step function at evenly spaced points, 240 at most.

    Each step lasts until the next one.

    Args:
        steps: at least one.
        last: where the last step ends.
    """
    first = steps[0][0]
    gap = max(last - first, 0.0) / (_POINTS - 1)
    if not gap:
        return (steps[-1],)
    starts = [at for at, _ in steps]
    points = (first + gap * n for n in range(_POINTS - 1))
    shown = [(at, steps[bisect.bisect_right(starts, at) - 1][1]) for at in points]
    return (*shown, (last, steps[-1][1]))


def average(steps: Sequence[Point], last: float) -> tuple[Point, ...]:
    """Return a step function as its means over even intervals.

    With many short trials, single points would show arbitrary values.

    Args:
        steps: at least one.
        last: where the last step ends.
    """
    first = steps[0][0]
    gap = max(last - first, 0.0) / _POINTS
    if not gap:
        return (steps[-1],)
    sums = [0.0] * _POINTS
    ends = [at for at, _ in steps[1:]] + [last]
    for (begin, value), end in zip(steps, ends, strict=True):
        at, until = (begin - first) / gap, min((end - first) / gap, _POINTS)
        while at < until:
            following = min(math.floor(at) + 1.0, until)
            sums[math.floor(at)] += value * (following - at)
            at = following
    return tuple((first + (n + 0.5) * gap, total) for n, total in enumerate(sums))
