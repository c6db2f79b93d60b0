"""A standalone master's first page, read for what its JSON lacks. Pure."""

from __future__ import annotations

import re

# Source: the page of PySpark 4.3.0, and Spark 3.5's UIUtils (basicSparkPage).
_VERSION = re.compile(r'<span class="version[^"]*"[^>]*>\s*(\d+\.\d+[\w.-]{0,80})\s*</span>')


def read_version(html: str) -> str:
    """Return the version of the master's Spark; "" if the page does not show it."""
    match = _VERSION.search(html)
    return "" if match is None else match[1]
