"""hopsgpu: gang-scheduled distributed training on YARN's GPUs, through Spark.

The names below are the whole public interface. They are loaded on first use, so that
`import hopsgpu` is quick and needs neither Spark nor a lake.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from hopsgpu.core.version import __version__ as __version__
from hopsgpu.errors import (
    Cancelled,
    CapacityError,
    ClusterError,
    ConfigError,
    DiscoveryError,
    GangTimeout,
    HopsGpuError,
    RankFailed,
    StoreError,
)

if TYPE_CHECKING:
    from hopsgpu.artifacts.models import ModelStore, ModelVersion
    from hopsgpu.backends.inventory import inventory
    from hopsgpu.backends.spark.session import session
    from hopsgpu.core.run_values import GpuSeconds, RankReport, RunStatus, Timeline
    from hopsgpu.core.spec import GangSpec, GpuRequest, LaunchPlan
    from hopsgpu.core.trials import AblationRow, Best, SearchStatus, TrialReport
    from hopsgpu.data.argument import Data
    from hopsgpu.launcher.api import hold, launch, plan, submit
    from hopsgpu.launcher.gang_result import GangResult
    from hopsgpu.launcher.held_gang import Gang
    from hopsgpu.launcher.run import Run
    from hopsgpu.rank.context import Context, context
    from hopsgpu.rank.trial import Trial
    from hopsgpu.tuning.ablate import ablate
    from hopsgpu.tuning.search import search
    from hopsgpu.tuning.search_results import AblationResult, SearchResult
    from hopsgpu.yarn.cluster_gpus import ClusterGpus, GpuNode, GpuQueue, GpuType, GpuUser

# Unless the application configures logging, hopsgpu prints nothing, not even warnings.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOMES = {
    "AblationResult": "hopsgpu.tuning.search_results",
    "AblationRow": "hopsgpu.core.trials",
    "Best": "hopsgpu.core.trials",
    "ClusterGpus": "hopsgpu.yarn.cluster_gpus",
    "Context": "hopsgpu.rank.context",
    "Data": "hopsgpu.data.argument",
    "Gang": "hopsgpu.launcher.held_gang",
    "GangResult": "hopsgpu.launcher.gang_result",
    "GangSpec": "hopsgpu.core.spec",
    "GpuNode": "hopsgpu.yarn.cluster_gpus",
    "GpuQueue": "hopsgpu.yarn.cluster_gpus",
    "GpuRequest": "hopsgpu.core.spec",
    "GpuSeconds": "hopsgpu.core.run_values",
    "GpuType": "hopsgpu.yarn.cluster_gpus",
    "GpuUser": "hopsgpu.yarn.cluster_gpus",
    "LaunchPlan": "hopsgpu.core.spec",
    "ModelStore": "hopsgpu.artifacts.models",
    "ModelVersion": "hopsgpu.artifacts.models",
    "RankReport": "hopsgpu.core.run_values",
    "Run": "hopsgpu.launcher.run",
    "RunStatus": "hopsgpu.core.run_values",
    "SearchResult": "hopsgpu.tuning.search_results",
    "SearchStatus": "hopsgpu.core.trials",
    "Timeline": "hopsgpu.core.run_values",
    "Trial": "hopsgpu.rank.trial",
    "TrialReport": "hopsgpu.core.trials",
    "ablate": "hopsgpu.tuning.ablate",
    "context": "hopsgpu.rank.context",
    "hold": "hopsgpu.launcher.api",
    "inventory": "hopsgpu.backends.inventory",
    "launch": "hopsgpu.launcher.api",
    "plan": "hopsgpu.launcher.api",
    "search": "hopsgpu.tuning.search",
    "session": "hopsgpu.backends.spark.session",
    "submit": "hopsgpu.launcher.api",
}

__all__ = [
    "AblationResult",
    "AblationRow",
    "Best",
    "Cancelled",
    "CapacityError",
    "ClusterError",
    "ClusterGpus",
    "ConfigError",
    "Context",
    "Data",
    "DiscoveryError",
    "Gang",
    "GangResult",
    "GangSpec",
    "GangTimeout",
    "GpuNode",
    "GpuQueue",
    "GpuRequest",
    "GpuSeconds",
    "GpuType",
    "GpuUser",
    "HopsGpuError",
    "LaunchPlan",
    "ModelStore",
    "ModelVersion",
    "RankFailed",
    "RankReport",
    "Run",
    "RunStatus",
    "SearchResult",
    "SearchStatus",
    "StoreError",
    "Timeline",
    "Trial",
    "TrialReport",
    "ablate",
    "context",
    "hold",
    "inventory",
    "launch",
    "plan",
    "search",
    "session",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hopsgpu' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if error.name not in ("pyspark", "py4j"):
            raise
        # Python's packages have no PySpark; a cluster's own Spark has one.
        importlib.import_module("hopsgpu.backends.spark.spark_location").find_spark()
        home = importlib.import_module(_HOMES[name])
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
