"""What the callbacks for other libraries' training loops need from a rank's context."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, SupportsFloat


class Gang(Protocol):
    """The part of `hopsgpu.context()` that callbacks use."""

    def report(self, /, step: int, **metrics: SupportsFloat) -> None:
        """Report metrics at a step to the driver."""

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """Save a file or directory to the lake, as the checkpoint at a step."""


def numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the numbers among a library's values, also scalars of NumPy and torch, as floats."""
    found = {}
    for name, value in (values or {}).items():
        if getattr(value, "ndim", 0) == 0 and not isinstance(value, (str, bytes)):
            try:
                found[name] = float(value)
            except (TypeError, ValueError):
                continue  # a list, for example, which the library shows itself
    return found
