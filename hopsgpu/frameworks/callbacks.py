"""What the callbacks for other libraries' loops ask of a rank's context."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, SupportsFloat


class Gang(Protocol):
    """`hopsgpu.context()`, as far as callbacks use it."""

    def report(self, /, step: int, **metrics: SupportsFloat) -> None:
        """Brings metrics to the driver."""

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """Brings a file or directory to the lake."""


def numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    """The numbers among what a library has measured; scalars of NumPy and torch are some."""
    found = {}
    for name, value in (values or {}).items():
        if getattr(value, "ndim", 0) == 0 and not isinstance(value, (str, bytes)):
            try:
                found[name] = float(value)
            except (TypeError, ValueError):
                continue  # a list, say: shown by the library itself
    return found
