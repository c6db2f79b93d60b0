"""Contracts that other directories hold on their lakes, for modules that hold them on theirs."""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType
from typing import Any


def contracts_of(module: ModuleType, without: Collection[str]) -> dict[str, Any]:
    """Return the tests and fixtures of a module by name, but for some tests, which must exist."""
    there = {name: one for name, one in vars(module).items() if not name.startswith("__")}
    unknown = set(without) - there.keys()
    if unknown:
        raise ValueError(f"{module.__name__} has no {', '.join(sorted(unknown))}")
    return {name: one for name, one in there.items() if name not in without}
