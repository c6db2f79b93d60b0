"""PyTorch's environment, as torchrun sets it and `init_method="env://"` reads it.

Source of the names: the torchrun documentation, "Environment Variables", and for interfaces
`torch.distributed`'s "Choosing the network interface to use". Node means container: `LOCAL_RANK`
and `NODE_RANK` count within and across containers.
"""

from __future__ import annotations

from hopsgpu.gang import RankPlace, World

VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_SOCKET_IFNAME",
    "NODE_RANK",
    "RANK",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TP_SOCKET_IFNAME",
    "WORLD_SIZE",
)


def environment(
    world: World, place: RankPlace, master: tuple[str, int], *, hosted: bool = False
) -> dict[str, str]:
    """The variables of one worker.

    Args:
        world: the gang.
        place: the worker's place in it.
        master: address and port of the rendezvous.
        hosted: True where an agent serves the TCPStore there, False where rank 0 is to.

    Returns:
        `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `NODE_RANK` (torchrun's
        `GROUP_RANK`), `MASTER_ADDR` and `MASTER_PORT`; where an agent serves the TCPStore, what
        has rank 0 join it instead of serving its own; and, where it is known, the interface for
        gloo, NCCL and TensorPipe.
    """
    address, port = master
    variables = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(world.ranks_per_container),
        "NODE_RANK": str(place.node_rank),
        "GROUP_RANK": str(place.node_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    if hosted:
        variables["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    if interface := place.container.interface:
        variables["GLOO_SOCKET_IFNAME"] = interface
        variables["TP_SOCKET_IFNAME"] = interface
        # Without "=" NCCL takes it for a prefix, and eth1 for eth10 too.
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return variables
