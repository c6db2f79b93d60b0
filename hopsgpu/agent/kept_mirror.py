"""Mirrors directories of a rank's script to the lake while the script runs.

A file is uploaded once it has not changed for two seconds. An open descriptor keeps the file's
content meanwhile, so a file that is replaced by a rename every second is mirrored, too. A file that
is written in place all the time is uploaded after a minute, if it does not change during the copy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.artifacts.kept_files import RankIndex, index_file
from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.storage.digests import FileFacts
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.names import is_path_below
from hopsgpu.storage.transfer import upload_files

log = logging.getLogger(__name__)

UNCHANGED_SECONDS = 2.0
# After this time without a quiet moment, a file is copied anyway.
_LATEST_SECONDS = 50.0
# More files wait for the next round, so that a rank does not exhaust its descriptors.
_MAX_OPEN = 128
# More files are no checkpoints, and each round would take too long.
_MAX_FILES = 20_000

_State = tuple[int, int, int]


@dataclass
class _PendingFile:
    """A file that waits until it has not changed for two seconds.

    Attributes:
        state: inode, size and modification time when it last changed.
        changed_at: time of the monotonic clock at which `state` was seen first.
        seen_at: time at which the file was seen first.
    """

    descriptor: int
    state: _State
    changed_at: float
    seen_at: float


class KeptMirror:
    """The mirror of directories that the ranks of a container share; used by one thread at a time.

    `close` it at the end.

    Args:
        work: the script's working directory.
        directories: the directories to mirror, relative to it.
        place: directory on the lake for the container's first rank in this attempt.
        restored: names of files that were put back from the lake before the script started.
        checkpoints: the one of the directories that is put back before another start; or None.

    Attributes:
        stop: event, set when no more files are to be uploaded.
        snapshots: number of rounds that uploaded files of the directory of checkpoints.
    """

    def __init__(
        self,
        work: Path,
        directories: Sequence[str],
        place: LakePath,
        index: RankIndex,
        restored: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        *,
        checkpoints: str | None = None,
    ) -> None:
        self._work = work
        self._directories = directories
        self._place = place
        self._attempt, self._rank = index.attempt, index.rank
        self._restored = restored
        self._checkpoints = checkpoints
        self.stop = threading.Event()
        self.snapshots = 0
        self._clock = clock
        self._pending: dict[str, _PendingFile] = {}
        self._files: dict[str, tuple[FileFacts, str]] = {}
        self._removed: frozenset[str] = frozenset()
        self._round = 0
        self._warned: set[str] = set()
        self._has_waiting_files = False
        # Names under which a file was renamed or copied into place.
        self._renamed: set[str] = set()
        # Files that exist before the start are on the lake, or have travelled with the script.
        self._uploaded: dict[str, _State] = dict(self._scan())

    def close(self) -> None:
        for name in list(self._pending):
            self._drop(name)

    def finish(self, *, was_killed: bool) -> list[str]:
        """Upload what the rank has left; return warnings as `poll` does.

        Args:
            was_killed: whether a signal ended the rank, so that a file may be incomplete.

        Raises:
            StoreError: the lake failed.
        """
        warnings = self.poll(is_last=True, was_killed=was_killed)
        # A poll opens a bounded number of files, and one version of each.
        warnings += self.poll(is_last=True, was_killed=was_killed)
        while self._has_waiting_files:
            warnings += self.poll(is_last=True, was_killed=was_killed)
        return warnings

    def poll(self, *, is_last: bool = False, was_killed: bool = False) -> list[str]:
        """Upload what is complete; return warnings, each kind once.

        Args:
            is_last: whether the rank has exited.
            was_killed: whether a signal ended it, so that a file may be incomplete.

        Raises:
            StoreError: the lake failed; the next poll tries again.
        """
        problems: dict[str, str] = {}
        present = dict(self._scan(problems))
        now = self._clock()
        self._has_waiting_files = False
        for name in self._pending.keys() - present.keys():
            self._drop(name)
        for name, state in present.items():
            if name not in self._pending and state != self._uploaded.get(name):
                self._open(name, now)
        ready = [name for name in list(self._pending) if self._is_ready(name, now)]
        if is_last and not was_killed:
            ready = list(self._pending)
        elif is_last:
            ready += [n for n in self._pending if n not in ready and self._was_quiet(n)]
            for name in self._pending.keys() - ready:
                # It may be incomplete, and must not keep others from being opened.
                self._uploaded[name] = self._pending[name].state
                self._drop(name)
        removed = self._find_removed(present)
        missing = {name for name in self._files if name not in present}
        if ready or missing or removed != self._removed:
            self._upload(ready, missing, removed)
        warnings = [text for kind, text in problems.items() if kind not in self._warned]
        self._warned.update(problems)
        return warnings

    def _scan(self, problems: dict[str, str] | None = None) -> Iterator[tuple[str, _State]]:
        count = 0
        for directory in self._directories:
            for parent, _, names in os.walk(self._work / directory):
                for name in sorted(names):
                    path = Path(parent, name)
                    relative = path.relative_to(self._work).as_posix()
                    with contextlib.suppress(FileNotFoundError):
                        status = path.lstat()
                        if not stat.S_ISREG(status.st_mode):
                            continue
                        count += 1
                        problem = _problem_of(relative, count)
                        if problem is None:
                            yield relative, _state_of(status)
                        elif problems is not None:
                            problems.setdefault(*problem)

    def _open(self, name: str, now: float) -> None:
        if len(self._pending) >= _MAX_OPEN:
            self._has_waiting_files = True
            return
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self._work / name, flags)
        except OSError as error:  # it was removed meanwhile, or cannot be read
            log.debug("%s is not mirrored yet: %s", name, error)
            return
        status = os.fstat(descriptor)
        self._pending[name] = _PendingFile(descriptor, _state_of(status), now, now)
        # Writing sets both times, a rename only the first. Their clock has steps of milliseconds,
        # so the times may also be equal after a rename.
        if status.st_ctime_ns > status.st_mtime_ns:
            self._renamed.add(name)

    def _is_ready(self, name: str, now: float) -> bool:
        pending = self._pending[name]
        state = _state_of(os.fstat(pending.descriptor))
        if state != pending.state:
            pending.state, pending.changed_at = state, now
        is_overdue = now >= pending.seen_at + _LATEST_SECONDS
        return is_overdue or now >= pending.changed_at + UNCHANGED_SECONDS

    def _was_quiet(self, name: str) -> bool:
        """Return whether a file of a killed rank is complete.

        A file is complete if another one has replaced it, or if it was renamed or copied into
        place. Otherwise it must not have been written for two seconds.
        """
        status = os.fstat(self._pending[name].descriptor)
        if not status.st_nlink:
            return True
        # A file that is written in place keeps its inode.
        uploaded = self._uploaded.get(name)
        if name in self._renamed and (uploaded is None or uploaded[0] != status.st_ino):
            return True
        return time.time() - status.st_mtime >= UNCHANGED_SECONDS

    def _drop(self, name: str) -> None:
        os.close(self._pending.pop(name).descriptor)

    def _find_removed(self, present: dict[str, _State]) -> frozenset[str]:
        """Return the files of earlier attempts that the script has removed."""
        return frozenset(name for name in self._restored if name not in present)

    def _upload(self, ready: Sequence[str], missing: set[str], removed: frozenset[str]) -> None:
        self._round += 1
        number = str(self._round)
        try:
            self._upload_round(number, ready, missing, removed)
        except BaseException:
            # Otherwise each failed round would leave files that no index lists.
            with contextlib.suppress(StoreError):
                (self._place / number).remove()
            raise

    def _upload_round(
        self, number: str, ready: Sequence[str], missing: set[str], removed: frozenset[str]
    ) -> None:
        before = {name: self._pending[name].state for name in ready}
        sources = {name: Path(f"/proc/self/fd/{self._pending[name].descriptor}") for name in ready}
        facts = {}
        if sources:
            facts = upload_files(sources, self._place / number, stop=self.stop)
        unchanged = [
            n for n in ready if _state_of(os.fstat(self._pending[n].descriptor)) == before[n]
        ]
        files = {name: entry for name, entry in self._files.items() if name not in missing}
        superseded = [(name, self._files[name][1]) for name in missing]
        superseded += [(name, self._files[name][1]) for name in unchanged if name in files]
        files |= {name: (facts[name], number) for name in unchanged}
        index = RankIndex(self._attempt, self._rank, files, removed)
        self._place.make()
        index_file(self._place).replace(index.dump())
        self._files, self._removed = files, removed
        if any(name.startswith(f"{self._checkpoints}/") for name in unchanged):
            self.snapshots += 1
        for name in ready:
            if name in unchanged:
                self._uploaded[name] = before[name]
            self._drop(name)
        for name in missing:
            self._uploaded.pop(name, None)
        log.debug(
            "rank %d: mirrored %d files, removed %d", self._rank, len(unchanged), len(missing)
        )
        superseded += [(name, number) for name in ready if name not in unchanged]
        for name, old in superseded:
            with contextlib.suppress(StoreError):  # an unlisted file does no harm
                (self._place / old / name).remove()


def _problem_of(name: str, count: int) -> tuple[str, str] | None:
    """Return the kind of problem that keeps a file from the lake, and a warning; or None."""
    if count > _MAX_FILES:
        return "count", f"only the first {_MAX_FILES} files of the kept directories are on the lake"
    if not is_path_below(name):
        return "name", f"{name!r} is not on the lake: the lake does not accept its name"
    return None


def _state_of(status: os.stat_result) -> _State:
    return status.st_ino, status.st_size, status.st_mtime_ns


def explain_problem(error: BaseException) -> str:
    """Return why files are not on the lake, for a warning."""
    is_expected = isinstance(error, (HopsGpuError, OSError))
    return str(error) if is_expected else f"{error!r:.500}"
