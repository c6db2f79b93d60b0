"""Short paths of ranks' directories, for TMPDIR: a unix socket's path has at most 107 bytes.

A DataLoader's workers, multiprocessing's managers and torch's shared memory bind sockets (unix(7))
below TMPDIR, and the path of a YARN container alone is longer than that. So TMPDIR is a short path
through a symbolic link, and the files stay on the container's disk.
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

# Its path is short, and it is on every node.
SHARED = Path("/tmp")
_PREFIX = "hopsgpu-tmp-"
_OWN = "links"
_MOST_TRIES = 10
# Cleaners of old files remove what nobody has touched for some days.
_REFRESH_SECONDS = 3600.0


class Links:
    """Symbolic links to directories, with paths of about 25 bytes; use `links`.

    Args:
        places: private directories for them; the first one that accepts a link is used.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = tuple(places)
        self._numbers = itertools.count()
        self._there: dict[Path, Path] = {}
        self._refreshed = time.monotonic()

    def add(self, target: Path) -> Path:
        """Create a link to a directory.

        Raises:
            OSError: no place accepts one.
        """
        number = str(next(self._numbers))
        problem: OSError | None = None
        for place in self._places:
            link = place / number
            try:
                link.symlink_to(target)
            except OSError as error:  # a full disk, or somebody has removed the place
                problem = error
                continue
            self._there[link] = target
            return link
        raise problem or FileNotFoundError(
            "no directory accepts links that give TMPDIR a short path"
        )

    def remove(self, link: Path) -> None:
        """Remove a link, not the directory."""
        if self._there.pop(link, None) is not None:
            link.unlink(missing_ok=True)

    def below(self, directory: Path) -> list[Path]:
        """Return the links to a directory and to directories below it."""
        return [link for link, target in self._there.items() if target.is_relative_to(directory)]

    def refresh(self, now: float) -> None:
        """Protect the links from cleaners of old files, once an hour.

        Args:
            now: the clock's reading.
        """
        if now - self._refreshed < _REFRESH_SECONDS:
            return
        self._refreshed = now
        for path in (*self._places, *self._there):
            # A cleaner, or the user, has removed it all the same.
            with contextlib.suppress(OSError):
                os.utime(path, follow_symlinks=False)

    def patience(self, now: float) -> float:
        """Return the seconds until `refresh` must be called."""
        return max(self._refreshed + _REFRESH_SECONDS - now, 0.0)


@contextlib.contextmanager
def links(own: Path, shared: Path = SHARED) -> Iterator[Links]:
    """Provide links of this process, removed at the end; first remove those of killed processes.

    They lie in a directory of `shared` with an unpredictable name. If that cannot be used, they lie
    in `own`, which this process keeps open: proc(5) gives it a short path, for processes of this
    user.

    Args:
        own: a private directory of this process; its path may be long.
        shared: a directory of all users.
    """
    sweep(shared)
    with contextlib.ExitStack() as stack:
        places = [place for place in (_reserved(shared, stack), _opened(own, stack)) if place]
        yield Links(places)


def _reserved(shared: Path, stack: contextlib.ExitStack) -> Path | None:
    """Return a private directory in a shared one, None if that is unsafe or impossible."""
    if not _is_safe(shared):
        return None
    for _ in range(_MOST_TRIES):
        try:
            place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=shared))
        except OSError:
            return None
        # Until it is locked another daemon may take it for one that was left.
        if (lock := _locked(place)) is not None:
            stack.callback(os.close, lock)
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            return place
    return None


def _is_safe(shared: Path) -> bool:
    """Return whether no other user can replace what this user creates in a directory."""
    try:
        found = shared.stat()
    except OSError:
        return False
    for_all = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid in (0, os.geteuid()) and bool(
        found.st_mode & stat.S_ISVTX or not found.st_mode & for_all
    )


def _opened(own: Path, stack: contextlib.ExitStack) -> Path:
    place = own / _OWN
    place.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def sweep(shared: Path = SHARED) -> None:
    """Remove the places of this user's processes that were killed."""
    for place in shared.glob(f"{_PREFIX}*"):
        if (lock := _locked(place)) is not None:
            try:
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)


def _locked(place: Path) -> int | None:
    """Return a descriptor that locks a directory of this user, None if another has the lock.

    The kernel drops a lock when its process ends, however it ends. systemd-tmpfiles ignores locked
    directories.
    """
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # removed, or another user's
        return None
    if _lock(descriptor, place):
        return descriptor
    os.close(descriptor)
    return None


def _lock(descriptor: int, place: Path) -> bool:
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(found, place.lstat())
    except OSError:  # another has the lock, or had it and has removed the directory
        return False
