"""Where files of a user lie that can be created again."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from hopsgpu.errors import ConfigError


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of files that all of a user's clusters and applications share.

    Args:
        environ: environment, with XDG_CACHE_HOME or HOME unless the user database has the home.

    Raises:
        ConfigError: the user's home is unknown.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative one.
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
