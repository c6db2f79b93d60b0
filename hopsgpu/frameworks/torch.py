"""PyTorch's environment variables, as torchrun sets them and `init_method="env://"` reads them.

Sources: the torchrun documentation, "Environment Variables", and for interfaces
`torch.distributed`'s "Choosing the network interface to use". A node is a container: `LOCAL_RANK`
and `NODE_RANK` count within and across containers.

`torch.distributed.is_torchelastic_launched()` checks `TORCHELASTIC_RUN_ID`, and so does Lightning,
which otherwise starts processes of its own or deletes `WORLD_SIZE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hopsgpu.core.gang import RankPlacement, World

VARIABLES = (
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)


@dataclass(frozen=True)
class Restarts:
    """The run and the attempt, which torchrun sets for its workers; attempts count from 0."""

    run_id: str
    attempt: int = 0
    max_restarts: int = 0


def environment(
    world: World,
    place: RankPlacement,
    master: tuple[str, int],
    restarts: Restarts,
    *,
    is_hosted: bool = False,
) -> dict[str, str]:
    """Return all variables that torchrun sets for one worker, `NODE_RANK`, and the interface's.

    Args:
        is_hosted: whether an agent serves the TCPStore at `master`, so that rank 0 only joins it.
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
        "ROLE_NAME": "default",  # torchrun's default
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": restarts.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts.max_restarts),
    }
    if is_hosted:
        variables["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    if interface := place.container.interface:
        variables["GLOO_SOCKET_IFNAME"] = interface
        variables["TP_SOCKET_IFNAME"] = interface
        # Without "=", NCCL treats the name as a prefix: eth1 would match eth10.
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return variables


def script_environment(directory: Path) -> dict[str, str]:
    """Return the variables that torchrun sets and only scripts read.

    Args:
        directory: where `torch.distributed.elastic`'s `@record` writes the error of the rank.
    """
    return {
        "TORCHELASTIC_ERROR_FILE": str(directory / "error.json"),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
