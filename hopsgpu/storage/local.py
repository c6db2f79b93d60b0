"""Local and mounted file systems."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from hopsgpu.storage.filesystem import FileStatus, read_blocks
from hopsgpu.storage.identity import user_name


class Local:
    """A `FileSystem` of this machine."""

    def make(self, path: str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    def set_mode(self, path: str, mode: int) -> None:
        Path(path).chmod(mode)

    def stat(self, path: str) -> FileStatus:
        return _status(path.rpartition("/")[2], Path(path).stat())

    def entries(self, path: str) -> tuple[FileStatus, ...]:
        """Return the entries of a directory, except broken links."""
        statuses = []
        for entry in os.scandir(path):
            try:
                statuses.append(_status(entry.name, entry.stat()))
            except FileNotFoundError:  # removed since the listing
                continue
            except OSError:
                if not entry.is_symlink():
                    raise
        return tuple(statuses)

    def read(self, path: str) -> io.FileIO:
        return io.FileIO(path, "r")

    def blocks(self, path: str) -> Iterator[bytes]:
        with self.read(path) as file:
            yield from read_blocks(file)

    def write(self, path: str, blocks: Iterable[bytes], *, should_replace: bool) -> None:
        with Path(path).open("wb" if should_replace else "xb", buffering=0) as file:
            for block in blocks:
                _write_all(file, block)

    def append(self, path: str, content: bytes) -> None:
        with io.FileIO(os.open(path, os.O_WRONLY | os.O_APPEND), "a") as file:
            _write_all(file, content)

    def rename(self, source: str, target: str, *, should_replace: bool) -> None:
        if should_replace:
            Path(source).replace(target)
        elif Path(source).is_dir():
            # rename(2) replaces an empty directory, so mkdir claims the name first.
            Path(target).mkdir()
            try:
                Path(source).rename(target)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                # Another process took the new directory for that of a dead process, and filled it.
                raise FileExistsError(error.errno, error.strerror, target) from error
        else:
            # rename(2) replaces a file, and link(2) does not.
            os.link(source, target)
            Path(source).unlink()

    def remove(self, path: str) -> None:
        try:
            if Path(path).is_dir() and not Path(path).is_symlink():
                shutil.rmtree(path)
            else:
                Path(path).unlink()
        except FileNotFoundError:
            return


def _write_all(file: io.FileIO, block: bytes) -> None:
    remaining = memoryview(block)
    while remaining:
        remaining = remaining[file.write(remaining) :]


def _status(name: str, status: os.stat_result) -> FileStatus:
    is_directory = stat.S_ISDIR(status.st_mode)
    return FileStatus(
        name,
        status.st_mtime_ns // 1_000_000,
        user_name(status.st_uid),
        status.st_mode & 0o7777,
        is_directory,
        0 if is_directory else status.st_size,
    )
