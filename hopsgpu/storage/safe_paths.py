"""Changes of files on this machine, without following symbolic links that other users planted.

Everybody who may write to a directory can put a link there. The link would redirect what a process
of another user creates, empties, renames or removes. So these operations use descriptors of
directories. In a directory that several users may write, and in other users' directories below one,
only links of root and of this user are followed. Elsewhere, only trusted users can put links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hopsgpu.storage.identity import user_name

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ENTRY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# The kernel follows as many.
_MAX_LINKS = 40


class PathEnd(NamedTuple):
    """The end of a path.

    Attributes:
        directory: descriptor of the directory that contains the path's last part.
        name: the last part.
        is_shared: whether untrusted users may have put entries into this directory.
    """

    directory: int
    name: str
    is_shared: bool


@contextlib.contextmanager
def end_of(
    path: str, *, should_follow: bool = False, should_create: bool = False
) -> Iterator[PathEnd]:
    """Provide the end of a path, through whose descriptor the caller changes files.

    Args:
        path: an absolute path.
        should_follow: whether to resolve the last part if it is a link.
        should_create: whether to create missing directories.

    Raises:
        PermissionError: another user may have planted a link in the path.
        OSError: the path cannot be resolved.
    """
    walk = _Walk(path, should_create=should_create)
    try:
        yield walk.to_end(should_follow=should_follow)
    finally:
        walk.close()


def may_follow(owner: int) -> bool:
    """Return whether a user's links are followed in shared directories."""
    return owner in (0, os.geteuid())


def open_file(path: str, flags: int) -> int:
    """Open a regular file for writing, and return its descriptor.

    Raises:
        PermissionError: another user may have planted a link.
        OSError: the file cannot be opened, or is not a regular one.
    """
    # O_NONBLOCK: the open of a pipe would wait for a reader.
    safely = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    # With O_EXCL, a link is an existing entry.
    with end_of(path, should_follow=not flags & os.O_EXCL) as end:
        descriptor = os.open(end.name, flags & ~os.O_TRUNC | safely, 0o666, dir_fd=end.directory)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileExistsError(errno.EEXIST, f"{path} exists, and is not a regular file")
        if flags & os.O_TRUNC:
            _empty(descriptor, status, end.is_shared, path)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _empty(descriptor: int, status: os.stat_result, is_shared: bool, path: str) -> None:
    if not status.st_size:
        # A file that is still empty is not truncated: see `filesystem.empty`.
        os.utime(descriptor)
        return
    if is_shared and status.st_nlink > 1:
        # Without fs.protected_hardlinks, other users can link a file of this user here.
        raise PermissionError(
            errno.EPERM,
            f"{path} has several hard links in a directory that several users may write, and is"
            " not replaced; remove it",
        )
    os.ftruncate(descriptor, 0)


def set_mode(path: str, mode: int) -> None:
    """Change the mode of a file or directory of this user.

    Raises:
        PermissionError: another user owns it, or may have planted a link.
        OSError: the mode cannot be changed.
    """
    with end_of(path, should_follow=True) as end:
        entry = os.open(end.name, _ENTRY, dir_fd=end.directory)
        try:
            status = os.fstat(entry)
            # Root may change everything: another user's directory is none that root has created.
            if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode):
                owner = user_name(status.st_uid)
                raise PermissionError(errno.EPERM, f"{path} belongs to {owner}")
            Path(f"/proc/self/fd/{entry}").chmod(mode)
        finally:
            os.close(entry)


class _Walk:
    """A walk along a path, directory by directory."""

    def __init__(self, path: str, *, should_create: bool) -> None:
        self._path = path
        self._should_create = should_create
        # The last part comes first.
        self._parts = _parts_of(path)
        self._link_count = 0
        self._directory = os.open("/", _DIRECTORY)
        self._is_shared = _is_shared(self._directory, is_parent_shared=False)

    def close(self) -> None:
        os.close(self._directory)

    def to_end(self, *, should_follow: bool) -> PathEnd:
        name = "."
        while self._parts:
            name = self._parts.pop()
            if not self._parts and not should_follow:
                break
            if (target := self._link_target(name)) is not None:
                self._follow(target)
            elif self._parts:
                self._enter(name)
        return PathEnd(self._directory, name, self._is_shared)

    def _link_target(self, name: str) -> str | None:
        """Return the target of an entry of the directory; None if the entry is not a link."""
        try:
            entry = os.open(name, _ENTRY, dir_fd=self._directory)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(entry)
            if not stat.S_ISLNK(status.st_mode):
                return None
            if self._is_shared and not may_follow(status.st_uid):
                raise PermissionError(
                    errno.EPERM,
                    f"{name!r} in {self._path!r} is a symbolic link of {user_name(status.st_uid)}"
                    " in a directory that several users may write, and is not followed; name the"
                    " link's target, or have the link removed",
                )
            return os.readlink("", dir_fd=entry)
        finally:
            os.close(entry)

    def _follow(self, target: str) -> None:
        self._link_count += 1
        if self._link_count > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self._path)
        self._parts += _parts_of(target)
        if target.startswith("/"):
            self._reach(os.open("/", _DIRECTORY))

    def _enter(self, name: str) -> None:
        # A link that another user puts here meanwhile is an error.
        flags = _DIRECTORY | os.O_NOFOLLOW
        try:
            directory = os.open(name, flags, dir_fd=self._directory)
        except FileNotFoundError:
            if not self._should_create:
                raise
            make_directory(self._directory, name)
            directory = os.open(name, flags, dir_fd=self._directory)
        self._reach(directory)

    def _reach(self, directory: int) -> None:
        os.close(self._directory)
        self._directory = directory
        self._is_shared = _is_shared(directory, is_parent_shared=self._is_shared)


def make_directory(parent: int, name: str) -> None:
    """Create a directory unless it exists; raise FileExistsError for an entry of another kind."""
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise


def _parts_of(path: str) -> list[str]:
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _is_shared(directory: int, *, is_parent_shared: bool) -> bool:
    """Return whether an untrusted user may have put entries into a directory.

    Any user can have made a directory in a shared one.
    """
    status = os.fstat(directory)
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return True
    return is_parent_shared and not may_follow(status.st_uid)
