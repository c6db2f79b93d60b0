"""Modules that ranks need in their Python besides the imports of their function."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

# For logs and models on an hdfs:// lake.
LAKE = ("hdfs_native", "xxhash")
# For context().data in launches with data=.
DATA = ("numpy", "pyarrow")


def missing_modules(modules: Iterable[str]) -> list[str]:
    """Return the modules that this Python does not have, without importing any."""
    return [name for name in modules if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # the module is imported already, and has no spec
        return True
