"""The directory of a user's files that can be created again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path

from hopsgpu.errors import ConfigError


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of files that all of a user's clusters and applications share.

    Raise ConfigError if neither the environment nor the user database has the user's home.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification requires that a relative path is ignored.
    return (Path(base) if base.startswith("/") else _home(environ) / ".cache") / "hopsgpu"


def _home(environ: Mapping[str, str]) -> Path:
    if home := environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError as error:
        raise ConfigError(
            "HOME is not set, and this user has no home: set HOME or XDG_CACHE_HOME, below which"
            " files are cached"
        ) from error


@contextlib.contextmanager
def only_creator(lock: Path) -> Iterator[bool]:
    """Yield whether this process has a file's lock, without waiting for another process."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
