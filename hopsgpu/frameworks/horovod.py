"""Horovod's environment on gloo, as `horovodrun --gloo` sets it.

Source: `create_slot_env_vars` and `create_run_envs` of horovod.runner.gloo_run, 0.28.1. Node
means container. Rank 0 is to serve the rendezvous at the coordinator's address.
"""

from __future__ import annotations

from hopsgpu.core.gang import RankPlace, World
from hopsgpu.frameworks.endpoints import Endpoints

VARIABLES = (
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_HOSTNAME",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
)


def environment(world: World, place: RankPlace, endpoints: Endpoints) -> dict[str, str]:
    """The variables of one worker."""
    address, port = endpoints.coordinator
    variables = {
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.ranks_per_container),
        "HOROVOD_CROSS_RANK": str(place.node_rank),
        "HOROVOD_CROSS_SIZE": str(world.size // world.ranks_per_container),
        # Ranks of one name form the local group: two containers of a node are two. The names
        # are such that rank 0 can tell its rendezvous server of all.
        "HOROVOD_HOSTNAME": f"container-{place.node_rank}",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    if place.container.interface:
        variables["HOROVOD_GLOO_IFACE"] = place.container.interface
    return variables
