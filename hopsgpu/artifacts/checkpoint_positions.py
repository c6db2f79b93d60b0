"""The position in a launch's data that the latest checkpoint has in its records."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hopsgpu.artifacts.checkpoints import Checkpoints, complete
from hopsgpu.errors import StoreError
from hopsgpu.storage.error_messages import DAMAGED, ODD_JSON

log = logging.getLogger(__name__)


def latest_positions(places: Sequence[Checkpoints]) -> list[Mapping[str, Any]]:
    """Return the positions at the latest complete step, of each rank that saved it, in their order.

    Call it between two attempts, while no rank saves: then it is the step from which all ranks of
    the next attempt continue. Each position has what earlier worlds trained of the epoch, so no
    other step needs to be read.

    Args:
        places: checkpoints to search, the run's own first, then those of the run that it resumes.

    Returns:
        The positions, the lowest rank's first; none if no step is complete, or if the ranks that
        saved the latest one had no data.

    Raises:
        StoreError: the lake refused the operation, or a record is damaged.
    """
    for place in places:
        whole = complete(place.parts(), place.announced())
        if not whole:
            continue
        step = max(whole)
        home = place.root / str(step)
        found = []
        for part in sorted(whole[step], key=lambda part: part.rank):
            record = home / part.record
            try:
                found.append(json.loads(record.read()).get("position"))
            except ODD_JSON as error:
                raise StoreError(f"{record.url} is damaged: {error!r}", DAMAGED) from error
        positions = [position for position in found if position is not None]
        log.info("step %d in %s has %d positions in the data", step, home.url, len(positions))
        return positions
    return []
