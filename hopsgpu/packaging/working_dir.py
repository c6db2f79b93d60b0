"""The working directory of a script: which of its files travel to the ranks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tarfile
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hopsgpu.errors import Cancelled, ConfigError
from hopsgpu.units import MIB

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

log = logging.getLogger(__name__)

MAX_BYTES = 100 * MIB
IGNORE_FILES = (".gitignore", ".hopsgpuignore")
# Directories that no script needs: repositories, caches, and installed packages.
_EXCLUDED = frozenset(
    {
        *(".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints", "node_modules"),
        *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".nox", ".eggs"),
    }
)
# Names that mark the directory of a virtual or a conda environment.
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
# More files are not a project, and would take minutes to unpack on each node.
_MAX_FILES = 50_000
_MAX_LISTED = 5


@dataclass(frozen=True)
class WorkingDirectory:
    """The files of a working directory that travel.

    Attributes:
        files: paths relative to the directory, sorted.
        bytes: their total size.
        warnings: what is left out although the user may expect it.
        copied_links: links that travel as copies of their targets.
    """

    path: Path
    files: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...] = ()
    copied_links: frozenset[str] = frozenset()

    def digest(self, stop: threading.Event) -> str:
        """Return the SHA-256 of the files' names, modes and contents.

        Raises:
            ConfigError: a file cannot be read.
            Cancelled: `stop` was set.
        """
        digest = hashlib.sha256()
        described: list[object]
        for name in self.files:
            path = self.path / name
            try:
                if path.is_symlink() and name not in self.copied_links:
                    described = ["link", str(path.readlink())]
                elif path.is_dir():
                    described = ["directory"]
                else:
                    is_executable = bool(path.stat().st_mode & 0o100)
                    described = ["file", is_executable, _digest_of(path, stop)]
            except OSError as error:
                raise _unreadable_error(path, error) from error
            digest.update(json.dumps([name, *described]).encode() + b"\n")
        return digest.hexdigest()

    def add_to(self, archive: tarfile.TarFile, below: str, stop: threading.Event) -> None:
        """Add the files to an archive, in the directory `below`.

        Raises:
            ConfigError: a file cannot be read.
            Cancelled: `stop` was set.
        """
        for name in self.files:
            _check_stop(stop)
            try:
                path = self.path / name
                is_copied = name in self.copied_links
                _add(archive, path.resolve() if is_copied else path, f"{below}/{name}")
            except OSError as error:
                raise _unreadable_error(self.path / name, error) from error


def find_files(
    directory: Path,
    *,
    needed: Collection[str] = (),
    not_sent: Collection[str] = (),
    max_bytes: int = MAX_BYTES,
) -> WorkingDirectory:
    """Find the files of a working directory that travel to the ranks.

    Repositories, caches, virtual environments, and what `.gitignore` and `.hopsgpuignore` name are
    left out.

    Args:
        needed: files that travel although they are ignored, as the script.
        not_sent: directories, relative to this one, whose files do not travel.
        max_bytes: bound of the total size.

    Raises:
        ConfigError: the directory cannot be read, or is too large; the message lists the five
            largest entries.
    """
    root = directory.resolve()
    if not root.is_dir():
        raise ConfigError(f"working_dir={str(directory)!r}: must be an existing directory")
    sizes, skipped_links = dict[str, int](), list[str]()
    for name, path in _walk(root, frozenset(not_sent)):
        size = _size_of(path, name, root, skipped_links)
        if size is None:
            continue
        sizes[name] = size
        if len(sizes) > _MAX_FILES:
            raise ConfigError(
                f"working_dir={str(directory)!r} has more than {_MAX_FILES} files: name in"
                " .hopsgpuignore what the script does not need, or put the data on the lake"
            )
    copied_links = {name for name in needed if name in skipped_links}
    skipped_links = [name for name in skipped_links if name not in copied_links]
    for name in needed:
        sizes.setdefault(name, (root / name).stat().st_size)
    total = sum(sizes.values())
    if total > max_bytes:
        raise _too_large_error(directory, sizes, total, max_bytes)
    warnings = []
    if skipped_links:
        listed = ", ".join(skipped_links[:_MAX_LISTED])
        warnings.append(
            f"not sent to the ranks, because these links lead out of the working directory or to"
            f" nothing: {listed}"
        )
    log.debug("working directory %s: %d files, %d bytes", root, len(sizes), total)
    files = tuple(sorted(sizes))
    return WorkingDirectory(root, files, total, tuple(warnings), frozenset(copied_links))


def _walk(root: Path, not_sent: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files, links and directories that are not ignored, with their relative names.

    An empty directory travels, too: a script may write into it.
    """
    pending: list[tuple[Path, tuple[_Ignored, ...]]] = [(root, tuple(_above(root)))]
    while pending:
        folder, above = pending.pop()
        ignored = (*above, *_ignore_files_of(folder))
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise _unreadable_error(folder, error) from error
        for entry in entries:
            path = folder / entry.name
            name = path.relative_to(root).as_posix()
            is_directory = entry.is_dir(follow_symlinks=False)
            if _is_ignored(path, is_directory, ignored):
                continue
            if is_directory and _is_excluded(path):
                continue
            yield name, path
            if is_directory and name not in not_sent:
                pending.append((path, ignored))


