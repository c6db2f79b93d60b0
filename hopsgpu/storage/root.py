"""URLs on the lake: the root of runs and models, and what lies below it."""

from __future__ import annotations

from pathlib import Path


def root_on(named: str | None, files: str | None, user: str) -> str:
    """The root that was named, else the user's directory on the default file system.

    Args:
        named: by an option, or None.
        files: `fs.defaultFS`; None where no Hadoop configuration has one.
        user: whose directory it is.
    """
    if named:
        return trimmed(named)
    if files is None or files.startswith("file:"):
        return f"file://{Path.home()}/hopsgpu"
    return below(files, f"user/{user}/hopsgpu")


def trimmed(url: str) -> str:
    """A URL whose path begins with one slash and ends with none; `hdfs://host/` is left as it is.

    Args:
        url: with a scheme and `://`; another is left as it is.
    """
    scheme, colon, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{colon}{host}{slash}{path.strip('/')}"


def below(url: str, path: str) -> str:
    """The URL of what lies below a directory, which may be the root of a file system.

    Args:
        url: of the directory, with or without a slash at its end.
        path: from there, without a slash in front.
    """
    above = trimmed(url)
    return f"{above}{path}" if above.endswith("/") else f"{above}/{path}"
