"""hopsgpu: gang-scheduled distributed training on YARN's GPUs, through Spark.

The names below, and those of `hopsgpu.types`, are the whole public interface. They are loaded on
first use, so that `import hopsgpu` is quick and needs neither Spark nor a lake.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hopsgpu import types as types
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
    RunTimeout,
    StoreError,
)
from hopsgpu.lazy_names import loader_of

if TYPE_CHECKING:
    from hopsgpu.artifacts.models import ModelStore, ModelVersion
    from hopsgpu.backends.inventory import inventory
    from hopsgpu.backends.spark.session import session
    from hopsgpu.backends.usage import usage
    from hopsgpu.data.argument import Data
    from hopsgpu.launcher.api import hold, launch, plan, submit
    from hopsgpu.launcher.held_gang import Gang
    from hopsgpu.rank.context import Context, context
    from hopsgpu.rank.trial import Trial
    from hopsgpu.runs.gang_result import GangResult
    from hopsgpu.runs.run import Run
    from hopsgpu.scoring.score import score
    from hopsgpu.tuning.ablate import ablate
    from hopsgpu.tuning.search import search

# Unless the application configures logging, hopsgpu prints nothing, not even warnings.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOMES = {
    "Context": "hopsgpu.rank.context",
    "Data": "hopsgpu.data.argument",
    "Gang": "hopsgpu.launcher.held_gang",
    "GangResult": "hopsgpu.runs.gang_result",
    "ModelStore": "hopsgpu.artifacts.models",
    "ModelVersion": "hopsgpu.artifacts.models",
    "Run": "hopsgpu.runs.run",
    "Trial": "hopsgpu.rank.trial",
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
    "Cancelled",
    "CapacityError",
    "ClusterError",
    "ConfigError",
    "Context",
    "Data",
    "DiscoveryError",
    "Gang",
    "GangResult",
    "GangTimeout",
    "GpusIdle",
    "HopsGpuError",
    "ModelStore",
    "ModelVersion",
    "RankFailed",
    "Run",
    "RunTimeout",
    "StoreError",
    "Trial",
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


__getattr__ = loader_of(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "types"])
