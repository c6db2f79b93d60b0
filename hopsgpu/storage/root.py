"""URLs on the lake: the root of runs and models, and the places below it."""

from __future__ import annotations

from pathlib import Path


def choose_root(named: str | None, files: str | None, user: str) -> str:
    """Return the root that was named, else the user's directory on the default file system.

    If there is no default file system, or it is local, this is a directory in the user's home.

    Args:
        named: the root that an option names, or None.
        files: `fs.defaultFS`; None if no Hadoop configuration has one.
        user: the owner of the directory.
    """
    if named:
        return normalize_url(named)
    if files is None or files.startswith("file:"):
        return f"file://{Path.home()}/hopsgpu"
    return join_url(files, f"user/{user}/hopsgpu")


def normalize_url(url: str) -> str:
    """Return a URL whose path begins with one slash and ends with none.

    `hdfs://host/` stays as it is.

    Args:
        url: a URL with a scheme and `://`; any other text stays as it is.
    """
    scheme, colon, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{colon}{host}{slash}{path.strip('/')}"


def join_url(url: str, path: str) -> str:
    """Return the URL of a place below a directory, which may be the root of a file system.

    Args:
        url: URL of the directory, with or without a slash at its end.
        path: path from there, without a slash in front.
    """
    above = normalize_url(url)
    return f"{above}{path}" if above.endswith("/") else f"{above}/{path}"
