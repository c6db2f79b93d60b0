"""Tables of seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def heading(title: str) -> None:
    """Print the heading of a table."""
    print(f"\n{title}\n\n{'':36}{'median':>8}{'least':>8}{'most':>8}", flush=True)


def row(name: str, seconds: Sequence[float]) -> None:
    """Print one row of a table."""
    middle = statistics.median(seconds)
    print(f"{name:36}{middle:8.2f}{min(seconds):8.2f}{max(seconds):8.2f}", flush=True)
