"""Short paths of ranks' directories, for TMPDIR: a unix socket's path has at most 107 bytes.

A DataLoader's workers, multiprocessing's managers and torch's shared memory bind sockets (unix(7))
below TMPDIR. The path of a YARN container alone is longer than the limit. TMPDIR is therefore a
path through a symbolic link to the container's disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# The path is short, and every node has this directory.
SHARED = Path("/tmp")
_PREFIX = "hopsgpu-tmp-"
_FALLBACK = "links"
_MAX_TRIES = 10
# Cleaners such as systemd-tmpfiles remove files that are some days old.
_REFRESH_SECONDS = 3600.0


class Links:
    """Symbolic links to directories, with paths of about 25 bytes; use `links`.

    Args:
        places: private directories; the first one that accepts a link is used.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = tuple(places)
        self._numbers = itertools.count()
        self._targets: dict[Path, Path] = {}
        self._refreshed = time.monotonic()

    def add(self, target: Path) -> Path:
        """Create a link to a directory.

        Raises:
            OSError: no place accepts a link.
        """
        number = str(next(self._numbers))
        problem: OSError | None = None
        for place in self._places:
            link = place / number
            try:
                link.symlink_to(target)
            except OSError as error:  # a full disk, or a cleaner has removed the place
                problem = error
                continue
            self._targets[link] = target
            return link
        raise problem or FileNotFoundError(
            "no directory accepts links that give TMPDIR a short path"
        )

    def remove(self, link: Path) -> None:
        """Remove a link, not the directory."""
        if self._targets.pop(link, None) is not None:
            link.unlink(missing_ok=True)

    def below(self, directory: Path) -> list[Path]:
        return [link for link, target in self._targets.items() if target.is_relative_to(directory)]

    def refresh(self, now: float) -> None:
        """Renew the links' times once an hour, so that cleaners keep them."""
        if now - self._refreshed < _REFRESH_SECONDS:
            return
        self._refreshed = now
        for path in (*self._places, *self._targets):
            # A cleaner or the user may have removed the link.
            with contextlib.suppress(OSError):
                os.utime(path, follow_symlinks=False)

    def seconds_until_due(self, now: float) -> float:
        return max(self._refreshed + _REFRESH_SECONDS - now, 0.0)


@contextlib.contextmanager
def links(private: Path, shared: Path = SHARED) -> Iterator[Links]:
    """Provide links of this process, removed at the end; first remove links of killed processes.

    The links lie in a directory of `shared` with an unpredictable name. If that is impossible, they
    lie in `private`, a directory of this process with a long path. This process keeps it open, so
    that proc(5) has a short path to it for processes of this user.
    """
    sweep(shared)
    with contextlib.ExitStack() as stack:
        shared_place, private_place = _reserve(shared, stack), _short_path(private, stack)
        yield Links([place for place in (shared_place, private_place) if place])


def _reserve(shared: Path, stack: contextlib.ExitStack) -> Path | None:
    """Make a private directory in a shared one; return None if that is unsafe or impossible."""
    if not _is_safe(shared):
        return None
    for _ in range(_MAX_TRIES):
        try:
            place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=shared))
        except OSError:
            return None
        # Before the lock is taken, another daemon may sweep the new directory: retry then.
        if (lock := _lock(place)) is not None:
            stack.callback(os.close, lock)
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            return place
    return None


def _is_safe(shared: Path) -> bool:
    """Return whether no other user can replace what this user creates in a directory."""
    try:
        status = shared.stat()
    except OSError:
        return False
    for_all = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid in (0, os.geteuid()) and bool(
        status.st_mode & stat.S_ISVTX or not status.st_mode & for_all
    )


def _short_path(private: Path, stack: contextlib.ExitStack) -> Path:
    place = private / _FALLBACK
    place.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def sweep(shared: Path = SHARED) -> None:
    """Remove the places of this user's processes that were killed."""
    for place in shared.glob(f"{_PREFIX}*"):
        if (lock := _lock(place)) is not None:
            try:
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)


def _lock(place: Path) -> int | None:
    """Lock a directory of this user; return its descriptor, or None if another has the lock.

    The kernel drops a lock when its process exits. systemd-tmpfiles ignores locked directories.
    """
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # the directory was removed, or belongs to another user
        return None
    if _try_lock(descriptor, place):
        return descriptor
    os.close(descriptor)
    return None


def _try_lock(descriptor: int, place: Path) -> bool:
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(status, place.lstat())
    except OSError:  # another process has the lock, or had it and removed the directory
        return False
