"""The files below a local directory: all, or an error that names what cannot be uploaded."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from hopsgpu.errors import ConfigError
from hopsgpu.storage.names import path_below

_DRAFT = re.compile(r"\.[0-9a-f]{32}\.download")


def draft_name() -> str:
    """Return a new name for a directory that holds a download until it is complete.

    The directory lies beside the downloaded files.
    """
    return f".{uuid.uuid4().hex}.download"


def drafts_in(directory: Path) -> list[Path]:
    """Return the drafts in a directory: of downloads that go on, and of those that were killed.

    Raises:
        OSError: the directory cannot be read.
    """
    return [path for path in directory.iterdir() if _DRAFT.fullmatch(path.name) and path.is_dir()]


def files_below(directory: Path) -> dict[str, Path]:
    """Return the files below a directory by their relative names, sorted; links are followed.

    Drafts of downloads (`draft_name`) are left out, because they are hopsgpu's own.

    Args:
        directory: a directory that exists.

    Raises:
        ConfigError: something is neither a file nor a directory (a link to nothing, a pipe, a
            socket); a link leads to a directory that it is in; a name does not survive every client
            of the lake, or is the same as another once Unicode is normalised; or a directory cannot
            be read.
    """
    found: dict[str, Path] = {}
    waiting = [(directory, frozenset({directory.resolve()}))]
    while waiting:
        place, above = waiting.pop()
        for path in _entries(place):
            with _readable(path):
                is_directory, is_file = path.is_dir(), path.is_file()
            if is_directory and _DRAFT.fullmatch(path.name):
                continue
            if is_directory:
                real = path.resolve()
                if any(parent.is_relative_to(real) for parent in above):
                    raise ConfigError(
                        f"cannot upload {path}: it is a link to {real}, which contains it; remove"
                        " the link"
                    )
                waiting.append((path, above | {real}))
            elif is_file:
                name = path_below(path.relative_to(directory).as_posix(), "file")
                if name in found:
                    raise ConfigError(
                        f"two files have the name {name!r} after Unicode normalisation:"
                        f" {found[name]} and {path}; rename one"
                    )
                found[name] = path
            else:
                raise ConfigError(
                    f"cannot upload {path}: it is neither a file nor a directory, but a broken"
                    " link, a pipe or a socket; remove it, or replace it by a file"
                )
    directories = {str(above) for name in found for above in PurePosixPath(name).parents}
    if clashes := directories & found.keys():
        clash = min(clashes)
        raise ConfigError(
            f"a file and a directory have the name {clash!r} after Unicode normalisation: the file"
            f" is {found[clash]}; rename one"
        )
    return dict(sorted(found.items()))


def _entries(directory: Path) -> list[Path]:
    with _readable(directory), os.scandir(directory) as entries:
        return sorted(Path(entry.path) for entry in entries)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn an OSError into an error that names the path, because a part would be taken for all."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}, so files may be missing: {error.strerror}"
        ) from error
