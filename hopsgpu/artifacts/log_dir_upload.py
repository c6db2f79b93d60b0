"""Upload of what a rank writes to `context().log_dir`, for TensorBoard, while the rank trains.

Event files only grow, and so do their copies on the lake. Any other file is uploaded again as a
whole when it changes.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.names import path_below

log = logging.getLogger(__name__)

# Name in the rank's directory.
DIRECTORY = "logs"
# Summary writers put this into the names of their files, the only ones that they append to.
_EVENTS = "tfevents"
_CHUNK = 8 * 2**20
# A file up to this size is replaced in one step. Readers may see a larger one half-written.
_MOST_AT_ONCE = 8 * 2**20
# Files uploaded in parallel: HDFS takes half a second to close a file, however small it is.
_FILES_AT_ONCE = 8
# After an upload, wait for so many times its duration: uploading a file that always changes takes
# a tenth of the time at most.
_PATIENCE = 9.0
# Kinds of errors that would occur for every other file too.
_ALL_FILES = ("unreachable", "safe mode")


@dataclass
class _UploadedFile:
    """The state of a file's copy on the lake.

    Attributes:
        length: bytes that were uploaded.
        changed: size and modification time (ns) that the local file had then.
        due: when the file may be uploaded again, by the monotonic clock.
    """

    length: int = 0
    changed: tuple[int, int] = (-1, -1)
    due: float = 0.0


class LogDirUploader:
    """An uploader of the files below one directory.

    Args:
        directory: local directory; the rank creates it when it first asks for it.
        target: directory on the lake, for what is below the local one.
        stop: event, set when no more is to be uploaded.
        clock: returns a time in seconds.
    """

    def __init__(
        self,
        directory: Path,
        target: LakePath,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._target = target
        self._stop = stop
        self._clock = clock
        self._uploaded: dict[str, _UploadedFile] = {}
        self._made: set[str] = set()
        self._warned: set[str] = set()

    @property
    def is_needed(self) -> bool:
        """Return whether the rank has asked for its directory."""
        return self._directory.is_dir()

    def round(self, *, last: bool = False) -> list[str]:
        """Upload what has changed since the last round; return warnings for people, each kind once.

        Args:
            last: whether this is the last round, so that nothing is postponed.
        """
        problems: dict[str, str] = {}
        for name, error in self._upload_changed(last=last):
            if isinstance(error, ConfigError):
                problems.setdefault("name", f"{name!r} in log_dir is not uploaded: {error}")
            else:
                expected = isinstance(error, (StoreError, OSError))
                why = str(error) if expected else f"{error!r:.500}"
                when = "" if last else " yet"
                text = f"{name!r} in log_dir is not on the lake{when}: {why}"
                problems.setdefault("lake", text)
        if last:
            self._warned.discard("lake")
        new = [text for kind, text in problems.items() if kind not in self._warned]
        self._warned.update(problems)
        for text in new:
            log.info("%s", text)
        return new

    def _upload_changed(self, *, last: bool) -> Iterator[tuple[str, BaseException]]:
        """Upload the changed files, several at once; yield problems with their files' names."""
        changed = [each for each in _files(self._directory) if self._has_changed(*each)]
        if not changed:
            return
        log.debug("uploads %d changed files to %s", len(changed), self._target.url)
        over = threading.Event()

        def upload(name: str, path: Path) -> None:
            if over.is_set() or self._stop.is_set():
                return
            try:
                self._upload(name, path, last=last)
            except FileNotFoundError:
                pass  # it was removed meanwhile
            except StoreError as error:
                if error.kind in _ALL_FILES:
                    over.set()
                raise

        most = min(_FILES_AT_ONCE, len(changed))
        with ThreadPoolExecutor(most, thread_name_prefix="hopsgpu-logs") as pool:
            uploads = [(name, pool.submit(upload, name, path)) for name, path in changed]
        for name, future in uploads:
            # Clients in Rust panic with a BaseException.
            if (error := future.exception()) is not None:
                yield name, error

    def _has_changed(self, name: str, path: Path) -> bool:
        uploaded = self._uploaded.get(name)
        try:
            return uploaded is None or uploaded.changed != _state(path.stat())
        except FileNotFoundError:
            return False

    def _upload(self, name: str, path: Path, *, last: bool) -> None:
        found = path.stat()
        uploaded = self._uploaded.get(name)
        path_below(name)
        target = self._target / name
        parent = name.rpartition("/")[0]
        if parent not in self._made:
            (self._target / parent if parent else self._target).make()
            self._made.add(parent)
        grows = _EVENTS in path.name
        if uploaded is None or (grows and uploaded.length > found.st_size):
            # A file that an earlier attempt left under this name is replaced.
            if grows:
                target.remove()
            uploaded = self._uploaded[name] = _UploadedFile()
        if grows:
            self._append(path, target, uploaded)
        elif last or self._clock() >= uploaded.due:
            began = self._clock()
            self._replace(path, target)
            uploaded.due = began + (1 + _PATIENCE) * (self._clock() - began)
        else:
            return
        uploaded.changed = _state(found)

    def _append(self, path: Path, target: LakePath, uploaded: _UploadedFile) -> None:
        with path.open("rb") as file:
            file.seek(uploaded.length)
            while not self._stop.is_set() and (chunk := file.read(_CHUNK)):
                uploaded.length = target.append(chunk, uploaded.length)

    def _replace(self, path: Path, target: LakePath) -> None:
        if path.stat().st_size <= _MOST_AT_ONCE:
            target.replace(path.read_bytes())
        else:
            target.upload(path)


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the regular files below a directory, with relative names; none if it is absent."""
    for parent, _, names in os.walk(directory):
        for name in sorted(names):
            path = Path(parent, name)
            try:
                is_file = stat.S_ISREG(path.lstat().st_mode)
            except FileNotFoundError:
                continue
            if is_file:
                yield path.relative_to(directory).as_posix(), path
