"""The share of a GPU's memory that a rank may use if several trials share the GPU.

`hopsgpu.rank.gpu_memory` sets it in the frameworks of the rank.
"""

from __future__ import annotations

from hopsgpu.core.gang import WORKER, RankPlacement

SHARE = "HOPSGPU_MEMORY_SHARE"
VARIABLES = (SHARE,)


def environment(place: RankPlacement, share: float | None) -> dict[str, str]:
    """Return `HOPSGPU_MEMORY_SHARE` for a worker; the share is in (0, 1), or None for no limit."""
    if share is None or not place.gpus or place.role != WORKER:
        return {}
    return {SHARE: str(share)}
