"""What lies below a local directory: all of it, or an error that names what cannot be uploaded."""

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
    """A new name of a directory, beside files that come, for what has come of them so far."""
    return f".{uuid.uuid4().hex}.download"


def drafts_in(directory: Path) -> list[Path]:
    """Such directories: of downloads that go on, and of those that were killed.

    Raises:
        OSError: the directory cannot be read.
    """
    return [path for path in directory.iterdir() if _DRAFT.fullmatch(path.name) and path.is_dir()]


def files_below(directory: Path) -> dict[str, Path]:
    """Files below a directory, by their names relative to it, sorted; links are followed.

    What is a draft of a download (`draft_name`) is left out: it is hopsgpu's own.

    Args:
        directory: one that is there.

    Raises:
        ConfigError: what is neither a file nor a directory (a link to nothing, a pipe, a socket);
            a link to a directory that it is in; a name that does not survive every client of the
            lake, or that two have once Unicode is normalised; a directory that cannot be read.
    """
    found: dict[str, Path] = {}
    waiting = [(directory, frozenset({directory.resolve()}))]
    while waiting:
        place, above = waiting.pop()
        for path in _entries(place):
            with _told(path):
                is_directory, is_file = path.is_dir(), path.is_file()
            if is_directory and _DRAFT.fullmatch(path.name):
                continue
            if is_directory:
                real = path.resolve()
                if any(one.is_relative_to(real) for one in above):
                    raise ConfigError(
                        f"{path} cannot be uploaded: it leads to itself, by {real}; remove the link"
                    )
                waiting.append((path, above | {real}))
            elif is_file:
                name = path_below(path.relative_to(directory).as_posix(), "file")
                if name in found:
                    raise ConfigError(
                        f"two files are named {name!r}, once Unicode is normalised: {found[name]}"
                        f" and {path}; rename one"
                    )
                found[name] = path
            else:
                raise ConfigError(
                    f"{path} cannot be uploaded: it is no file and no directory, but a link to"
                    " nothing, a pipe or the like; remove it, or put a file in its place"
                )
    directories = {str(above) for name in found for above in PurePosixPath(name).parents}
    if clashes := directories & found.keys():
        clash = min(clashes)
        raise ConfigError(
            f"a file and a directory are named {clash!r}, once Unicode is normalised: the file is"
            f" {found[clash]}; rename one"
        )
    return dict(sorted(found.items()))


def _entries(directory: Path) -> list[Path]:
    with _told(directory), os.scandir(directory) as entries:
        return sorted(Path(entry.path) for entry in entries)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What cannot be looked at is told by its name: a part would be taken for all."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read, so not all of it is known: {error.strerror}"
        ) from error
