"""The share of a GPU's memory that a rank may use, where trials share a GPU.

`hopsgpu.rank.gpu_memory` tells it to the frameworks in the rank.
"""

from __future__ import annotations

from hopsgpu.core.gang import WORKER, RankPlace

SHARE = "HOPSGPU_MEMORY_SHARE"
VARIABLES = (SHARE,)


def environment(place: RankPlace, share: float | None) -> dict[str, str]:
    """`HOPSGPU_MEMORY_SHARE`, for a worker with GPUs that may use a part of them only.

    Args:
        place: of the process.
        share: in (0, 1), or None for all of it.
    """
    if share is None or not place.gpus or place.role != WORKER:
        return {}
    return {SHARE: str(share)}
