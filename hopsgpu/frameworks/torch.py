"""PyTorch's environment, as torchrun sets it and `init_method="env://"` reads it.

Source of the names: the torchrun documentation, "Environment Variables". Node means
container: `LOCAL_RANK` and `NODE_RANK` count within and across containers.
"""

from __future__ import annotations

from hopsgpu.gang import RankPlace, World


def environment(world: World, place: RankPlace, master: tuple[str, int]) -> dict[str, str]:
    """The variables of one rank.

    Args:
        world: the gang.
        place: the rank's place in it.
        master: address and port at which rank 0 will listen.

    Returns:
        `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `NODE_RANK`, `MASTER_ADDR`,
        `MASTER_PORT`, `CUDA_VISIBLE_DEVICES` (with one GPU per rank the UUIDs of the container, in
        the order of `LOCAL_RANK`, so that `torch.cuda.set_device(LOCAL_RANK)` is right; with
        several, the rank's own; empty on CPUs) and `CUDA_DEVICE_ORDER`.
    """
    address, port = master
    visible = place.gpus if len(place.gpus) > 1 else place.container.gpus
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(world.ranks_per_container),
        "NODE_RANK": str(place.node_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(visible),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
