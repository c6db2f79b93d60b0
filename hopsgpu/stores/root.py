"""Where runs and models go on the lake."""

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
        return named.rstrip("/")
    if files is None or files.startswith("file:"):
        return f"file://{Path.home()}/hopsgpu"
    return f"{files.rstrip('/')}/user/{user}/hopsgpu"
