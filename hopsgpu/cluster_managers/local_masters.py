"""Recognition of local Spark masters."""

from __future__ import annotations

import re

_LOCAL = re.compile(r"local(\[(\*|\d+)(,\s*\d+)?\])?")


def is_local(master: str | None) -> bool:
    """Return whether a master is a local one: local, local[N] or local[*]; None is not.

    Such a master runs in the driver's own JVM, on this machine. A number of task failures may
    follow, as in local[N,F].
    """
    return master is not None and _LOCAL.fullmatch(master.strip()) is not None
