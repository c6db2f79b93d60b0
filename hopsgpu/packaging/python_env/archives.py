"""Archives (tar and zip): their entries, and safe unpacking into a directory."""

from __future__ import annotations

import contextlib
import copy
import lzma
import os
import posixpath
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hopsgpu.errors import ConfigError

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz", ".zip")
# Length of an ELF header up to the machine.
HEAD_BYTES = 20
_LINK = 0o12
# `_safe_member` makes members safe; newer Pythons require an explicit filter.
_EXTRACT_OPTIONS: dict[str, Any] = (
    {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
)
_ENCRYPTED = 0x1
_ADVICE = "pack the archive again without it"


@dataclass(frozen=True)
class ArchiveEntry:
    """An entry of an archive.

    Attributes:
        name: without `/` at the end.
        is_file: whether it is a regular file.
        head: its first bytes, if they were requested.
        link: target of a link, as a name in the archive; "" for other entries.
    """

    name: str
    is_file: bool
    head: bytes = b""
    link: str = ""


def read_entries(archive: Path, should_peek: Callable[[str], bool]) -> Iterator[ArchiveEntry]:
    """Yield all entries of an archive.

    Args:
        archive: a file whose name ends with one of `SUFFIXES`.
        should_peek: returns whether to read the first bytes of a file of this name.

    Raises:
        ConfigError: the archive is damaged, has another format, or has an unsafe name, a device, a
            link in a zip, or an encrypted file.
    """
    with _translate_errors(archive):
        yield from (_zip_entries if archive.suffix == ".zip" else _tar_entries)(
            archive, should_peek
        )


def unpack(archive: Path, below: str, target: Path, exclude: tuple[str, ...]) -> None:
    """Unpack a directory of an archive into a new directory, without owners and special modes.

    Args:
        below: the directory in the archive; "" for all of it.
        exclude: names directly below `below` to leave out.

    Raises:
        ConfigError: the archive is damaged, has another format, or has unsafe names or links.
        OSError: the directory cannot be written.
    """
    target.mkdir(parents=True)
    with _translate_errors(archive):
        (_unzip if archive.suffix == ".zip" else _untar)(archive, below, target, exclude)


@contextlib.contextmanager
def _translate_errors(archive: Path) -> Iterator[None]:
    try:
        yield
    except _UnsafeEntry as error:
        raise ConfigError(f"{archive.name}: {error}; {_ADVICE}") from error
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged_archive_error(archive, error) from error
    except OSError as error:
        # Errors of the disk have a number, unlike those of gzip and bz2.
        if error.errno is not None:
            raise
        raise _damaged_archive_error(archive, error) from error


def _damaged_archive_error(archive: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{archive.name} is damaged, or not the kind of archive that its name says"
        f" ({error or type(error).__name__}): must be one of {', '.join(SUFFIXES)}"
    )


class _UnsafeEntry(Exception):
    """An unsafe or unsupported entry, which the user must replace."""


def _check_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise _UnsafeEntry(f"{name!r} points outside the archive")
    return path.as_posix()


def _target_name(name: str, below: str, exclude: tuple[str, ...]) -> str | None:
    """Return an entry's name below a directory; None if the entry is to be left out."""
    name, above = _check_name(name), f"{below}/" if below else ""
    relative = name.removeprefix(above)
    is_outside = name == "." or not name.startswith(above)
    return None if is_outside or relative.partition("/")[0] in exclude else relative


def _tar_entries(archive: Path, should_peek: Callable[[str], bool]) -> Iterator[ArchiveEntry]:
    with tarfile.open(archive) as tar:
        for member in tar:
            name = _check_name(member.name)
            if name == ".":
                continue
            if member.isdev():
                raise _UnsafeEntry(f"{name!r} is a device")
            file = tar.extractfile(member) if member.isreg() and should_peek(name) else None
            head = b"" if file is None else file.read(HEAD_BYTES)
            yield ArchiveEntry(name, member.isreg(), head, _link_target(member))


def _link_target(member: tarfile.TarInfo) -> str:
    if member.issym():
        above = posixpath.dirname(member.name)
        return posixpath.normpath(posixpath.join(above, member.linkname))
    return member.linkname if member.islnk() else ""


def _zip_entries(archive: Path, should_peek: Callable[[str], bool]) -> Iterator[ArchiveEntry]:
    with zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            name = _zip_name(info)
            head = b""
            if not info.is_dir() and should_peek(name):
                with zipped.open(info) as file:
                    head = file.read(HEAD_BYTES)
            yield ArchiveEntry(name, not info.is_dir(), head)


def _zip_name(info: zipfile.ZipInfo) -> str:
    name = _check_name(info.filename)
    if info.external_attr >> 28 == _LINK:
        raise _UnsafeEntry(f"{name!r} is a link, for which zip has no standard (tar.gz has one)")
    if info.flag_bits & _ENCRYPTED:
        raise _UnsafeEntry(f"{name!r} is encrypted")
    return name


def _untar(archive: Path, below: str, target: Path, exclude: tuple[str, ...]) -> None:
    home = os.path.realpath(target)
    with tarfile.open(archive) as tar:

        def safe_members() -> Iterator[tarfile.TarInfo]:
            for member in tar:
                name = _target_name(member.name, below, exclude)
                if name is not None:
                    yield _safe_member(member, name, home, below)

        tar.extractall(home, members=safe_members(), **_EXTRACT_OPTIONS)


def _safe_member(member: tarfile.TarInfo, name: str, home: str, below: str) -> tarfile.TarInfo:
    """Return a member that is safe to write, also after malicious links.

    The rules are those of tarfile's filter "data" (PEP 706), which Pythons before 3.11.4 lack.
    """
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise _UnsafeEntry(f"{name!r} is a device")
    safe = copy.copy(member)
    safe.name = name
    link_targets = []
    if member.issym():
        link_targets = [posixpath.join(posixpath.dirname(name), member.linkname)]
    elif member.islnk():
        safe.linkname = _target_name(member.linkname, below, ()) or member.linkname
        link_targets = [safe.linkname]
    for path in (name, *link_targets):
        where = os.path.realpath(posixpath.join(home, path))
        if os.path.commonpath([where, home]) != home:
            raise _UnsafeEntry(f"{name!r} points outside the archive")
    safe.uid, safe.gid, safe.uname, safe.gname = os.geteuid(), os.getegid(), "", ""
    is_executable = member.isdir() or member.mode & 0o100
    safe.mode = member.mode & (0o755 if is_executable else 0o644) | (
        0o700 if member.isdir() else 0o600
    )
    return safe


def _unzip(archive: Path, below: str, target: Path, exclude: tuple[str, ...]) -> None:
    with zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            name = _target_name(_zip_name(info), below, exclude)
            if name is None:
                continue
            file = target / name
            if info.is_dir():
                file.mkdir(parents=True, exist_ok=True)
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            with zipped.open(info) as source, file.open("wb") as written:
                shutil.copyfileobj(source, written)
            if mode := info.external_attr >> 16 & 0o777:
                file.chmod(mode & 0o755 | 0o600)
