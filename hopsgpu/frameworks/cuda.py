"""Which GPUs a process sees. Source: CUDA C++ Programming Guide, "CUDA Environment Variables"."""

from __future__ import annotations

from hopsgpu.gang import WORKER, RankPlace

VARIABLES = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")


def visible_gpus(place: RankPlace, visible: str | None = None) -> tuple[str, ...]:
    """UUIDs that a process sees, in CUDA's order.

    Args:
        place: of the process. One without GPUs of its own sees none.
        visible: "container" for all of the container, in the order of `LOCAL_RANK`; "rank" for
            the rank's own; None for "container" where a rank has one GPU and "rank" where it has
            several.
    """
    if place.role != WORKER or not place.gpus:
        return ()
    chosen = visible or ("container" if len(place.gpus) == 1 else "rank")
    return place.container.gpus if chosen == "container" else place.gpus


def environment(place: RankPlace, visible: str | None = None) -> dict[str, str]:
    """`CUDA_VISIBLE_DEVICES`, empty for a process without GPUs, and `CUDA_DEVICE_ORDER`."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus(place, visible)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
