"""The checkpoints of a run as a page shows them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.artifacts.checkpoints import CheckpointShard, complete_shards, metric_shard
from hopsgpu.artifacts.saving_ranks import SavingRank

_MAX_STEPS = 100


@dataclass(frozen=True)
class CheckpointRow:
    """A step that was saved."""

    step: int
    is_complete: bool
    ranks: int
    metric: float | None


def checkpoint_rows(
    shards: Mapping[int, frozenset[CheckpointShard]], announced: frozenset[SavingRank]
) -> Sequence[CheckpointRow]:
    """Return the latest steps of a run's checkpoints, the latest first.

    Args:
        announced: the ranks that announced that they save.
    """
    complete = complete_shards(shards, announced)
    rows = []
    for step in sorted(shards, reverse=True)[:_MAX_STEPS]:
        saved = complete.get(step) or shards[step]
        metric = metric_shard(saved).metric if saved else None
        rows.append(CheckpointRow(step, step in complete, len({p.rank for p in saved}), metric))
    return rows
