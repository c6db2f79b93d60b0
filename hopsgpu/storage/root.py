"""URLs on the lake: the root of runs and models, and paths below it."""

from __future__ import annotations

from pathlib import Path


def choose_root(option: str | None, default_fs: str | None, user: str) -> str:
    """Return the root that an option names, else the user's directory on the default file system.

    If there is no default file system, or it is local, this is a directory in the user's home.

    Args:
        option: the root that an option names, or None.
        default_fs: `fs.defaultFS`; None if no Hadoop configuration has it.
        user: the owner of the directory.
    """
    if option:
        return normalize_url(option)
    if default_fs is None or default_fs.startswith("file:"):
        return f"file://{Path.home()}/hopsgpu"
    return join_url(default_fs, f"user/{user}/hopsgpu")


def normalize_url(url: str) -> str:
    """Return a URL whose path begins with one slash and ends without a slash.

    `hdfs://host/`, and a text without `://`, stay unchanged.
    """
    scheme, colon, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{colon}{host}{slash}{path.strip('/')}"


def join_url(url: str, path: str) -> str:
    """Return the URL of a path below a directory, which may be the root of a file system.

    Args:
        url: URL of the directory, with or without a slash at its end.
        path: relative path from the directory.
    """
    parent = normalize_url(url)
    return f"{parent}{path}" if parent.endswith("/") else f"{parent}/{path}"
