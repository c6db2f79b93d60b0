"""Uploads the files of a rank's `context().log_dir`, for TensorBoard, while the rank trains.

Event files only grow, and so do their copies on the lake. Other files are uploaded again as a whole
when they change.
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
# Part of the names of summary writers' files. Only these files are appended to.
_EVENTS = "tfevents"
_CHUNK = 8 * 2**20
# A file up to this size is replaced in one step. Readers may see a larger file half-written.
_MAX_ATOMIC_BYTES = 8 * 2**20
# HDFS takes half a second to close a file of any size, so files are uploaded in parallel.
_MAX_PARALLEL_FILES = 8
# The pause after an upload, as a multiple of its duration: uploading a file that always changes
# takes a tenth of the time at most.
_PAUSE_FACTOR = 9.0
# Kinds of errors that occur for all files.
_ALL_FILES = ("unreachable", "safe mode")


@dataclass
class _UploadedFile:
    """The state of a file's copy on the lake.

    Attributes:
        length: bytes that were uploaded.
        state: size and modification time (ns) of the local file at the upload.
        due: time of the monotonic clock from which the file may be uploaded again.
    """

    length: int = 0
    state: tuple[int, int] = (-1, -1)
    due: float = 0.0


class LogDirUploader:
    """Uploads the files below a rank's log directory, which the rank creates when it first uses it.

    Args:
        stop: event, set when no more files are to be uploaded.
    """

    def __init__(
        self,
        directory: Path,
        target: LakePath,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        max_parallel_files: int = _MAX_PARALLEL_FILES,
    ) -> None:
        self._max_parallel_files = max_parallel_files
        self._directory = directory
        self._target = target
        self._stop = stop
        self._clock = clock
        self._uploaded: dict[str, _UploadedFile] = {}
        self._created: set[str] = set()
        self._warned: set[str] = set()

    @property
    def is_needed(self) -> bool:
        return self._directory.is_dir()

    def upload_changes(self, *, is_last: bool = False) -> list[str]:
        """Upload the files that have changed since the last call; return each kind of warning once.

        The last call postpones no upload.
        """
        problems: dict[str, str] = {}
        for name, error in self._upload_changed(is_last=is_last):
            if isinstance(error, ConfigError):
                problems.setdefault("name", f"{name!r} in log_dir is not uploaded: {error}")
            else:
                is_expected = isinstance(error, (StoreError, OSError))
                why = str(error) if is_expected else f"{error!r:.500}"
                when = "" if is_last else " yet"
                text = f"{name!r} in log_dir is not on the lake{when}: {why}"
                problems.setdefault("lake", text)
        if is_last:
            self._warned.discard("lake")
        new = [text for kind, text in problems.items() if kind not in self._warned]
        self._warned.update(problems)
        for text in new:
            log.info("%s", text)
        return new

    def _upload_changed(self, *, is_last: bool) -> Iterator[tuple[str, BaseException]]:
        """Upload in parallel; yield the files that failed, and why."""
        changed = [file for file in _files(self._directory) if self._has_changed(*file)]
        if not changed:
            return
        log.debug("uploads %d changed files to %s", len(changed), self._target.url)
        stop_uploading = threading.Event()

        def upload(name: str, path: Path) -> None:
            if stop_uploading.is_set() or self._stop.is_set():
                return
            try:
                self._upload(name, path, is_last=is_last)
            except FileNotFoundError:
                pass  # the file was removed meanwhile
            except StoreError as error:
                if error.kind in _ALL_FILES:
                    stop_uploading.set()
                raise

        threads = min(self._max_parallel_files, len(changed))
        with ThreadPoolExecutor(threads, thread_name_prefix="hopsgpu-logs") as pool:
            uploads = [(name, pool.submit(upload, name, path)) for name, path in changed]
        for name, future in uploads:
            # Clients in Rust panic with a BaseException.
            if (error := future.exception()) is not None:
                yield name, error

    def _has_changed(self, name: str, path: Path) -> bool:
        uploaded = self._uploaded.get(name)
        try:
            return uploaded is None or uploaded.state != _state(path.stat())
        except FileNotFoundError:
            return False

    def _upload(self, name: str, path: Path, *, is_last: bool) -> None:
        status = path.stat()
        uploaded = self._uploaded.get(name)
        path_below(name)
        target = self._target / name
        parent = name.rpartition("/")[0]
        if parent not in self._created:
            (self._target / parent if parent else self._target).make()
            self._created.add(parent)
        is_appended = _EVENTS in path.name
        if uploaded is None or (is_appended and uploaded.length > status.st_size):
            # An earlier attempt may have left a file under this name.
            if is_appended:
                target.remove()
            uploaded = self._uploaded[name] = _UploadedFile()
        if is_appended:
            self._append(path, target, uploaded)
        elif is_last or self._clock() >= uploaded.due:
            began = self._clock()
            self._replace(path, target)
            uploaded.due = began + (1 + _PAUSE_FACTOR) * (self._clock() - began)
        else:
            return
        uploaded.state = _state(status)

    def _append(self, path: Path, target: LakePath, uploaded: _UploadedFile) -> None:
        with path.open("rb") as file:
            file.seek(uploaded.length)
            while not self._stop.is_set() and (chunk := file.read(_CHUNK)):
                uploaded.length = target.append(chunk, uploaded.length)

    def _replace(self, path: Path, target: LakePath) -> None:
        if path.stat().st_size <= _MAX_ATOMIC_BYTES:
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
