"""Changes of the runs below a root, for readers that look again and again.

A look costs what changed, not what is there: a record replaces the one before by a rename, which
changes its directory's time, and only records in changed directories are read. Directories are
listed only if the one that they are in has changed, or a minute has passed. On an object store no
directory has a time: there each look lists the runs, and reads those that have not ended.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hopsgpu.artifacts.runs import READERS, RunStore
from hopsgpu.core.run_record import RunRecord
from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.storage.error_messages import ABSENT, SAFE_MODE, UNREACHABLE
from hopsgpu.storage.filesystem import FileStatus
from hopsgpu.storage.lake import LakePath

log = logging.getLogger(__name__)

T = TypeVar("T")

# A record that could not be read, and that of a run that has not ended, are read again after that.
AGAIN_SECONDS = 600.0
# Directories are listed after that, whether or not a change shows.
_LISTING_SECONDS = 60.0
# Asking for single directories is cheaper than a listing, whose pages have 1,000.
_SINGLE_SHARE = 100
_LEAST_SINGLE = 16
_FAILING = (UNREACHABLE, SAFE_MODE)


@dataclass(frozen=True)
class Changes(Generic[T]):
    """The changes of the runs below a root since the look before.

    Attributes:
        read: what the digest gave for each record that was read, by the run's id.
        removed: ids of runs that are gone.
        unreadable: number of the directories whose records cannot be read.
        problem: why the lake gave no answer for some records, which the next look reads; or "".
    """

    read: dict[str, T]
    removed: tuple[str, ...]
    unreadable: int
    problem: str = ""


@dataclass(frozen=True)
class _Known:
    """A directory whose record was read, or could not be.

    Attributes:
        modified: the directory's time when it was listed, before the record was read.
        again_at: when it is read whatever its time, by the reader's clock; infinite for never.
        is_over: whether the record has the run's end.
        is_read: whether it could be read.
    """

    modified: int
    again_at: float
    is_over: bool
    is_read: bool


class RunChanges(Generic[T]):
    """Finds the changes of the runs below a root; nothing is kept of a record but what it is about.

    Args:
        root: the root.
        digest: makes of a record what the reader needs of it; called in several threads. It raises
            StoreError for a record that it cannot use.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        root: LakePath,
        digest: Callable[[RunRecord], T],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = RunStore(root)
        self._digest = digest
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._listed_at = float("-inf")
        # Times of the directory of runs at the last two listings.
        self._times: tuple[int | None, int | None] = (None, None)

    @property
    def is_there(self) -> bool:
        """Return whether the directory of runs existed at the last look."""
        return self._times[1] is not None

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the names of all directories that are known."""
        return tuple(self._known)

    def look(self) -> Changes[T]:
        """Return the changes since the look before; the first one returns all runs.

        Raises:
            StoreError: the directory of runs cannot be listed; what is known of its runs stays.
        """
        now = self._clock()
        try:
            entries, is_all = self._directories(now)
        except StoreError as error:
            if error.kind != ABSENT:  # before the first run
                raise
            entries, is_all = (), True
        changed = [entry for entry in entries if self._is_due(entry, now)]
        removed = self._forget({entry.name for entry in entries}) if is_all else ()
        read, problem = self._read(changed, now)
        if changed or removed:
            log.debug("%s: %d records read, %d gone", self._store.url, len(read), len(removed))
        unreadable = sum(not directory.is_read for directory in self._known.values())
        return Changes(read, removed, unreadable, problem)

    def _directories(self, now: float) -> tuple[Sequence[FileStatus], bool]:
        """Return the status of all directories, or of those that may have changed; and which."""
        newest = self._store.modified()
        if newest and self._times == (newest, newest) and now < self._listed_at + _LISTING_SECONDS:
            # None came or went. A time that was new at the look before does not say so yet: some
            # file systems' clocks advance in steps of milliseconds.
            single = [
                name
                for name, directory in self._known.items()
                if not directory.is_over or now >= directory.again_at
            ]
            if len(single) <= max(len(self._known) // _SINGLE_SHARE, _LEAST_SINGLE):
                return self._statuses(single), False
        entries = self._store.directories()
        self._listed_at, self._times = now, (self._times[1], newest)
        return entries, True

    def _statuses(self, names: Collection[str]) -> list[FileStatus]:
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            statuses = list(pool.map(self._status, names))
        return [status for status in statuses if status is not None]

    def _status(self, name: str) -> FileStatus | None:
        try:
            return self._store.directory(name).stat()
        except StoreError as error:
            if error.kind == ABSENT:  # the next listing says so
                return None
            raise
        except HopsGpuError:  # its name is that of no run, and a listing has its time
            return None

    def _is_due(self, entry: FileStatus, now: float) -> bool:
        known = self._known.get(entry.name)
        if known is None or entry.modified != known.modified or now >= known.again_at:
            return True
        return not entry.modified and known.is_read and not known.is_over

    def _forget(self, existing: Collection[str]) -> tuple[str, ...]:
        removed = tuple(name for name in self._known if name not in existing)
        for name in removed:
            del self._known[name]
        return removed

    def _read(self, entries: Sequence[FileStatus], now: float) -> tuple[dict[str, T], str]:
        """Return what the digest gave, by id, and why the lake did not answer; note what is known.

        Once the lake does not answer, what is left is not read; the next look reads it.
        """
        read: dict[str, T] = {}
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            for entry, answer in zip(entries, pool.map(self._digest_record, entries), strict=True):
                if isinstance(answer, StoreError):
                    if answer.kind in _FAILING:
                        pool.shutdown(wait=False, cancel_futures=True)
                        return read, str(answer)
                    log.info("%s: read again in %g s", answer, AGAIN_SECONDS)
                    directory = _Known(entry.modified, now + AGAIN_SECONDS, False, False)
                else:
                    read[entry.name], is_over = answer
                    again_at = float("inf") if is_over else now + AGAIN_SECONDS
                    directory = _Known(entry.modified, again_at, is_over, True)
                self._known[entry.name] = directory
        return read, ""

    def _digest_record(self, entry: FileStatus) -> tuple[T, bool] | StoreError:
        stored = self._store.stored(entry.name)
        if stored.record is None:
            return StoreError(stored.problem, stored.kind)
        try:
            return self._digest(stored.record), stored.record.has_ended
        except StoreError as error:
            return error
