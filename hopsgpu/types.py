"""Types of the values that hopsgpu returns: rows, reports and statuses.

Use them in annotations; hopsgpu alone makes their instances. They are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hopsgpu.lazy_names import loader_of

if TYPE_CHECKING:
    from hopsgpu.artifacts.models import ModelFormat, TagChange
    from hopsgpu.core.run_values import GpuSeconds, RankReport, RunStatus, Timeline, WorldReport
    from hopsgpu.core.scores import FailedPart, ScoreStatus
    from hopsgpu.core.spec import GpuRequest, LaunchPlan
    from hopsgpu.core.trials import AblationRow, Best, SearchStatus, TrialReport
    from hopsgpu.core.usage_report import Usage, UsageRow
    from hopsgpu.scoring.score_results import ScoreResult
    from hopsgpu.tuning.search_results import AblationResult, SearchResult
    from hopsgpu.yarn.cluster_gpus import ClusterGpus, GpuNode, GpuQueue, GpuType, GpuUser

_HOMES = {
    "AblationResult": "hopsgpu.tuning.search_results",
    "AblationRow": "hopsgpu.core.trials",
    "Best": "hopsgpu.core.trials",
    "ClusterGpus": "hopsgpu.yarn.cluster_gpus",
    "FailedPart": "hopsgpu.core.scores",
    "GpuNode": "hopsgpu.yarn.cluster_gpus",
    "GpuQueue": "hopsgpu.yarn.cluster_gpus",
    "GpuRequest": "hopsgpu.core.spec",
    "GpuSeconds": "hopsgpu.core.run_values",
    "GpuType": "hopsgpu.yarn.cluster_gpus",
    "GpuUser": "hopsgpu.yarn.cluster_gpus",
    "LaunchPlan": "hopsgpu.core.spec",
    "ModelFormat": "hopsgpu.artifacts.models",
    "RankReport": "hopsgpu.core.run_values",
    "RunStatus": "hopsgpu.core.run_values",
    "ScoreResult": "hopsgpu.scoring.score_results",
    "ScoreStatus": "hopsgpu.core.scores",
    "SearchResult": "hopsgpu.tuning.search_results",
    "SearchStatus": "hopsgpu.core.trials",
    "TagChange": "hopsgpu.artifacts.models",
    "Timeline": "hopsgpu.core.run_values",
    "TrialReport": "hopsgpu.core.trials",
    "Usage": "hopsgpu.core.usage_report",
    "UsageRow": "hopsgpu.core.usage_report",
    "WorldReport": "hopsgpu.core.run_values",
}

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
