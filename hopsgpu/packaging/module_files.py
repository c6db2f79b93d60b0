"""The files that modules and packages consist of, in directories and in zips."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from pathlib import Path

from hopsgpu.packaging.module_finder import PROVIDED_MODULES

# hopsgpu sends itself to the ranks: a checkout beside a script is not a module of the user's.
_HOPSGPU = Path(__file__).resolve().parents[1]
_EXCLUDED_DIRECTORIES = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
# Names that mark the directory of a virtual or a conda environment.
_ENVIRONMENT_MARKS = frozenset({"pyvenv.cfg", "conda-meta"})
_INIT = "__init__"
# Longer ones first: ".cpython-311-x86_64-linux-gnu.so" ends with ".so".
_SUFFIXES = tuple(sorted(all_suffixes(), key=len, reverse=True))
_EXECUTABLE = 0o111
_CACHED_ZIPS = 64


@dataclass(frozen=True)
class File:
    """A file to pack.

    Attributes:
        name: its path below the directory that ranks import from.
        path: path of the file, or of the zip that contains it.
        inside: its name in the zip; "" without a zip.
        size: in bytes.
        state: values that change when the file changes.
    """

    name: str
    path: Path
    inside: str
    is_executable: bool
    size: int
    state: tuple[object, ...]

    @property
    def is_module(self) -> bool:
        return self.name.endswith(_SUFFIXES)

    @property
    def top(self) -> str:
        first, _, below = self.name.partition("/")
        return first if below else first.removesuffix(_suffix(first))

    @property
    def parents(self) -> Iterator[str]:
        """The names of the directories that contain the file, outermost first."""
        return itertools.accumulate(self.name.split("/")[:-1], "{}/{}".format)

    def content(self) -> bytes:
        """Read the file.

        Raises:
            OSError: the file cannot be read.
            zipfile.BadZipFile, KeyError: its zip is damaged, or was replaced.
        """
        if not self.inside:
            return self.path.read_bytes()
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(self.inside)


def is_package(file: File) -> bool:
    name = file.name.rpartition("/")[2]
    return name.removesuffix(_suffix(name)) == _INIT


def _suffix(name: str) -> str:
    return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")


def is_utf8(name: str) -> bool:
    """Return whether a zip can store a file's name, which may have lone surrogates (PEP 383)."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(path: Path) -> str:
    """Return a path as text, with escapes for bytes that are not UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def files_below(path: Path, name: str, *, limit: int, inside: str = "") -> list[File] | None:
    """Return the files of a directory or zip, or the one file at a path; None if too many.

    Args:
        name: its name in the directory that ranks import from; "" for that directory itself, in
            which links to directories are not followed, because they may lead out of a project.
            Otherwise links to packages are followed.
        inside: the name in the zip; "" for all of the zip.
    """
    if path.is_file():
        if name and not inside:
            return [_file(name, path, path.stat())]
        zipped = list(_files_in_zip(path, name, inside))
        return None if len(zipped) > limit else zipped
    walk = _walk(path, name, bool(name), (os.path.realpath(path),))
    entries = list(itertools.islice(walk, limit + 1))
    # Call stat() after the count: for a directory that is too large it would take long.
    return None if len(entries) > limit else list(_existing_files(entries))


def files_in(directory: Path) -> list[File]:
    """Return the files directly in a directory, without hidden files."""
    visible = (entry for entry in _children(directory) if not entry.name.startswith("."))
    return list(
        _existing_files((entry.name, entry) for entry in visible if _has_type(entry.is_file))
    )


def _existing_files(entries: Iterable[tuple[str, os.DirEntry[str]]]) -> Iterator[File]:
    """Yield files under their new names; files that were removed since the listing are left out."""
    for name, entry in entries:
        with contextlib.suppress(FileNotFoundError):
            yield _file(name, Path(entry.path), entry.stat())


def _file(name: str, path: Path, stat: os.stat_result) -> File:
    is_executable = bool(stat.st_mode & _EXECUTABLE)
    state = path, name, stat.st_mtime_ns, stat.st_size, stat.st_ino, is_executable
    return File(name, path, "", is_executable, stat.st_size, state)


def _children(directory: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:  # the driver cannot import from a directory that it may not read
        return []


def _walk(
    directory: str | Path, name: str, can_follow: bool, ancestors: tuple[str, ...]
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files below a directory, with their new names.

    Args:
        name: name of the directory; "" for the one that ranks import from.
        can_follow: whether to follow links to packages.
        ancestors: resolved paths of the directory and of those above it, to which no link is
            followed: the walk would not end.
    """
    children = _children(directory)
    if name and not _ENVIRONMENT_MARKS.isdisjoint(entry.name for entry in children):
        return
    for entry in children:
        if entry.name.startswith(".") or entry.name in _EXCLUDED_DIRECTORIES:
            continue
        below = f"{name}/{entry.name}" if name else entry.name
        if _has_type(entry.is_dir):
            real = entry.path
            if entry.is_symlink():
                real = os.path.realpath(entry.path)
                if not can_follow or real in ancestors or not Path(real, f"{_INIT}.py").is_file():
                    continue
            if entry.name != _HOPSGPU.name or Path(real).resolve() != _HOPSGPU:
                yield from _walk(entry.path, below, can_follow, (*ancestors, real))
        elif _has_type(entry.is_file):
            yield below, entry


def _has_type(is_type: Callable[[], bool]) -> bool:
    try:
        return is_type()
    except OSError:  # a link that leads below a file, or to itself
        return False


def _files_in_zip(path: Path, name: str, inside: str) -> Iterator[File]:
    """Yield the files of a zip, or of a path inside it, without `PROVIDED_MODULES`."""
    try:
        stat = path.stat()
        state = stat.st_mtime_ns, stat.st_size, stat.st_ino
        entries = _zip_entries(path, *state)
    except (OSError, zipfile.BadZipFile):
        return
    for entry, size, mode in entries:
        if inside and entry != inside and not entry.startswith(f"{inside}/"):
            continue
        new = name + entry.removeprefix(inside) if inside else entry
        if new.partition("/")[0] not in PROVIDED_MODULES and not _is_hidden(new):
            yield File(new, path, entry, bool(mode & _EXECUTABLE), size, (path, entry, *state))


def _is_hidden(name: str) -> bool:
    parts = name.split("/")
    return any(part.startswith(".") or part in _EXCLUDED_DIRECTORIES for part in parts)


@functools.lru_cache(maxsize=_CACHED_ZIPS)
def _zip_entries(path: Path, *_state: int) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and mode of each file in a zip. A new state invalidates the cache."""
    with zipfile.ZipFile(path) as archive:
        return tuple(
            (entry.filename, entry.file_size, entry.external_attr >> 16)
            for entry in archive.infolist()
            if not entry.is_dir()
        )
