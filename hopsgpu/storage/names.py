"""Names on the lake: what survives every client, and stays where it belongs."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

from hopsgpu.errors import ConfigError

# What some clients' handling of URLs cuts a path at, and what no name should have.
UNFIT = re.compile(r"[#?;\x00-\x1f\x7f-\x9f]")
# Of HDFS and of most local file systems.
_MOST_BYTES = 255
# Unicode's categories of what only formats what is beside it, and of what ends lines.
_UNSEEN = ("Cf", "Zl", "Zp")
# But within a word, where Persian and emoji need them.
_JOINERS = "\u200c\u200d"


def file_name(name: object, what: str = "name") -> str:
    """The name of one file or directory, Unicode-normalised (NFC).

    Args:
        name: as it was given.
        what: it names, for the error.

    Raises:
        ConfigError: not a string, empty, "." or "..", over 255 bytes of UTF-8, or with a slash, a
            backslash, a colon, `#`, `?`, `;` or control characters.
    """
    if isinstance(name, str):
        normal = unicodedata.normalize("NFC", name)
        if _is_fit(normal):
            return normal
    raise ConfigError(
        f"{what}={name!r}: must be a name of 1 to {_MOST_BYTES} bytes without '/', '\\', ':', '#',"
        " '?', ';' and control characters, other than '.' and '..'"
    )


def model_name(name: object) -> str:
    """The name of a model, Unicode-normalised (NFC).

    Raises:
        ConfigError: as `file_name`; names that begin with `_` or `.`, which are hopsgpu's own; and
            white space at the ends, and characters that nobody sees.
    """
    normal = file_name(name, "model")
    if normal[0] in "_.":
        raise ConfigError(f"model={name!r}: names that begin with '_' or '.' are hopsgpu's own")
    seen = normal.strip().strip(_JOINERS)
    unseen = (c for c in normal if unicodedata.category(c) in _UNSEEN and c not in _JOINERS)
    if normal != seen or any(unseen):
        raise ConfigError(
            f"model={ascii(name)}: white space at its ends, and characters that nobody sees, are"
            " no part of a model's name: leave them out"
        )
    return normal


def is_model_name(name: str) -> bool:
    """Whether a directory of that name may be a model, which `model_name` lets be found."""
    try:
        return model_name(name) == name
    except ConfigError:
        return False


def path_below(path: object, what: str = "path") -> str:
    """A path inside a directory: file names with slashes between them, normalised (NFC).

    Raises:
        ConfigError: absolute, or one of its names is none for `file_name`.
    """
    if not isinstance(path, str):
        raise ConfigError(f"{what}={path!r}: must be a path with '/' between its names")
    return "/".join(file_name(name, what) for name in path.split("/"))


def is_path_below(path: object) -> bool:
    """Whether it is a path inside a directory, as `path_below` gives it."""
    try:
        return path_below(path) == path
    except ConfigError:
        return False


def local_path(given: object, what: str) -> Path:
    """A path on this machine.

    Raises:
        ConfigError: neither a string nor a path, or empty.
    """
    if isinstance(given, (str, os.PathLike)) and given != "":
        path = os.fspath(given)
        if isinstance(path, str):
            return Path(path)
    raise ConfigError(f"{what}={given!r}: must be the path of a local directory")


def _is_fit(name: str) -> bool:
    if name in ("", ".", "..") or UNFIT.search(name) or any(c in name for c in "/\\:"):
        return False
    try:
        return len(name.encode()) <= _MOST_BYTES
    except UnicodeEncodeError:  # what a file name of no valid UTF-8 becomes in Python
        return False
