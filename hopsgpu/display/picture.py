"""The data that a live display shows of a run, of bounded size; nothing here draws."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from hopsgpu.core.gang import GangState
from hopsgpu.core.run_values import RankReport, RunStatus
from hopsgpu.display.base import S

# Number of ranks of a large gang that have plots and logs of their own.
SHOWN_RANKS = 12
# Number of ranks that have a row; a screen shows as many as fit.
MAX_RANK_ROWS = 64
_METRICS = 6
_POINTS = 240
_GAP_SECONDS = 0.1
_LINES = 60
_RANK_LINES = 30
_LONGEST_LINE = 1200
_BARS = 200
_OF_GPUS = "gpu."
_STEP = "step"

RETURNED = "returned"

Point = tuple[float, float]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class RankGpus:
    """A rank's GPUs, as last sampled; None for values that were not sampled.

    Attributes:
        utilisation: mean share in [0, 1].
        memory_used: bytes, of all of them.
        memory_total: bytes, of all of them.
    """

    utilisation: float | None
    memory_used: float | None
    memory_total: float | None


@dataclass(frozen=True)
class Row:
    """A rank.

    Attributes:
        host: name of the node, "" if not known yet.
        step: step of its last report, or None.
        trace: GPU utilisation by seconds since the start, for the first ranks.
    """

    rank: int
    host: str
    step: float | None
    gpu: RankGpus | None
    trace: tuple[Point, ...]
    ended: str


@dataclass(frozen=True)
class Plot:
    """A metric.

    Attributes:
        value: value of the first rank that has it.
        least: over all ranks.
        most: over all ranks.
        traces: values by step, for the first ranks.
        steps: the first and the last step of all plots.
    """

    name: str
    value: float
    least: float
    most: float
    traces: tuple[tuple[Point, ...], ...]
    steps: Bounds


@dataclass(frozen=True)
class LogTail:
    """The last lines of a rank, or of all ranks.

    Attributes:
        rank: None for all.
    """

    rank: int | None
    host: str
    lines: tuple[str, ...]
    total: int


@dataclass(frozen=True)
class Picture:
    """A run at a moment.

    Attributes:
        elapsed: seconds since it was submitted.
        rows: of the first ranks.
        plots: of the first metrics.
        utilisations: utilisation of the GPUs of all ranks in order, averaged in groups if there are
            many.
        logs: of each of the first ranks.
    """

    status: RunStatus
    elapsed: float
    ranks: int
    rows: tuple[Row, ...]
    plots: tuple[Plot, ...]
    utilisations: tuple[float, ...]
    recent: LogTail
    logs: tuple[LogTail, ...]

    @property
    def has_ended(self) -> bool:
        return GangState(self.status.state).is_terminal


class Trace:
    """Values over time or steps, thinned out evenly when there are many.

    Args:
        gap: the initial minimum distance between points.
    """

    def __init__(self, gap: float = 0.0) -> None:
        self.points: list[Point] = []
        self._gap = gap

    def add(self, at: float, value: float) -> None:
        """Add a value, unless the last one is too close.

        If a training goes back, for example to a checkpoint, later points are dropped.
        """
        if not math.isfinite(value):
            return
        while self.points and self.points[-1][0] >= at:
            del self.points[-1]
        if self.points and at - self.points[-1][0] < self._gap:
            return
        self.points.append((at, value))
        if len(self.points) >= _POINTS:
            del self.points[1::2]
            # Less than the mean distance of the points, because clocks are not even.
            self._gap = 0.99 * (at - self.points[0][0]) / len(self.points)


class Tail:
    """The last lines, of bounded length.

    Attributes:
        host: host of the rank that wrote them; "" for several ranks.
    """

    def __init__(self, most: int = _LINES) -> None:
        self._lines: deque[str] = deque(maxlen=most)
        self._most = most
        self._total = 0
        self.host = ""

    def take(self, texts: Sequence[str], begin: str = "") -> None:
        """Record lines, each with a prefix that names its writer."""
        self._lines.extend(begin + text[:_LONGEST_LINE] for text in texts[-self._most :])
        self._total += len(texts)

    def log(self, rank: int | None = None) -> LogTail:
        return LogTail(rank, self.host, tuple(self._lines), self._total)


@dataclass
class _Attempt:
    """The reports of one attempt; the plots of the next attempt start empty."""

    number: int = 0
    metrics: list[str] = field(default_factory=list)
    traces: dict[tuple[str, int], Trace] = field(default_factory=dict)


class StatusScene(Generic[S]):
    """The reports so far, in bounded memory; one thread reports, another draws.

    Args:
        now: seconds by any clock.
    """

    def __init__(self, status: S, now: float) -> None:
        self._lock = threading.Lock()
        self._status = status
        self._updated_at = now
        self._recent = Tail()
        self._news = 0

    @property
    def news(self) -> int:
        """Return a number that grows with every report."""
        return self._news

    def status(self, status: S, now: float) -> None:
        with self._lock:
            self._status, self._updated_at = status, now
            self._news += 1
            self._on_status(status, now)

    def _on_status(self, status: S, now: float) -> None:
        """Handle a status; called under the lock."""

    def _take(self, texts: Sequence[str], writer: str) -> None:
        with self._lock:
            self._news += len(texts)
            self._recent.take(texts, f"[{writer}] ")

    def _seconds_since_start(self, now: float) -> float:
        has_ended = GangState(self._status.state).is_terminal
        return self._status.elapsed + (0.0 if has_ended else max(now - self._updated_at, 0.0))

    def _snapshot(self, now: float) -> tuple[S, float, LogTail]:
        """Return the status, the seconds since the start, and the last lines of all writers."""
        with self._lock:
            return self._status, self._seconds_since_start(now), self._recent.log()


class Scene(StatusScene[RunStatus]):
    """The reports of a run so far."""

    def __init__(self, status: RunStatus, now: float) -> None:
        super().__init__(status, now)
        self._sampled = float("-inf")
        self._attempt = _Attempt(status.attempt)
        self._tails: dict[int, Tail] = {}

    def _on_status(self, status: RunStatus, now: float) -> None:
        """Take the metrics a few times a second."""
        if status.attempt != self._attempt.number:
            self._attempt = _Attempt(status.attempt)
        if status.metrics and now - self._sampled >= _GAP_SECONDS / 2:
            self._sampled = now
            self._sample(status)

    def line(self, rank: int, host: str, texts: Sequence[str]) -> None:
        self._take(texts, f"rank {rank}")
        if rank < SHOWN_RANKS:
            with self._lock:
                tail = self._tails.setdefault(rank, Tail(_RANK_LINES))
                tail.take(texts)
                tail.host = host

    def picture(self, now: float) -> Picture:
        with self._lock:
            status = self._status
            if status.metrics:
                self._sample(status)
            return Picture(
                status=status,
                elapsed=self._seconds_since_start(now),
                ranks=_ranks_of(status),
                rows=tuple(self._rows()),
                plots=tuple(self._plots()),
                utilisations=_bin(_utilisations(status.metrics)),
                recent=self._recent.log(),
                logs=tuple(tail.log(rank) for rank, tail in sorted(self._tails.items())),
            )

    def _sample(self, status: RunStatus) -> None:
        attempt = self._attempt
        for rank, reported in enumerate(status.metrics[:SHOWN_RANKS]):
            for name in reported:
                if len(attempt.metrics) >= _METRICS:
                    break
                if name not in attempt.metrics and not _is_ours(name):
                    attempt.metrics.append(name)
            for name in attempt.metrics:
                if name in reported and _STEP in reported:
                    self._trace(name, rank, 0.0).add(reported[_STEP], reported[name])
            gpu = gpu_of(reported)
            if gpu is not None and gpu.utilisation is not None:
                self._trace(_OF_GPUS, rank, _GAP_SECONDS).add(status.elapsed, gpu.utilisation)

    def _trace(self, name: str, rank: int, gap: float) -> Trace:
        return self._attempt.traces.setdefault((name, rank), Trace(gap))

    def _points(self, name: str, rank: int) -> tuple[Point, ...]:
        trace = self._attempt.traces.get((name, rank))
        return tuple(trace.points) if trace is not None else ()

    def _values(self, name: str, rank: int) -> tuple[Point, ...]:
        """Return a metric by step, up to the last one."""
        points, reported = self._points(name, rank), self._status.metrics[rank]
        step, value = reported.get(_STEP, 0.0), reported.get(name, math.nan)
        # The trace lacks the last point if it was too close to the one before.
        return (*points, (step, value)) if points and step > points[-1][0] else points

    def _rows(self) -> Iterable[Row]:
        status = self._status
        reports = {report.rank: report for report in status.ranks if report.rank < MAX_RANK_ROWS}
        for rank in range(min(_ranks_of(status), MAX_RANK_ROWS)):
            reported = status.metrics[rank] if rank < len(status.metrics) else {}
            report, tail = reports.get(rank), self._tails.get(rank)
            yield Row(
                rank=rank,
                host=report.host if report is not None else tail.host if tail is not None else "",
                step=reported.get(_STEP),
                gpu=gpu_of(reported),
                trace=self._points(_OF_GPUS, rank),
                ended="" if report is None else how_ended(report, status.failed_rank),
            )

    def _plots(self) -> Iterable[Plot]:
        shown = range(min(len(self._status.metrics), SHOWN_RANKS))
        traces = {
            name: tuple(self._values(name, rank) for rank in shown)
            for name in self._attempt.metrics
        }
        steps = [at for of_all in traces.values() for trace in of_all for at, _ in trace]
        # All plots have the same steps, so that readers can compare them.
        bounds = (min(steps), max(steps)) if steps else (0.0, 0.0)
        for name, drawn in traces.items():
            values = [reported[name] for reported in self._status.metrics if name in reported]
            if values:
                finite = [value for value in values if math.isfinite(value)] or values[:1]
                yield Plot(name, values[0], min(finite), max(finite), drawn, bounds)


def _ranks_of(status: RunStatus) -> int:
    return max(len(status.metrics), *(report.rank + 1 for report in status.ranks), 0)


def how_ended(report: RankReport, failed_rank: int | None = None) -> str:
    """Return how a rank ended, in words.

    Args:
        failed_rank: the rank whose failure ended the run; or None.
    """
    if report.exit_code == 0 and not report.stopped:
        return RETURNED
    how = report.signal or f"exit code {report.exit_code}"
    if report.rank == failed_rank:
        return f"failed first: {how}"
    after = "" if failed_rank is None else f" after rank {failed_rank} failed"
    if report.stopped:
        return f"stopped{after}"
    # The peers of a failed rank often fail too, because their connections to it end.
    return f"ended{after}: {how}" if after else how


def _is_ours(name: str) -> bool:
    return name == _STEP or name.startswith(_OF_GPUS)


def gpu_of(reported: Mapping[str, float]) -> RankGpus | None:
    """Return a rank's GPUs from its metrics; None if none was sampled."""
    values: dict[str, list[float]] = {}
    for name, value in reported.items():
        if name.startswith(_OF_GPUS):
            values.setdefault(name.rpartition(".")[2], []).append(value)
    if not values:
        return None
    busy = values.get("utilisation")
    used, total = (
        sum(values[name]) if name in values else None for name in ("memory_used", "memory_total")
    )
    return RankGpus(sum(busy) / len(busy) if busy else None, used, total)


def _utilisations(metrics: Sequence[Mapping[str, float]]) -> list[float]:
    gpus = (gpu_of(reported) for reported in metrics)
    return [gpu.utilisation for gpu in gpus if gpu is not None and gpu.utilisation is not None]


def _bin(values: Sequence[float]) -> tuple[float, ...]:
    """Return the values, or means of neighbours if there are too many."""
    size = -(-len(values) // _BARS) or 1
    parts = (values[start : start + size] for start in range(0, len(values), size))
    return tuple(sum(part) / len(part) for part in parts)
