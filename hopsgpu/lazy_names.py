"""Module attributes that are imported on first use (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def loader_of(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, given the module that defines each name."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(homes[name])
        except ModuleNotFoundError as error:
            if error.name not in ("pyspark", "py4j"):
                raise
            # If PySpark is not installed as a package, use that of the cluster's Spark.
            importlib.import_module("hopsgpu.backends.spark.spark_location").find_spark()
            home = importlib.import_module(homes[name])
        return getattr(home, name)

    return load
