"""Names on the lake that every client supports, and that stay below their directory."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

from hopsgpu.errors import ConfigError

# Characters at which some clients end the path of a URL, and control characters.
UNSAFE_CHARACTERS = re.compile(r"[#?;\x00-\x1f\x7f-\x9f]")
# The limit of HDFS and of most local file systems.
_MAX_BYTES = 255
# Unicode's categories of format characters and of line and paragraph separators.
_INVISIBLE = ("Cf", "Zl", "Zp")
# Joiners are accepted within a word, because Persian and emoji need them.
_JOINERS = "\u200c\u200d"


def file_name(name: object, label: str = "name") -> str:
    """Return the name of one file or directory, Unicode-normalised (NFC).

    Args:
        label: term for the name in the error, such as an argument.

    Raises:
        ConfigError: it is no string; or it is empty, "." or ".."; or it has over 255 bytes of
            UTF-8, or `/`, a backslash, a colon, `#`, `?`, `;` or control characters.
    """
    if isinstance(name, str):
        normal = unicodedata.normalize("NFC", name)
        if _is_file_name(normal):
            return normal
    raise ConfigError(
        f"{label}={name!r}: must be a name of 1 to {_MAX_BYTES} bytes without '/', '\\', ':', '#',"
        " '?', ';' and control characters, other than '.' and '..'"
    )


def model_name(name: object) -> str:
    """Return the name of a model, Unicode-normalised (NFC).

    Raises:
        ConfigError: `file_name` refuses the name; or it begins with `_` or `.`, has white space at
            its ends, or has invisible characters.
    """
    normal = file_name(name, "model")
    if normal[0] in "_.":
        raise ConfigError(
            f"model={name!r}: names that begin with '_' or '.' are reserved for hopsgpu"
        )
    stripped = normal.strip().strip(_JOINERS)
    invisible = (c for c in normal if unicodedata.category(c) in _INVISIBLE and c not in _JOINERS)
    if normal != stripped or any(invisible):
        raise ConfigError(
            f"model={ascii(name)}: must not have white space at its ends or invisible characters:"
            " remove them"
        )
    return normal


def is_model_name(name: str) -> bool:
    """Return whether `model_name` accepts the name of a directory unchanged."""
    try:
        return model_name(name) == name
    except ConfigError:
        return False


def path_below(path: object, label: str = "path") -> str:
    """Return a path inside a directory: file names with slashes between them, normalised (NFC).

    Raises:
        ConfigError: the path is not a string, is absolute, or has a name that `file_name` refuses.
    """
    if not isinstance(path, str):
        raise ConfigError(f"{label}={path!r}: must be a path with '/' between its names")
    return "/".join(file_name(name, label) for name in path.split("/"))


def is_path_below(path: object) -> bool:
    """Return whether a value is a path inside a directory, as `path_below` returns it."""
    try:
        return path_below(path) == path
    except ConfigError:
        return False


def local_path(argument: object, name: str) -> Path:
    """Return the path on this machine that an argument with this name has.

    Raises:
        ConfigError: the value is neither a string nor a path, or is empty.
    """
    if isinstance(argument, (str, os.PathLike)) and argument != "":
        path = os.fspath(argument)
        if isinstance(path, str):
            return Path(path)
    raise ConfigError(f"{name}={argument!r}: must be the path of a local directory")


def _is_file_name(name: str) -> bool:
    if name in ("", ".", "..") or UNSAFE_CHARACTERS.search(name) or any(c in name for c in "/\\:"):
        return False
    try:
        return len(name.encode()) <= _MAX_BYTES
    except UnicodeEncodeError:  # Python's form of a file name that is not valid UTF-8
        return False
