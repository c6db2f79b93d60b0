"""The share of a GPU's memory that a rank may use if several trials share the GPU.

`hopsgpu.rank.gpu_memory` sets it in the frameworks of the rank.
"""

from __future__ import annotations

from hopsgpu.core.gang import WORKER, RankPlacement

SHARE = "HOPSGPU_MEMORY_SHARE"
VARIABLES = (SHARE,)


def environment(place: RankPlacement, share: float | None) -> dict[str, str]:
    """Return `HOPSGPU_MEMORY_SHARE` for a worker that may use only a share of its GPU's memory.

    Args:
        share: in (0, 1), or None for all of the memory.
    """
    if share is None or not place.gpus or place.role != WORKER:
        return {}
    return {SHARE: str(share)}
