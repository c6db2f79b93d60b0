"""Logs of a run's ranks on the lake, read while they grow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from hopsgpu.storage.lake import LakePath

# Name of the log directory of an attempt after the first one.
ATTEMPT = re.compile(r"attempt-(\d{1,9})")
_NAME = re.compile(r"logs/(?:attempt-(\d{1,9})/)?rank-(\d{1,9})\.log")
_CHUNK = 2**20


class RankLog(NamedTuple):
    """The log of a rank in an attempt, counted from 0."""

    attempt: int
    rank: int


def parse_log_name(name: str) -> RankLog | None:
    """Return the log at a path in a run's directory, or None if the path is not a log's."""
    match = _NAME.fullmatch(name)
    return None if match is None else RankLog(int(match[1] or 0), int(match[2]))


def log_sizes(directory: LakePath) -> dict[RankLog, int]:
    """Return the size of each log in a run's directory in bytes, sorted by attempt and rank."""
    logs = directory / "logs"
    sizes = {}
    for entry in logs.entries() if logs.exists() else ():
        files = [(f"logs/{entry.name}", entry)]
        if entry.is_directory and ATTEMPT.fullmatch(entry.name):
            files = [(f"logs/{entry.name}/{e.name}", e) for e in (logs / entry.name).entries()]
        for name, status in files:
            if not status.is_directory and (log := parse_log_name(name)) is not None:
                sizes[log] = status.size
    return dict(sorted(sizes.items()))


def log_file(directory: LakePath, log: RankLog) -> LakePath:
    place = directory / "logs"
    if log.attempt:
        place /= f"attempt-{log.attempt}"
    return place / f"rank-{log.rank}.log"


class LogReader:
    """A reader of a rank's log; each call of `read` continues at `offset`, in bytes."""

    def __init__(self, directory: LakePath, log: RankLog) -> None:
        self._file = log_file(directory, log)
        self.offset = 0

    def read(self, size: int) -> Iterator[bytes]:
        """Yield the bytes up to `size`, the size of the file, in bounded chunks."""
        if self.offset >= size:
            return
        with self._file.open() as file:
            file.seek(self.offset)
            while self.offset < size:
                chunk = file.read(min(_CHUNK, size - self.offset))
                if not chunk:  # a new, shorter log has replaced this one
                    return
                self.offset += len(chunk)
                yield chunk
