"""PyTorch's environment, as torchrun sets it and `init_method="env://"` reads it.

Source of the names: the torchrun documentation, "Environment Variables", and for interfaces
`torch.distributed`'s "Choosing the network interface to use". Node means container: `LOCAL_RANK`
and `NODE_RANK` count within and across containers.

`TORCHELASTIC_RUN_ID` is what `torch.distributed.is_torchelastic_launched()` goes by, and with it
Lightning, which otherwise starts processes of its own or deletes `WORLD_SIZE`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hopsgpu.core.gang import RankPlace, World

VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_SOCKET_IFNAME",
    "NODE_RANK",
    "RANK",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TP_SOCKET_IFNAME",
    "WORLD_SIZE",
)


@dataclass(frozen=True)
class Restarts:
    """Of which run an attempt is, as torchrun tells its workers.

    Attributes:
        run_id: of the run.
        attempt: counts from 0.
        most: how often the gang may start again.
    """

    run_id: str
    attempt: int = 0
    most: int = 0


def environment(
    world: World,
    place: RankPlace,
    master: tuple[str, int],
    restarts: Restarts,
    *,
    hosted: bool = False,
) -> dict[str, str]:
    """The variables of one worker.

    Args:
        world: the gang.
        place: the worker's place in it.
        master: address and port of the rendezvous.
        restarts: the run and the attempt.
        hosted: True where an agent serves the TCPStore there, False where rank 0 is to.

    Returns:
        all variables that torchrun sets, with `NODE_RANK` beside its `GROUP_RANK`; where an agent
        serves the TCPStore, what has rank 0 join it instead of serving its own; and, where it is
        known, the interface for gloo, NCCL and TensorPipe.
    """
    address, port = master
    variables = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(world.ranks_per_container),
        "NODE_RANK": str(place.node_rank),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(world.size // world.ranks_per_container),
        "ROLE_NAME": "default",  # torchrun's own
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": restarts.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts.most),
    }
    if hosted:
        variables["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    if interface := place.container.interface:
        variables["GLOO_SOCKET_IFNAME"] = interface
        variables["TP_SOCKET_IFNAME"] = interface
        # Without "=" NCCL takes it for a prefix, and eth1 for eth10 too.
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return variables
