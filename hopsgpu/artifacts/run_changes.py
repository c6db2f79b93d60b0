"""Finds the changes of the runs below a root, for readers that poll.

The cost of a poll depends on the number of changes, not of runs: a driver replaces a record by a
rename, which changes the time of the run's directory. So only records in changed directories are
read, and directories are listed only if their parent has changed or a minute has passed. On an
object store directories have no time: each poll lists the runs, and reads those that have not
ended.
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

# Unreadable records, and records of runs that have not ended, are read again after this time.
REREAD_SECONDS = 600.0
# Directories are listed after this time even if their parent shows no change.
_LISTING_SECONDS = 60.0
# Single requests are made for up to one directory in 100, but at least 16: a listing returns 1,000
# directories a request.
_SINGLE_SHARE = 100
_MIN_SINGLE = 16
_FAILING = (UNREACHABLE, SAFE_MODE)


@dataclass(frozen=True)
class Changes(Generic[T]):
    """The changes of the runs below a root since the last poll.

    Attributes:
        read: the results of the digest for the records that were read, by run id.
        removed: ids of runs that no longer exist.
        unreadable: number of the directories whose records cannot be read.
        problem: why the lake gave no answer for some records, which the next poll reads; or "".
    """

    read: dict[str, T]
    removed: tuple[str, ...]
    unreadable: int
    problem: str = ""


@dataclass(frozen=True)
class _KnownDirectory:
    """A directory whose record was read, or could not be read.

    Attributes:
        modified: the directory's time when it was listed, before the record was read.
        again_at: time of the reader's clock at which the record is read again even without a
            change.
        is_over: whether the record has the run's end.
    """

    modified: int
    again_at: float
    is_over: bool
    is_read: bool


class RunChanges(Generic[T]):
    """Finds the changes of the runs below a root; keeps no records.

    Args:
        digest: returns what the reader needs of a record. It is called in several threads, and
            raises StoreError for a record that it cannot use.
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
        self._known: dict[str, _KnownDirectory] = {}
        self._listed_at = float("-inf")
        # Times of the directory of runs at the last two listings.
        self._times: tuple[int | None, int | None] = (None, None)

    @property
    def has_directory(self) -> bool:
        """Whether the directory of runs existed at the last poll."""
        return self._times[1] is not None

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._known)

    def poll(self) -> Changes[T]:
        """Return the changes since the last poll; the first poll returns all runs.

        Raises:
            StoreError: the directory of runs cannot be listed; the known runs stay.
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
        """Return the status of all directories, or of those that may have changed, and whether it
        is all.
        """
        newest = self._store.last_change_ms()
        if newest and self._times == (newest, newest) and now < self._listed_at + _LISTING_SECONDS:
            # No directory was created or removed. The time must have been the same at two listings:
            # file systems' clocks advance in steps, so a new time may hide a later change.
            single = [
                name
                for name, directory in self._known.items()
                if not directory.is_over or now >= directory.again_at
            ]
            if len(single) <= max(len(self._known) // _SINGLE_SHARE, _MIN_SINGLE):
                with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
                    statuses = list(pool.map(self._status, single))
                return [status for status in statuses if status is not None], False
        entries = self._store.directories()
        self._listed_at, self._times = now, (self._times[1], newest)
        return entries, True

    def _status(self, name: str) -> FileStatus | None:
        try:
            return self._store.directory(name).stat()
        except StoreError as error:
            if error.kind == ABSENT:  # the next listing shows the removal
                return None
            raise
        except HopsGpuError:  # the name is not that of a run; listings have the status
            return None

    def _is_due(self, entry: FileStatus, now: float) -> bool:
        last = self._known.get(entry.name)
        if last is None or entry.modified != last.modified or now >= last.again_at:
            return True
        return not entry.modified and last.is_read and not last.is_over

    def _forget(self, existing: Collection[str]) -> tuple[str, ...]:
        removed = tuple(name for name in self._known if name not in existing)
        for name in removed:
            del self._known[name]
        return removed

    def _read(self, entries: Sequence[FileStatus], now: float) -> tuple[dict[str, T], str]:
        """Return the results of the digest by run id, and why the lake did not answer, or "".

        Once the lake does not answer, the remaining records are left to the next poll.
        """
        read: dict[str, T] = {}
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            for entry, answer in zip(entries, pool.map(self._digest_record, entries), strict=True):
                if isinstance(answer, StoreError):
                    if answer.kind in _FAILING:
                        pool.shutdown(wait=False, cancel_futures=True)
                        return read, str(answer)
                    log.info("%s: read again in %g s", answer, REREAD_SECONDS)
                    directory = _KnownDirectory(entry.modified, now + REREAD_SECONDS, False, False)
                else:
                    read[entry.name], is_over = answer
                    again_at = float("inf") if is_over else now + REREAD_SECONDS
                    directory = _KnownDirectory(entry.modified, again_at, is_over, True)
                self._known[entry.name] = directory
        return read, ""

    def _digest_record(self, entry: FileStatus) -> tuple[T, bool] | StoreError:
        stored = self._store.load(entry.name)
        if stored.record is None:
            return StoreError(stored.problem, stored.kind)
        try:
            return self._digest(stored.record), stored.record.has_ended
        except StoreError as error:
            return error
