"""Counters and histograms of runs, added up from what is new in their records.

The counters begin with the first poll, as the counters of every process do: Prometheus
knows that they begin at 0 when the process is started again, and no removal of runs makes them
fall. A run that is active at the first poll counts with what it adds from then on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_use import GpuUse
from hopsgpu.core.usage_report import CANCELLED, FAILED, LOST, SUCCEEDED
from hopsgpu.monitoring.labels import OTHER, BoundedNames, clean
from hopsgpu.monitoring.run_digest import RunDigest

# Largest numbers of pairs (user, queue), and of queues.
_MAX_PAIRS = 1000
_MAX_QUEUES = 200

WAITING_BOUNDS = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0,
                  43200.0, 86400.0)  # fmt: skip
STARTING_BOUNDS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
RELEASE_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

TRAINING, PUBLISHING, IDLE = "training", "publishing", "idle"


def seconds_by_kind(use: GpuUse) -> Mapping[str, float]:
    """Return the GPU seconds that were held, by what was done with them."""
    # Add kinds here if records split the training further, such as waiting for data.
    return {TRAINING: use.training, PUBLISHING: use.publishing, IDLE: use.idle}


KINDS = tuple(seconds_by_kind(GpuUse()))


@dataclass(frozen=True)
class Histogram:
    """A histogram.

    Attributes:
        bounds: upper bounds of the buckets, in order; one without a bound follows.
        counts: number of values in each bucket, the last one included.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, (0,) * (len(bounds) + 1))

    def after(self, value: float) -> Histogram:
        at = bisect_left(self.bounds, value)
        counts = (n + (index == at) for index, n in enumerate(self.counts))
        return Histogram(self.bounds, tuple(counts), self.total + value)


Labels = tuple[str, ...]


@dataclass(frozen=True)
class Totals:
    """The counters and histograms at one moment.

    Attributes:
        gpu_seconds: GPU seconds held, by user, queue and kind.
        waited: GPU seconds waited, by user and queue.
        ended_gpu_seconds: GPU seconds held by runs that ended, by user, queue, state and kind.
        ends: number of runs that ended, by queue and reason.
        waiting: seconds of waiting of runs that ended and had their gang, by queue.
        starting: seconds of starting the ranks of runs that ended, by queue.
        release: seconds until the release of runs that ended was confirmed, by queue.
    """

    gpu_seconds: Mapping[Labels, float] = field(default_factory=dict)
    waited: Mapping[Labels, float] = field(default_factory=dict)
    ended_gpu_seconds: Mapping[Labels, float] = field(default_factory=dict)
    ends: Mapping[Labels, float] = field(default_factory=dict)
    waiting: Mapping[Labels, Histogram] = field(default_factory=dict)
    starting: Mapping[Labels, Histogram] = field(default_factory=dict)
    release: Mapping[Labels, Histogram] = field(default_factory=dict)


@dataclass
class _Counted:
    """The part of a run, or of a held gang, that has been counted, and when the run began."""

    by_kind: dict[str, float]
    waited: float
    is_over: bool
    requested: float | None = None


