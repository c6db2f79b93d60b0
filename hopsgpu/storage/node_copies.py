"""Copies that all containers of an application share on a node, each made once.

The containers of an application on a node share these directories, and YARN removes what is in them
when the application ends. A lock lets one process at a time make a copy; the others then find it
whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path


def shared_directories(environ: Mapping[str, str], container: Path, name: str) -> list[Path]:
    """Return the application's directories of a name on each disk of the node.

    Args:
        environ: environment of the container; YARN names the application's directories in
            LOCAL_DIRS.
        container: the container's own directory, used if there are none.
        name: name of the directories.
    """
    named = [Path(part) for part in environ.get("LOCAL_DIRS", "").split(",") if part]
    return [place / name for place in named or [container]]


def marker_file(place: Path, digest: str) -> Path:
    """Return the file that exists once a directory has the whole copy of a digest."""
    return place / f"{digest}.whole"


def find_copy(places: Iterable[Path], digest: str) -> Path | None:
    """Return where a copy is whole, out of several directories; None if it is in none."""
    return next((p / digest for p in places if marker_file(p, digest).exists()), None)


def ensure_copy(places: Sequence[Path], digest: str, fill: Callable[[Path], None]) -> Path:
    """Return the directory with a whole copy; have it filled if there is none.

    Args:
        places: directories on different disks, of which the one with most room is chosen; the first
            has the lock.
        digest: name of the copy.
        fill: creates the directory and fills it; what it raises leaves no copy.

    Raises:
        OSError: the copy cannot be written.
    """
    with _only_one(places[0], digest):
        if (whole := find_copy(places, digest)) is not None:
            return whole
        place = max(places, key=_free)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        home = place / digest
        # Left by a process that was killed.
        shutil.rmtree(home, ignore_errors=True)
        fill(home)
        marker_file(place, digest).touch()
        return home


def _free(place: Path) -> int:
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


@contextlib.contextmanager
def _only_one(place: Path, digest: str) -> Iterator[None]:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (place / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
