"""Logs of a run's ranks on the lake, read while they grow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from hopsgpu.storage.lake import LakePath

# The name of the directory of the logs of an attempt after the first.
ATTEMPT = re.compile(r"attempt-(\d{1,9})")
_NAME = re.compile(r"logs/(?:attempt-(\d{1,9})/)?rank-(\d{1,9})\.log")
_CHUNK = 2**20


class Log(NamedTuple):
    """One rank's log of one attempt.

    Attributes:
        attempt: number of the attempt, from 0.
        rank: rank in the gang.
    """

    attempt: int
    rank: int


def log_of(name: str) -> Log | None:
    """Return the log that a path in a run's directory names; None if it names no log."""
    match = _NAME.fullmatch(name)
    return None if match is None else Log(int(match[1] or 0), int(match[2]))


def log_sizes(directory: LakePath) -> dict[Log, int]:
    """Return the size of each log in a run's directory in bytes, sorted by attempt and rank.

    Raises:
        StoreError: the lake refused the operation.
    """
    logs = directory / "logs"
    found = {}
    for entry in logs.entries() if logs.exists() else ():
        listed = [(f"logs/{entry.name}", entry)]
        if entry.is_directory and ATTEMPT.fullmatch(entry.name):
            listed = [(f"logs/{entry.name}/{e.name}", e) for e in (logs / entry.name).entries()]
        for name, status in listed:
            if not status.is_directory and (log := log_of(name)) is not None:
                found[log] = status.size
    return dict(sorted(found.items()))


def log_file(directory: LakePath, log: Log) -> LakePath:
    """Return the place of a log.

    Args:
        directory: directory of the run.
        log: the log.
    """
    place = directory / "logs"
    if log.attempt:
        place /= f"attempt-{log.attempt}"
    return place / f"rank-{log.rank}.log"


class LogReader:
    """A reader of a rank's log, which continues where it last stopped.

    Args:
        directory: directory of the run.
        log: the log to read.

    Attributes:
        at: bytes read so far.
    """

    def __init__(self, directory: LakePath, log: Log) -> None:
        self._file = log_file(directory, log)
        self.at = 0

    def read(self, size: int) -> Iterator[bytes]:
        """Yield the bytes that follow those already read, in bounded chunks.

        Args:
            size: bytes that the file has; the reading ends there.

        Raises:
            StoreError: the lake refused the operation.
        """
        if self.at >= size:
            return
        with self._file.open() as file:
            file.seek(self.at)
            while self.at < size:
                chunk = file.read(min(_CHUNK, size - self.at))
                if not chunk:  # the log was made anew meanwhile, and is shorter
                    return
                self.at += len(chunk)
                yield chunk