def _is_excluded(directory: Path) -> bool:
    if directory.name in _EXCLUDED:
        return True
    return any((directory / mark).exists() for mark in _ENVIRONMENT_MARKS)


@dataclass(frozen=True)
class _Ignored:
    """The patterns of one file, which apply below its directory."""

    directory: Path
    patterns: GitIgnoreSpec


def _ignore_files_of(directory: Path) -> list[_Ignored]:
    # Imported late: a driver in YARN starts scripts whose files are on the lake already.
    from pathspec import GitIgnoreSpec

    ignored = []
    for name in IGNORE_FILES:
        file = directory / name
        if file.is_file():
            try:
                lines = file.read_text(errors="replace").splitlines()
            except OSError as error:
                raise _unreadable_error(file, error) from error
            ignored.append(_Ignored(directory, GitIgnoreSpec.from_lines(lines)))
    return ignored


def _above(root: Path) -> Iterator[_Ignored]:
    """Yield the patterns of the repository that contains the root, outermost first."""
    parents = []
    if not (root / ".git").exists():
        for parent in root.parents:
            parents.append(parent)
            if (parent / ".git").exists():
                break
        else:
            return
    rules = [rule for parent in reversed(parents) for rule in _ignore_files_of(parent)]
    below_repository = [root, *parents[:-1]]
    # Where the repository ignores the directory itself, its rules say nothing about the files.
    if not any(_is_ignored(path, True, rules) for path in below_repository):
        yield from rules


def _is_ignored(path: Path, is_directory: bool, ignored: Sequence[_Ignored]) -> bool:
    # As git: the last pattern that matches decides, and inner files come after outer ones.
    for rules in reversed(ignored):
        name = path.relative_to(rules.directory).as_posix() + "/" * is_directory
        verdict: Any = rules.patterns.check_file(name).include
        if verdict is not None:
            return bool(verdict)
    return False


def _size_of(path: Path, name: str, root: Path, skipped_links: list[str]) -> int | None:
    """Return the bytes of a file; None for what does not travel."""
    try:
        if path.is_symlink():
            # An absolute link would lead out of the copy, too.
            is_outside = not path.exists() or not path.resolve().is_relative_to(root)
            if is_outside or path.readlink().is_absolute():
                skipped_links.append(name)
                return None
            return 0
        if path.is_dir():
            return 0
        # Pipes, sockets and devices do not travel.
        return path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise _unreadable_error(path, error) from error


def _too_large_error(
    directory: Path, size_by_name: dict[str, int], total: int, max_bytes: int
) -> ConfigError:
    entries = defaultdict[str, int](int)
    for name, size in size_by_name.items():
        parts = name.split("/")
        entries["/".join(parts[:2]) if len(parts) > 2 else name] += size
    largest = sorted(entries.items(), key=lambda item: -item[1])[:_MAX_LISTED]
    listed = "; ".join(f"{name} {size / MIB:.1f} MiB" for name, size in largest)
    return ConfigError(
        f"working_dir={str(directory)!r} has {total / MIB:.1f} MiB of files that would travel to"
        f" the ranks; at most {max_bytes / MIB:.0f} MiB are accepted. The largest entries:"
        f" {listed}. Name in .hopsgpuignore what the script does not need, put data on the lake,"
        " or raise spark.hopsgpu.working_dir.limit"
    )


def _digest_of(path: Path, stop: threading.Event) -> str:
    _check_stop(stop)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    info = archive.gettarinfo(path, name)
    info.uname = info.gname = ""
    info.uid = info.gid = 0
    if not path.is_file() or path.is_symlink():
        archive.addfile(info)
        return
    # Pack a file with two hard links twice: the other one may not travel.
    info.type, info.linkname = tarfile.REGTYPE, ""
    with path.open("rb") as content:
        info.size = os.fstat(content.fileno()).st_size
        archive.addfile(info, content)


def _check_stop(stop: threading.Event) -> None:
    if stop.is_set():
        raise Cancelled("cancelled while the working directory was packed")


def _unreadable_error(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be read, so it cannot be sent to the ranks: {error}")
