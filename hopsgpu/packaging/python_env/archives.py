"""Packed archives, tar and zip: lists of their entries, and unpacking into one directory only."""

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
# First bytes of an ELF header, up to the machine.
HEAD_BYTES = 20
_LINK = 0o12
# `_safe` checks what is written; newer Pythons want an explicit filter.
_TRUSTED: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
_ENCRYPTED = 0x1
_ADVICE = "pack the archive again without it"


@dataclass(frozen=True)
class Entry:
    """An entry of an archive.

    Attributes:
        name: its name, with `/` between its parts and none at the end.
        is_file: whether it is a regular file.
        head: its first bytes, if they were requested.
        link: where it leads, as a name in the archive; "" if it is no link.
    """

    name: str
    is_file: bool
    head: bytes = b""
    link: str = ""


def entries(archive: Path, peek: Callable[[str], bool]) -> Iterator[Entry]:
    """Yield all entries of an archive.

    Args:
        archive: a file whose name ends with one of `SUFFIXES`.
        peek: returns whether to read the first bytes of a file of this name.

    Raises:
        ConfigError: the file is no archive or is damaged, a name leads out of it, or it has a
            device, a link in a zip, or an encrypted file.
    """
    with _errors_of(archive):
        yield from (_zipped if archive.suffix == ".zip" else _tarred)(archive, peek)


def unpack(archive: Path, below: str, target: Path, leave_out: tuple[str, ...]) -> None:
    """Write what is below a directory of an archive into a new directory.

    Owners and special mode bits are not kept.

    Args:
        archive: as in `entries`.
        below: the directory in the archive; "" for all of it.
        target: the directory to create.
        leave_out: names directly below `below` that are left out.

    Raises:
        ConfigError: the file is no archive, is damaged, or has names or links that lead out of it.
        OSError: it cannot be written.
    """
    target.mkdir(parents=True)
    with _errors_of(archive):
        (_unzip if archive.suffix == ".zip" else _untar)(archive, below, target, leave_out)


@contextlib.contextmanager
def _errors_of(archive: Path) -> Iterator[None]:
    """Turn what the readers of archives raise into a ConfigError that names the archive."""
    try:
        yield
    except _Unsafe as error:
        raise ConfigError(f"{archive.name}: {error}; {_ADVICE}") from error
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _no_archive(archive, error) from error
    except OSError as error:
        # Errors of gzip and bz2 have no number; those of the disk have one.
        if error.errno is not None:
            raise
        raise _no_archive(archive, error) from error


def _no_archive(archive: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{archive.name} is damaged, or not the kind of archive that its name says"
        f" ({error or type(error).__name__}): must be one of {', '.join(SUFFIXES)}"
    )


class _Unsafe(Exception):
    """A name that leads out of the archive, or an entry that only a person can replace."""


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise _Unsafe(f"{name!r} points outside the archive")
    return path.as_posix()


def _relative(name: str, below: str) -> str | None:
    """Return a name's part below a directory; None for a name elsewhere, and for the directory."""
    if not below:
        return name if name != "." else None
    return name.removeprefix(f"{below}/") if name.startswith(f"{below}/") else None


def _wanted(name: str, below: str, leave_out: tuple[str, ...]) -> str | None:
    relative = _relative(_checked(name), below)
    if relative is None or relative.partition("/")[0] in leave_out:
        return None
    return relative


def _tarred(archive: Path, peek: Callable[[str], bool]) -> Iterator[Entry]:
    with tarfile.open(archive) as tar:
        for member in tar:
            name = _checked(member.name)
            if name == ".":
                continue
            if member.isdev():
                raise _Unsafe(f"{name!r} is a device")
            head = b""
            if member.isreg() and peek(name) and (file := tar.extractfile(member)) is not None:
                head = file.read(HEAD_BYTES)
            yield Entry(name, member.isreg(), head, _link(member))


def _link(member: tarfile.TarInfo) -> str:
    if member.issym():
        above = posixpath.dirname(member.name)
        return posixpath.normpath(posixpath.join(above, member.linkname))
    return member.linkname if member.islnk() else ""


def _zipped(archive: Path, peek: Callable[[str], bool]) -> Iterator[Entry]:
    with zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            name = _zip_name(info)
            head = b""
            if not info.is_dir() and peek(name):
                with zipped.open(info) as file:
                    head = file.read(HEAD_BYTES)
            yield Entry(name, not info.is_dir(), head)


def _zip_name(info: zipfile.ZipInfo) -> str:
    name = _checked(info.filename)
    if info.external_attr >> 28 == _LINK:
        raise _Unsafe(f"{name!r} is a link, for which zip has no standard (tar.gz has one)")
    if info.flag_bits & _ENCRYPTED:
        raise _Unsafe(f"{name!r} is encrypted")
    return name


def _untar(archive: Path, below: str, target: Path, leave_out: tuple[str, ...]) -> None:
    home = os.path.realpath(target)
    with tarfile.open(archive) as tar:

        def wanted() -> Iterator[tarfile.TarInfo]:
            for member in tar:
                name = _wanted(member.name, below, leave_out)
                if name is not None:
                    yield _safe(member, name, home, below)

        tar.extractall(home, members=wanted(), **_TRUSTED)


def _safe(member: tarfile.TarInfo, name: str, home: str, below: str) -> tarfile.TarInfo:
    """Return a member that is safe to write, whatever links were written before it.

    The rules are those of tarfile's filter "data" (PEP 706), which Pythons before 3.11.4 lack.
    """
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise _Unsafe(f"{name!r} is a device")
    safe = copy.copy(member)
    safe.name = name
    leads = []
    if member.issym():
        leads = [posixpath.join(posixpath.dirname(name), member.linkname)]
    elif member.islnk():
        safe.linkname = _wanted(member.linkname, below, ()) or member.linkname
        leads = [safe.linkname]
    for place in (name, *leads):
        where = os.path.realpath(posixpath.join(home, place))
        if os.path.commonpath([where, home]) != home:
            raise _Unsafe(f"{name!r} points outside the archive")
    safe.uid, safe.gid, safe.uname, safe.gname = os.geteuid(), os.getegid(), "", ""
    may_run = member.isdir() or member.mode & 0o100
    safe.mode = member.mode & (0o755 if may_run else 0o644) | (0o700 if member.isdir() else 0o600)
    return safe


def _unzip(archive: Path, below: str, target: Path, leave_out: tuple[str, ...]) -> None:
    with zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            name = _wanted(_zip_name(info), below, leave_out)
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
