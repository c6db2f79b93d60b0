"""What ranks need of their Python beside what their function imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

# To keep logs and models on an hdfs:// lake.
LAKE = ("hdfs_native", "xxhash")
# Of launches with data=, for context().data.
DATA = ("numpy", "pyarrow")


def lacking(modules: Iterable[str]) -> list[str]:
    """Those that this Python does not have; none is imported."""
    return [name for name in modules if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # it has been imported, and was made without a spec
        return True
