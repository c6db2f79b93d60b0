"""Spark masters."""

from __future__ import annotations

import re

_LOCAL = re.compile(r"local(\[(\*|\d+)(,\s*\d+)?\])?")


def is_local(master: str | None) -> bool:
    """Return whether a master is local, local[N] or local[*]: the driver's own JVM."""
    return master is not None and _LOCAL.fullmatch(master.strip()) is not None
