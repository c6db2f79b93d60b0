"""The GPUs that a process sees, and the NVIDIA driver that a CUDA version needs.

Sources: CUDA C++ Programming Guide, "CUDA Environment Variables"; NVIDIA, "CUDA Compatibility",
"Minor Version Compatibility" (docs.nvidia.com/deploy/cuda-compatibility); NVIDIA, "MIG User Guide",
"CUDA Device Enumeration" (a process has a single MIG instance); NCCL's issue 1716 and user guide,
"NCCL_MULTI_RANK_GPU_ENABLE" (NCCL compares bus ids, and MIG devices have that of their GPU).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hopsgpu.core.gang import WORKER, RankPlacement, World, slices_of_one_gpu
from hopsgpu.errors import ConfigError

# Why NCCL does not connect the ranks of the gang.
NCCL_CONFLICT = "HOPSGPU_NCCL_CONFLICT"
_MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
VARIABLES = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")
_MIG = "MIG-"
# Oldest Linux driver, by CUDA version. From CUDA 11 on, a driver supports all minor versions.
_OLDEST_DRIVERS = {
    (13,): "580",
    (12,): "525",
    (11,): "450.80.02",
    (10, 2): "440.33",
    (10, 1): "418.39",
    (10, 0): "410.48",
}


def visible_gpus(place: RankPlacement, visible: str | None = None) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that a process sees, in CUDA's order.

    A process without GPUs of its own sees none.

    Args:
        visible: "container" for all GPUs of the container, in the order of `LOCAL_RANK`; "rank" for
            the rank's own; None for "container" if a rank has one GPU, else for "rank". In a
            container with MIG devices, a rank always sees only its own, because CUDA shows only the
            first MIG device in the variable.

    Raises:
        ConfigError: the rank has several GPUs, one of which is a MIG device.
    """
    if place.role != WORKER or not place.gpus:
        return ()
    if len(place.gpus) > 1 and any(gpu.startswith(_MIG) for gpu in place.gpus):
        raise ConfigError(
            f"rank {place.rank} on {place.container.host} has {', '.join(place.gpus)}, but a CUDA"
            " process uses only one MIG device: set gpus_per_worker=1 and use more workers"
        )
    if any(gpu.startswith(_MIG) for gpu in place.container.gpus):
        return place.gpus
    chosen = visible or ("container" if len(place.gpus) == 1 else "rank")
    return place.container.gpus if chosen == "container" else place.gpus


def environment(place: RankPlacement, visible: str | None = None) -> dict[str, str]:
    """Return `CUDA_VISIBLE_DEVICES`, empty for a process without GPUs, and `CUDA_DEVICE_ORDER`."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus(place, visible)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def nccl_conflict(world: World, variables: Mapping[str, str]) -> str:
    """Describe two ranks on MIG devices of one GPU, which NCCL does not connect; "" without any.

    Args:
        variables: environment variables that the user sets for the ranks.
    """
    pair = slices_of_one_gpu(world)
    if pair is None or is_multi_rank_enabled(variables):
        return ""
    gpu, first, second = pair
    return (
        f"ranks {first.rank} and {second.rank} have MIG devices of one GPU, {gpu} of"
        f" {first.container.host} ({', '.join(first.gpus)} and {', '.join(second.gpus)}), and NCCL"
        ' connects only one rank of a GPU. Use gloo, as in init_process_group("gloo"); or one MIG'
        f" device of each GPU; or, with NCCL 2.30 or later, {_MULTI_RANK}=1 (experimental)"
    )


def is_multi_rank_enabled(variables: Mapping[str, str]) -> bool:
    """Return whether NCCL is asked to connect several ranks of one GPU."""
    return variables.get(_MULTI_RANK) == "1"


def conflict_environment(world: World, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with which ranks refuse NCCL; empty if NCCL connects the ranks."""
    conflict = nccl_conflict(world, variables)
    return {NCCL_CONFLICT: conflict} if conflict else {}


def oldest_driver(cuda: str) -> str | None:
    """Return the oldest Linux driver, such as "525", for a CUDA version, such as "12.4" or "12".

    NVIDIA's compatibility package is not counted in. The result for an unknown version is None.
    """
    version = version_of(cuda)
    return _OLDEST_DRIVERS.get(version[:1]) or _OLDEST_DRIVERS.get(version[:2])


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: (550, 54, 15) for "550.54.15"."""
    return tuple(int(part) for part in re.findall(r"\d+", text))
