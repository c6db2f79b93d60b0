"""Reads from checkpoints which of the launch's data the ranks have trained."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hopsgpu.artifacts.checkpoints import Checkpoints, complete_shards
from hopsgpu.errors import StoreError
from hopsgpu.storage.digests import MAX_LIST_BYTES
from hopsgpu.storage.error_messages import DAMAGED, JSON_ERRORS

log = logging.getLogger(__name__)


def latest_positions(places: Sequence[Checkpoints]) -> list[Mapping[str, Any]]:
    """Return the positions at the latest complete step, in the order of the ranks that saved them.

    The list is empty if no step is complete, or if these ranks had no data. Call this function
    between two attempts, while no rank saves: then all ranks of the next attempt continue from this
    step. Each position includes what earlier worlds trained of the epoch.

    Args:
        places: checkpoints to search, the run's own first, then those of the run that it resumes.

    Raises:
        StoreError: the lake refused the operation, or a record is damaged.
    """
    for place in places:
        complete = complete_shards(place.shards(), place.announced_ranks())
        if not complete:
            continue
        step = max(complete)
        home = place.root / str(step)
        positions = []
        for shard in sorted(complete[step], key=lambda shard: shard.rank):
            record = home / shard.record
            try:
                position = json.loads(record.read(MAX_LIST_BYTES)).get("position")
            except JSON_ERRORS as error:
                raise StoreError(f"{record.url} is damaged: {error!r}", DAMAGED) from error
            if position is not None:
                positions.append(position)
        log.info("step %d in %s has %d positions in the data", step, home.url, len(positions))
        return positions
    return []
