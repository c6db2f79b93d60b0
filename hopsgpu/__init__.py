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
    GpusIdle,
    HopsGpuError,
    RankFailed,
    StoreError,
)

if TYPE_CHECKING:
    from hopsgpu.artifacts.models import ModelFormat, ModelStore, ModelVersion, TagChange
    from hopsgpu.backends.inventory import inventory
    from hopsgpu.backends.spark.session import session
    from hopsgpu.backends.usage import usage
    from hopsgpu.core.run_values import GpuSeconds, RankReport, RunStatus, Timeline, WorldReport
    from hopsgpu.core.scores import FailedPart, ScoreStatus
    from hopsgpu.core.spec import GangSpec, GpuRequest, LaunchPlan
    from hopsgpu.core.trials import AblationRow, Best, SearchStatus, TrialReport
    from hopsgpu.core.usage_report import Usage, UsageRow
    from hopsgpu.data.argument import Data
    from hopsgpu.launcher.api import hold, launch, plan, submit
    from hopsgpu.launcher.held_gang import Gang
    from hopsgpu.rank.context import Context, context
    from hopsgpu.rank.trial import Trial
    from hopsgpu.runs.gang_result import GangResult
    from hopsgpu.runs.run import Run
    from hopsgpu.scoring.score import score
    from hopsgpu.scoring.score_results import ScoreResult
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
    "FailedPart": "hopsgpu.core.scores",
    "Gang": "hopsgpu.launcher.held_gang",
    "GangResult": "hopsgpu.runs.gang_result",
    "GangSpec": "hopsgpu.core.spec",
    "GpuNode": "hopsgpu.yarn.cluster_gpus",
    "GpuQueue": "hopsgpu.yarn.cluster_gpus",
    "GpuRequest": "hopsgpu.core.spec",
    "GpuSeconds": "hopsgpu.core.run_values",
    "GpuType": "hopsgpu.yarn.cluster_gpus",
    "GpuUser": "hopsgpu.yarn.cluster_gpus",
    "LaunchPlan": "hopsgpu.core.spec",
    "ModelFormat": "hopsgpu.artifacts.models",
    "ModelStore": "hopsgpu.artifacts.models",
    "ModelVersion": "hopsgpu.artifacts.models",
    "RankReport": "hopsgpu.core.run_values",
    "Run": "hopsgpu.runs.run",
    "RunStatus": "hopsgpu.core.run_values",
    "ScoreResult": "hopsgpu.scoring.score_results",
    "ScoreStatus": "hopsgpu.core.scores",
    "SearchResult": "hopsgpu.tuning.search_results",
    "SearchStatus": "hopsgpu.core.trials",
    "TagChange": "hopsgpu.artifacts.models",
    "Timeline": "hopsgpu.core.run_values",
    "Trial": "hopsgpu.rank.trial",
    "TrialReport": "hopsgpu.core.trials",
    "Usage": "hopsgpu.core.usage_report",
    "UsageRow": "hopsgpu.core.usage_report",
    "WorldReport": "hopsgpu.core.run_values",
    "ablate": "hopsgpu.tuning.ablate",
    "context": "hopsgpu.rank.context",
    "hold": "hopsgpu.launcher.api",
    "inventory": "hopsgpu.backends.inventory",
    "launch": "hopsgpu.launcher.api",
    "plan": "hopsgpu.launcher.api",
    "score": "hopsgpu.scoring.score",
    "search": "hopsgpu.tuning.search",
    "session": "hopsgpu.backends.spark.session",
    "submit": "hopsgpu.launcher.api",
    "usage": "hopsgpu.backends.usage",
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
    "FailedPart",
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
    "GpusIdle",
    "HopsGpuError",
    "LaunchPlan",
    "ModelFormat",
    "ModelStore",
    "ModelVersion",
    "RankFailed",
    "RankReport",
    "Run",
    "RunStatus",
    "ScoreResult",
    "ScoreStatus",
    "SearchResult",
    "SearchStatus",
    "StoreError",
    "TagChange",
    "Timeline",
    "Trial",
    "TrialReport",
    "Usage",
    "UsageRow",
    "WorldReport",
    "ablate",
    "context",
    "hold",
    "inventory",
    "launch",
    "plan",
    "score",
    "search",
    "session",
    "submit",
    "usage",
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