class RunTotals:
    """Adds up what is new in records.

    A run may change its user, queue or state, and its seconds may fall: what was counted stays, and
    what is new counts where the run is now. A search that is resumed has its id and directory from
    before, but is a run of its own: its seconds begin at 0, and its end counts.
    """

    def __init__(self) -> None:
        self._pairs: set[tuple[str, str]] = set()
        self._queues = BoundedNames(_MAX_QUEUES)
        self._counted: dict[Hashable, _Counted] = {}
        self._gpu_seconds: dict[Labels, float] = defaultdict(float)
        self._waited: dict[Labels, float] = defaultdict(float)
        self._ended: dict[Labels, float] = defaultdict(float)
        self._ends: dict[Labels, float] = defaultdict(float)
        self._waiting: dict[Labels, Histogram] = {}
        self._starting: dict[Labels, Histogram] = {}
        self._release: dict[Labels, Histogram] = {}

    def snapshot(self) -> Totals:
        return Totals(
            dict(self._gpu_seconds),
            dict(self._waited),
            dict(self._ended),
            dict(self._ends),
            dict(self._waiting),
            dict(self._starting),
            dict(self._release),
        )

    def take(
        self, key: Hashable, run: RunDigest, queue: str, *, is_old: bool, is_gone: bool = False
    ) -> None:
        """Count what is new in a run's record.

        Args:
            is_old: whether a run that was never seen before has done all this before the first
                look, so that it does not count.
            is_gone: whether the run's driver ended without a word.
        """
        labels = self._labels(run.user, queue)
        reason = EndReason.LOST if run.reason is None and is_gone else run.reason
        # Until an upload has ended, records count the time of the upload as idle.
        later = (IDLE,) if run.state == GangState.PUBLISHING.value else ()
        before = self._counted.get(key)
        if before is not None and _has_begun_again(before.requested, run.requested):
            del self._counted[key]
        counted = self._grow(key, labels, run.use, later, is_old=is_old)
        self._counted[key].requested = run.requested
        if counted is None:
            self._counted[key].is_over = reason is not None
        elif reason is not None and not counted.is_over:
            counted.is_over = True
            self._end(labels, run, reason)

    def take_held(self, key: Hashable, user: str, queue: str, use: GpuUse, *, is_old: bool) -> None:
        """Count what is new of a held gang between its launches; the arguments are as of `take`."""
        self._grow(key, self._labels(user, queue), use, (), is_old=is_old)

    def forget(self, key: Hashable) -> None:
        """Forget a run that was removed; what was counted stays."""
        self._counted.pop(key, None)

    def _labels(self, user: str, queue: str) -> tuple[str, str]:
        """Return the labels of a user and a queue, whose counters exist from then on.

        A counter that begins with another value than 0 would hide its first increase.
        """
        labels = clean(user), self._queues.name(queue)
        if labels not in self._pairs and len(self._pairs) >= _MAX_PAIRS:
            labels = OTHER, OTHER
        self._pairs.add(labels)
        self._waited[labels] += 0.0
        for kind in KINDS:
            self._gpu_seconds[*labels, kind] += 0.0
            for state in (SUCCEEDED, FAILED, CANCELLED, LOST):
                self._ended[*labels, state, kind] += 0.0
        for reason in EndReason:
            self._ends[labels[1], reason.value] += 0.0
        return labels

    def _grow(
        self,
        key: Hashable,
        labels: tuple[str, str],
        use: GpuUse,
        later: Sequence[str],
        *,
        is_old: bool,
    ) -> _Counted | None:
        """Count the GPU seconds that are new; return what was counted, None if all of it is old.

        Args:
            later: kinds that are counted later.
        """
        seconds = seconds_by_kind(use)
        counted = self._counted.get(key)
        if counted is None:
            counted = _Counted(dict.fromkeys(KINDS, 0.0), 0.0, False)
            self._counted[key] = counted
            if is_old:
                counted.by_kind, counted.waited = dict(seconds), use.waited
                return None
        for kind, value in seconds.items():
            if kind not in later and value > counted.by_kind[kind]:
                self._gpu_seconds[*labels, kind] += value - counted.by_kind[kind]
                counted.by_kind[kind] = value
        if use.waited > counted.waited:
            self._waited[labels] += use.waited - counted.waited
            counted.waited = use.waited
        return counted

    def _end(self, labels: tuple[str, str], run: RunDigest, reason: EndReason) -> None:
        user, queue = labels
        state = run.state if run.reason is not None else reason.value
        for kind, value in seconds_by_kind(run.use).items():
            self._ended[user, queue, state, kind] += value
        self._ends[queue, reason.value] += 1.0
        for histograms, bounds, seconds in (
            (self._waiting, WAITING_BOUNDS, run.waited),
            (self._starting, STARTING_BOUNDS, run.started),
            (self._release, RELEASE_BOUNDS, run.released),
        ):
            if seconds is not None:
                before = histograms.get((queue,), Histogram.empty(bounds))
                histograms[queue,] = before.after(seconds)


def _has_begun_again(before: float | None, now: float | None) -> bool:
    """Return whether a record is of another run than the one before of the same id."""
    return None not in (before, now) and before != now
