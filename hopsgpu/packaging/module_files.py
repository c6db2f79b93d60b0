"""The files that modules and packages consist of, in directories and in zips."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from pathlib import Path

from hopsgpu.packaging.module_finder import PROVIDED_MODULES

# hopsgpu reaches the ranks by itself: a checkout of it beside a script is not the user's module.
_HOPSGPU = Path(__file__).resolve().parents[1]
_NOT_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
# Names that mark the directory of a virtual or a conda environment.
_ENVIRONMENTS = frozenset({"pyvenv.cfg", "conda-meta"})
_INIT = "__init__"
# Longer ones first: ".cpython-311-x86_64-linux-gnu.so" ends with ".so".
_SUFFIXES = tuple(sorted(all_suffixes(), key=len, reverse=True))
_MAY_RUN = 0o111
_MOST_ZIPS = 64


@dataclass(frozen=True)
class File:
    """A file to pack.

    Attributes:
        name: its path below the directory that ranks import from.
        path: path of the file, or of the zip that contains it.
        inside: its name in the zip; "" if it is in none.
        may_run: whether its executable bit is set.
        size: its size in bytes.
        state: values that change when the file changes.
    """

    name: str
    path: Path
    inside: str
    may_run: bool
    size: int
    state: tuple[object, ...]

    @property
    def is_module(self) -> bool:
        """Return whether Python can import it, judged by its suffix."""
        return self.name.endswith(_SUFFIXES)

    @property
    def top(self) -> str:
        """Return the top-level module that it is, or is part of."""
        first, _, below = self.name.partition("/")
        return first if below else first.removesuffix(_suffix(first))

    @property
    def above(self) -> Iterator[str]:
        """Return the names of the directories that contain it, the outermost first."""
        return itertools.accumulate(self.name.split("/")[:-1], "{}/{}".format)

    def content(self) -> bytes:
        """Return the file's content.

        Raises:
            OSError: the file cannot be read.
            zipfile.BadZipFile, KeyError: its zip is damaged, or has been replaced meanwhile.
        """
        if not self.inside:
            return self.path.read_bytes()
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(self.inside)


def is_package(file: File) -> bool:
    """Return whether a file makes its directory a package."""
    name = file.name.rpartition("/")[2]
    return name.removesuffix(_suffix(name)) == _INIT


def _suffix(name: str) -> str:
    return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")


def is_utf8(name: str) -> bool:
    """Return whether a zip can store a file's name: others have lone surrogates (PEP 383)."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(path: Path) -> str:
    """Return a path as a text that can be printed and sent, whatever bytes the path contains."""
    return os.fsencode(path).decode(errors="backslashreplace")


def files_below(path: Path, name: str, *, most: int, inside: str = "") -> list[File] | None:
    """Return the files of a directory or zip, or the one file at a path; None if too many.

    Args:
        path: path of the directory, the zip or the file.
        name: its name in the directory that ranks import from; "" for that directory itself. If it
            is "", links to directories are not followed, because they may lead out of a project;
            otherwise links to packages are followed.
        most: the largest number of files.
        inside: the name in the zip; "" for all of the zip.
    """
    if path.is_file():
        if name and not inside:
            return [_file(name, path, path.stat())]
        zipped = list(_in_zip(path, name, inside))
        return None if len(zipped) > most else zipped
    walk = _walk(path, name, links=bool(name), met=(os.path.realpath(path),))
    found = list(itertools.islice(walk, most + 1))
    # The files are examined only now: for a directory that is too large that would take long.
    return None if len(found) > most else list(_looked_at(found))


def files_in(directory: Path) -> list[File]:
    """Return the files directly in a directory, without hidden ones."""
    visible = (entry for entry in _children(directory) if not entry.name.startswith("."))
    return list(_looked_at((entry.name, entry) for entry in visible if _is_file(entry)))


def _looked_at(entries: Iterable[tuple[str, os.DirEntry[str]]]) -> Iterator[File]:
    """Yield files under the names that they get, without files that were removed just now."""
    for name, entry in entries:
        with contextlib.suppress(FileNotFoundError):
            yield _file(name, Path(entry.path), entry.stat())


def _file(name: str, path: Path, stat: os.stat_result) -> File:
    may_run = bool(stat.st_mode & _MAY_RUN)
    state = path, name, stat.st_mtime_ns, stat.st_size, stat.st_ino, may_run
    return File(name, path, "", may_run, stat.st_size, state)


def _children(directory: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:  # a directory that we may not read is none that we can import from
        return []


def _walk(
    directory: str | Path, name: str, *, links: bool, met: tuple[str, ...]
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files below a directory, with the names that they get.

    Args:
        directory: the directory to walk.
        name: its name; "" for the directory that ranks import from.
        links: whether to follow links to packages.
        met: resolved paths of the directory and of those above it; a link must not lead back to
            one.
    """
    children = _children(directory)
    if name and not _ENVIRONMENTS.isdisjoint(entry.name for entry in children):
        return
    for entry in children:
        if entry.name.startswith(".") or entry.name in _NOT_CODE:
            continue
        below = f"{name}/{entry.name}" if name else entry.name
        if _is_directory(entry):
            real = entry.path
            if entry.is_symlink():
                real = os.path.realpath(entry.path)
                if not links or real in met or not Path(real, f"{_INIT}.py").is_file():
                    continue
            if entry.name != _HOPSGPU.name or Path(real).resolve() != _HOPSGPU:
                yield from _walk(entry.path, below, links=links, met=(*met, real))
        elif _is_file(entry):
            yield below, entry


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads below a file, or to itself
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # as above
        return False


def _in_zip(path: Path, name: str, inside: str) -> Iterator[File]:
    """Yield the files of a zip, or of a path inside it, without what ranks have by themselves."""
    try:
        stat = path.stat()
        listed = _listed(path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except (OSError, zipfile.BadZipFile):
        return
    state = stat.st_mtime_ns, stat.st_size, stat.st_ino
    for entry, size, mode in listed:
        if inside and entry != inside and not entry.startswith(f"{inside}/"):
            continue
        called = name + entry.removeprefix(inside) if inside else entry
        if called.partition("/")[0] not in PROVIDED_MODULES and not _is_hidden(called):
            yield File(called, path, entry, bool(mode & _MAY_RUN), size, (path, entry, *state))


def _is_hidden(name: str) -> bool:
    parts = name.split("/")
    return any(part.startswith(".") or part in _NOT_CODE for part in parts)


@functools.lru_cache(maxsize=_MOST_ZIPS)
def _listed(path: Path, *_state: int) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and mode of each file in a zip; a new state makes it read the zip again."""
    with zipfile.ZipFile(path) as archive:
        return tuple(
            (entry.filename, entry.file_size, entry.external_attr >> 16)
            for entry in archive.infolist()
            if not entry.is_dir()
        )
