"""The files below a local directory, and drafts of downloads."""

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
    """Return a new name for the directory of an incomplete download, beside its target."""
    return f".{uuid.uuid4().hex}.download"


def drafts_in(directory: Path) -> list[Path]:
    """Return the drafts of running and killed downloads in a directory.

    Raises:
        OSError: the directory cannot be read.
    """
    return [path for path in directory.iterdir() if _DRAFT.fullmatch(path.name) and path.is_dir()]


def files_below(directory: Path) -> dict[str, Path]:
    """Return the files below a directory by their relative names, sorted; links are followed.

    Drafts of downloads (`draft_name`) are left out.

    Raises:
        ConfigError: an entry is neither a file nor a directory; a link leads to one of its parents;
            a client of the lake does not support a name; two names are equal after Unicode
            normalisation; or a directory cannot be read.
    """
    files: dict[str, Path] = {}
    pending = [(directory, frozenset({directory.resolve()}))]
    while pending:
        folder, parents = pending.pop()
        for path in _entries(folder):
            with _readable(path):
                is_directory, is_file = path.is_dir(), path.is_file()
            if is_directory and _DRAFT.fullmatch(path.name):
                continue
            if is_directory:
                real = path.resolve()
                if any(parent.is_relative_to(real) for parent in parents):
                    raise ConfigError(
                        f"cannot upload {path}: it is a link to {real}, which contains it; remove"
                        " the link"
                    )
                pending.append((path, parents | {real}))
            elif is_file:
                name = path_below(path.relative_to(directory).as_posix(), "file")
                if name in files:
                    raise ConfigError(
                        f"two files have the name {name!r} after Unicode normalisation:"
                        f" {files[name]} and {path}; rename one"
                    )
                files[name] = path
            else:
                raise ConfigError(
                    f"cannot upload {path}: it is neither a file nor a directory, but a broken"
                    " link, a pipe or a socket; remove it, or replace it by a file"
                )
    directories = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    if clashes := directories & files.keys():
        clash = min(clashes)
        raise ConfigError(
            f"a file and a directory have the name {clash!r} after Unicode normalisation: the file"
            f" is {files[clash]}; rename one"
        )
    return dict(sorted(files.items()))


def _entries(directory: Path) -> list[Path]:
    with _readable(directory), os.scandir(directory) as entries:
        return sorted(Path(entry.path) for entry in entries)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}, so files may be missing: {error.strerror}"
        ) from error
