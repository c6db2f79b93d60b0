"""Types of the values that hopsgpu returns: rows, reports and statuses.

Use them in annotations; hopsgpu alone makes their instances. They are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hopsgpu.lazy_names import loader_of

if TYPE_CHECKING:
    from hopsgpu.artifacts.models import ModelFormat, TagChange
    from hopsgpu.cluster_managers.cluster_gpus import (
        ClusterGpus,
        GpuNode,
        GpuQueue,
        GpuType,
        GpuUser,
    )
    from hopsgpu.core.run_values import GpuSeconds, RankReport, RunStatus, Timeline, WorldReport
    from hopsgpu.core.scores import FailedPart, ScoreStatus
    from hopsgpu.core.spec import GpuRequest, LaunchPlan
    from hopsgpu.core.trials import AblationRow, Best, SearchStatus, TrialReport
    from hopsgpu.core.usage_report import Usage, UsageRow
    from hopsgpu.scoring.score_results import ScoreResult
    from hopsgpu.tuning.search_results import AblationResult, SearchResult

_NAMES = {
    "artifacts.models": "ModelFormat TagChange",
    "core.run_values": "GpuSeconds RankReport RunStatus Timeline WorldReport",
    "core.scores": "FailedPart ScoreStatus",
    "core.spec": "GpuRequest LaunchPlan",
    "core.trials": "AblationRow Best SearchStatus TrialReport",
    "core.usage_report": "Usage UsageRow",
    "scoring.score_results": "ScoreResult",
    "tuning.search_results": "AblationResult SearchResult",
    "cluster_managers.cluster_gpus": "ClusterGpus GpuNode GpuQueue GpuType GpuUser",
}
_HOMES = {name: f"hopsgpu.{home}" for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AblationResult",
    "AblationRow",
    "Best",
    "ClusterGpus",
    "FailedPart",
    "GpuNode",
    "GpuQueue",
    "GpuRequest",
    "GpuSeconds",
    "GpuType",
    "GpuUser",
    "LaunchPlan",
    "ModelFormat",
    "RankReport",
    "RunStatus",
    "ScoreResult",
    "ScoreStatus",
    "SearchResult",
    "SearchStatus",
    "TagChange",
    "Timeline",
    "TrialReport",
    "Usage",
    "UsageRow",
    "WorldReport",
]

__getattr__ = loader_of(__name__, _HOMES)


def __dir__() -> list[str]:
    return list(__all__)
