"""Copies of files that all containers of an application share on a node.

Under a lock, one process makes the copy, and the others wait for it. YARN removes the application's
directories when the application ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

# YARN's variable with the application's directory on each disk of the node.
LOCAL_DIRS = "LOCAL_DIRS"


def shared_directories(environ: Mapping[str, str], container: Path, name: str) -> list[Path]:
    """Return a subdirectory of the application's directory on each disk of the node.

    Args:
        environ: environment of the container; YARN sets LOCAL_DIRS there.
        container: the container's own directory, for an environment without LOCAL_DIRS.
        name: name of the subdirectories.
    """
    parents = [Path(part) for part in environ.get(LOCAL_DIRS, "").split(",") if part]
    return [parent / name for parent in parents or [container]]


def marker_file(place: Path, digest: str) -> Path:
    """Return the file that exists if a directory has the complete copy."""
    return place / f"{digest}.whole"


def find_copy(places: Iterable[Path], digest: str) -> Path | None:
    """Return the complete copy in one of the directories, or None."""
    return next((p / digest for p in places if marker_file(p, digest).exists()), None)


def ensure_copy(places: Sequence[Path], digest: str, fill: Callable[[Path], None]) -> Path:
    """Return the directory with a complete copy, after creating the copy if there is none.

    Args:
        places: directories on different disks. A new copy goes to the disk with most free space.
            The first directory has the lock.
        fill: creates the directory and fills it; an exception leaves no copy.

    Raises:
        OSError: the copy cannot be written.
    """
    with _locked(places[0], digest):
        if (copy := find_copy(places, digest)) is not None:
            return copy
        place = max(places, key=_free_bytes)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        home = place / digest
        # A killed process may have left an incomplete copy.
        shutil.rmtree(home, ignore_errors=True)
        fill(home)
        marker_file(place, digest).touch()
        return home


def _free_bytes(place: Path) -> int:
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


@contextlib.contextmanager
def _locked(place: Path, digest: str) -> Iterator[None]:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (place / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
