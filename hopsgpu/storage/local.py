"""Local and mounted file systems."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from hopsgpu.storage import safe_paths
from hopsgpu.storage.filesystem import FileStatus, read_blocks, read_range
from hopsgpu.storage.identity import user_name
from hopsgpu.storage.safe_paths import PathEnd, end_of, may_follow, open_file


class Local:
    """A `FileSystem` of this machine.

    Changes do not follow links that other users may have planted (`safe_paths`).
    """

    def make(self, path: str) -> None:
        with end_of(path, should_follow=True, should_create=True) as end:
            safe_paths.make_directory(end.directory, end.name)

    def set_mode(self, path: str, mode: int) -> None:
        safe_paths.set_mode(path, mode)

    def stat(self, path: str) -> FileStatus:
        return _status(path.rpartition("/")[2], Path(path).stat())

    def entries(self, path: str) -> tuple[FileStatus, ...]:
        """Return the entries of a directory, except broken links of root and of this user.

        The owner of a link is who put it there. Another user's broken link takes a name, too.
        """
        statuses = []
        for entry in os.scandir(path):
            try:
                statuses.append(_entry_status(entry))
            except FileNotFoundError:  # removed since the listing
                continue
            except OSError:
                if not entry.is_symlink():
                    raise
        return tuple(statuses)

    def read(self, path: str) -> io.FileIO:
        file = io.FileIO(path, "r", opener=_open_at_once)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "it is a pipe or a device", path)
        return file

    def blocks(self, path: str) -> Iterator[bytes]:
        with self.read(path) as file:
            yield from read_blocks(file)

    def range(self, path: str, start: int, end: int | None) -> bytes:
        with self.read(path) as file:
            return read_range(file, start, end)

    def write(self, path: str, blocks: Iterable[bytes], *, should_replace: bool) -> None:
        how = os.O_TRUNC if should_replace else os.O_EXCL
        with io.FileIO(open_file(path, os.O_WRONLY | os.O_CREAT | how), "w") as file:
            for block in blocks:
                _write_all(file, block)

    def append(self, path: str, content: bytes) -> None:
        with io.FileIO(open_file(path, os.O_WRONLY | os.O_APPEND), "a") as file:
            _write_all(file, content)

    def rename(self, source: str, target: str, *, should_replace: bool) -> None:
        with end_of(source) as old, end_of(target) as new:
            source_fd, target_fd = old.directory, new.directory
            if should_replace:
                os.replace(old.name, new.name, src_dir_fd=source_fd, dst_dir_fd=target_fd)
            elif _is_directory(old):
                # rename(2) replaces an empty directory, so mkdir claims the name first.
                os.mkdir(new.name, dir_fd=target_fd)
                try:
                    os.rename(old.name, new.name, src_dir_fd=source_fd, dst_dir_fd=target_fd)
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:
                        raise
                    # Another process took the new directory for that of a dead process, and filled
                    # it.
                    raise FileExistsError(error.errno, error.strerror, target) from error
            else:
                # rename(2) replaces a file, and link(2) does not.
                os.link(
                    old.name,
                    new.name,
                    src_dir_fd=source_fd,
                    dst_dir_fd=target_fd,
                    follow_symlinks=False,
                )
                os.unlink(old.name, dir_fd=source_fd)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), end_of(path) as end:
            if _is_directory(end):
                shutil.rmtree(end.name, dir_fd=end.directory)
            else:
                os.unlink(end.name, dir_fd=end.directory)


def _is_directory(end: PathEnd) -> bool:
    status = os.stat(end.name, dir_fd=end.directory, follow_symlinks=False)
    return stat.S_ISDIR(status.st_mode)


def _entry_status(entry: os.DirEntry[str]) -> FileStatus:
    if not entry.is_symlink():
        return _status(entry.name, entry.stat())
    link = entry.stat(follow_symlinks=False)
    try:
        status = _status(entry.name, entry.stat())
    except OSError:
        if may_follow(link.st_uid):
            raise
        status = _status(entry.name, link)
    return dataclasses.replace(status, owner=user_name(link.st_uid))


def _open_at_once(path: str, flags: int) -> int:
    # Another user may have put a pipe there, which would wait for a writer.
    return os.open(path, flags | os.O_NONBLOCK)


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
