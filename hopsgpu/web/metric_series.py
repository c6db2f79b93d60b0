"""Metrics by step and GPU utilisation over time, from the files of a run's ranks, as they grow.

Each file has bounds: some hundred points of each metric, and the position up to which it was read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hopsgpu.artifacts.run_logs import ATTEMPT
from hopsgpu.core.metrics import MAX_NAME_LENGTH, record_name
from hopsgpu.display.picture import SHOWN_RANKS, Point, Trace
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import ABSENT, JSON_ERRORS
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

_MAX_METRICS = 24
# Bytes of all files of a run that one poll reads; the next polls read the rest.
_LOOK_BYTES = 16 * 2**20
_CHUNK = 2**20
# hopsgpu writes no longer lines.
_LONGEST_LINE = 2**20
_SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class Series:
    """The values of one metric of one rank.

    Attributes:
        points: pairs (step or time, value), thinned out.
    """

    rank: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class MetricPlots:
    """The metrics that a run has reported so far.

    Attributes:
        metrics: series of each metric by its name, in the order in which they first came.
        gpus: mean utilisation in [0, 1] of each rank's GPUs, by seconds since the epoch.
        left_out: number of metrics beyond the first ones.
        ranks: how many ranks have series; later ones have none.
    """

    metrics: Mapping[str, tuple[Series, ...]] = field(default_factory=dict)
    gpus: tuple[Series, ...] = ()
    unread: int = 0
    odd: int = 0
    left_out: int = 0
    ranks: int = 0


class _RankFile:
    """The file of one rank, read so far."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.at = 0
        self.traces: dict[str, Trace] = {}
        self.gpu = Trace(_SAMPLE_SECONDS)
        self.odd = 0
        self.left_out: set[str] = set()
        self._rest = b""
        self._sampled: dict[str, float] = {}

    def take(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self._rest, self.odd = b"", self.odd + 1
        for line in lines:
            try:
                self._line(json.loads(line))
            except JSON_ERRORS:
                self.odd += 1

    def _line(self, content: Mapping[str, Any]) -> None:
        if "gpu" in content:
            busy = content["gpu"].get("utilisation")
            if busy is not None:
                self._sampled[str(content["gpu"]["uuid"])] = float(busy)
                mean = sum(self._sampled.values()) / len(self._sampled)
                self.gpu.add(float(content["time"]), mean)
            return
        step = float(content["step"])
        for name, value in content["metrics"].items():
            if len(name) > MAX_NAME_LENGTH:
                raise ValueError(f"a name of {len(name)} characters")
            if name not in self.traces and len(self.traces) >= _MAX_METRICS:
                if len(self.left_out) < _MAX_METRICS:
                    self.left_out.add(name)
                continue
            self.traces.setdefault(name, Trace()).add(step, float(value))


def last_attempt_directory(logs: LakePath) -> LakePath:
    """Return where the files of a run's last attempt are, below the directory of its logs."""
    names = logs.names(only_directories=True)
    attempt = max((int(match[1]) for match in map(ATTEMPT.fullmatch, names) if match), default=0)
    return logs / f"attempt-{attempt}" if attempt else logs


class MetricFiles:
    """The metrics of a run, read further at each look. One thread looks at a time."""

    def __init__(self, directory: LakePath) -> None:
        self._logs = directory / "logs"
        self._attempt = ""
        self._files: dict[int, _RankFile] = {}

    def look(self) -> MetricPlots:
        """Read what is new of the last attempt, up to a bound, and return everything so far.

        Raises:
            StoreError: the lake refused.
        """
        home = self._home()
        sizes = self._sizes(home)
        budget = _LOOK_BYTES
        for rank, size in sizes.items():
            file = self._files.setdefault(rank, _RankFile(rank))
            if size < file.at:  # the file was created again
                file = self._files[rank] = _RankFile(rank)
            if size > file.at and budget > 0:
                budget -= self._advance(home / record_name(rank), file, min(size, file.at + budget))
        unread = sum(size - self._files[rank].at for rank, size in sizes.items())
        return self._plots(unread)

    def _home(self) -> LakePath:
        """Return the directory of the last attempt's files; forget those of attempts before."""
        home = last_attempt_directory(self._logs)
        if self._attempt != home.url:
            self._attempt, self._files = home.url, {}
        return home

    def _sizes(self, home: LakePath) -> dict[int, int]:
        try:
            entries = home.entries()
        except StoreError as error:
            if error.kind == ABSENT:
                return {}
            raise
        size_by_name = {entry.name: entry.size for entry in entries if not entry.is_directory}
        names = {rank: record_name(rank) for rank in range(SHOWN_RANKS)}
        return {rank: size_by_name[name] for rank, name in names.items() if name in size_by_name}

    def _advance(self, place: LakePath, file: _RankFile, until: int) -> int:
        began = file.at
        with place.open() as source:
            source.seek(file.at)
            while file.at < until:
                chunk = source.read(min(_CHUNK, until - file.at))
                if not chunk:
                    break
                file.at += len(chunk)
                file.take(chunk)
        log.debug("read %d bytes of %s", file.at - began, place.url)
        return file.at - began

    def _plots(self, unread: int) -> MetricPlots:
        files = [self._files[rank] for rank in sorted(self._files)]
        names = dict.fromkeys(name for file in files for name in file.traces)
        shown = list(names)[:_MAX_METRICS]
        left_out = {name for file in files for name in file.left_out}.union(names) - set(shown)
        return MetricPlots(
            metrics={name: tuple(_series(files, name)) for name in shown},
            gpus=tuple(Series(f.rank, tuple(f.gpu.points)) for f in files if f.gpu.points),
            unread=unread,
            odd=sum(file.odd for file in files),
            left_out=len(left_out),
            ranks=len(files),
        )


def _series(files: Sequence[_RankFile], name: str) -> Iterator[Series]:
    for file in files:
        trace = file.traces.get(name)
        if trace is not None and trace.points:
            yield Series(file.rank, tuple(trace.points))


def plots_json(plots: MetricPlots, began: float | None) -> dict[str, Any]:
    """Return plots for the page's script: JSON values.

    Args:
        began: when the run began, in seconds since the epoch; times are counted from then.
    """
    zero = began if began is not None else min((s.points[0][0] for s in plots.gpus), default=0.0)
    used = [Series(s.rank, tuple((at - zero, busy) for at, busy in s.points)) for s in plots.gpus]
    return {
        "metrics": [
            {"name": readable_name(name), "series": [_plain(line) for line in series]}
            for name, series in plots.metrics.items()
        ],
        "gpus": [_plain(line) for line in used],
        "unread": plots.unread,
    }


def readable_name(name: str) -> str:
    """Return a metric's name as UTF-8 has it; a half of a character becomes "?"."""
    return name.encode(errors="replace").decode()


def _plain(series: Series) -> dict[str, Any]:
    return {"rank": series.rank, "points": [list(point) for point in series.points]}
