"""hopsgpu: gang-scheduled distributed training on YARN's GPUs, through Spark.

The names below are the whole public interface. They are loaded on first use, so that
`import hopsgpu` is quick and needs neither Spark nor a lake.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    from hopsgpu.data.given import Data
    from hopsgpu.holding import Gang
    from hopsgpu.launcher import hold, launch, plan, submit
    from hopsgpu.results import GangResult, GpuSeconds, RankReport, RunStatus, Timeline
    from hopsgpu.run import Run
    from hopsgpu.spark.session import session
    from hopsgpu.spec import GangSpec, GpuRequest, LaunchPlan
    from hopsgpu.stores.models import ModelStore, ModelVersion
    from hopsgpu.study.ablate import ablate
    from hopsgpu.study.search import search
    from hopsgpu.trials import (
        AblationResult,
        AblationRow,
        Best,
        SearchResult,
        SearchStatus,
        TrialReport,
    )
    from hopsgpu.worker.context import Context, context
    from hopsgpu.worker.trial import Trial
    from hopsgpu.yarn.gpus import ClusterGpus, GpuNode, GpuQueue, GpuType, GpuUser
    from hopsgpu.yarn.inventory import inventory

__version__ = "0.1.0"

_HOMES = {
    "AblationResult": "hopsgpu.trials",
    "AblationRow": "hopsgpu.trials",
    "Best": "hopsgpu.trials",
    "ClusterGpus": "hopsgpu.yarn.gpus",
    "Context": "hopsgpu.worker.context",
    "Data": "hopsgpu.data.given",
    "Gang": "hopsgpu.holding",
    "GangResult": "hopsgpu.results",
    "GangSpec": "hopsgpu.spec",
    "GpuNode": "hopsgpu.yarn.gpus",
    "GpuQueue": "hopsgpu.yarn.gpus",
    "GpuRequest": "hopsgpu.spec",
    "GpuSeconds": "hopsgpu.results",
    "GpuType": "hopsgpu.yarn.gpus",
    "GpuUser": "hopsgpu.yarn.gpus",
    "LaunchPlan": "hopsgpu.spec",
    "ModelStore": "hopsgpu.stores.models",
    "ModelVersion": "hopsgpu.stores.models",
    "RankReport": "hopsgpu.results",
    "Run": "hopsgpu.run",
    "RunStatus": "hopsgpu.results",
    "SearchResult": "hopsgpu.trials",
    "SearchStatus": "hopsgpu.trials",
    "Timeline": "hopsgpu.results",
    "Trial": "hopsgpu.worker.trial",
    "TrialReport": "hopsgpu.trials",
    "ablate": "hopsgpu.study.ablate",
    "context": "hopsgpu.worker.context",
    "hold": "hopsgpu.launcher",
    "inventory": "hopsgpu.yarn.inventory",
    "launch": "hopsgpu.launcher",
    "plan": "hopsgpu.launcher",
    "search": "hopsgpu.study.search",
    "session": "hopsgpu.spark.session",
    "submit": "hopsgpu.launcher",
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
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
