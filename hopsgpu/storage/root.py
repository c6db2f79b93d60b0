"""URLs on the lake: the root of runs and models, and paths below it."""

from __future__ import annotations

from pathlib import Path


def choose_root(option: str | None, default_fs: str | None, user: str) -> str:
    """Return the root that an option names, else the user's directory on `fs.defaultFS`.

    Without a default file system, or if it is local, the directory is in this user's home.
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
    """Return the URL of a relative path below a directory's URL, with or without a last slash."""
    parent = normalize_url(url)
    return f"{parent}{path}" if parent.endswith("/") else f"{parent}/{path}"
