"""The directory of a user's files that can be created again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from hopsgpu.errors import ConfigError


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of files that all of a user's clusters and applications share.

    The files are code that is run, and Kerberos tickets. The directory need not exist.

    Raises:
        ConfigError: neither the environment nor the user database has the user's home, or the
            directory belongs to another user, or all users may write there.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification requires that a relative path is ignored.
    directory = (Path(base) if base.startswith("/") else _home(environ) / ".cache") / "hopsgpu"
    try:
        status = directory.stat()
    except OSError:  # it does not exist, or cannot be used either
        return directory
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{directory} belongs to user {status.st_uid} and has the mode"
            f" {stat.S_IMODE(status.st_mode):o}: others could put code there that you would run."
            " Set XDG_CACHE_HOME to a directory to which only you may write"
        )
    return directory


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
