"""The environment variables of the frameworks, derived from the world by pure functions.

`lightning`, `transformers` and `xgboost` have functions that users call in a rank. These import
their libraries when they are called.
"""

from __future__ import annotations

from dataclasses import replace

from hopsgpu.core.gang import WORKER, RankPlacement, World
from hopsgpu.frameworks import cuda, gpu_memory_share, jax, lightning, tensorflow, torch
from hopsgpu.frameworks.endpoints import Endpoints
from hopsgpu.frameworks.torch import Restarts

# All variables that `environment` may set. A rank inherits none of them from its executor.
VARIABLES = frozenset(
    (
        *cuda.VARIABLES,
        *jax.VARIABLES,
        *lightning.VARIABLES,
        *gpu_memory_share.VARIABLES,
        *tensorflow.VARIABLES,
        *torch.VARIABLES,
    )
)


def environment(
    world: World,
    place: RankPlacement,
    endpoints: Endpoints,
    restarts: Restarts,
    visible: str | None = None,
    memory_share: float | None = None,
    *,
    is_independent: bool = False,
) -> dict[str, str]:
    """Return the variables of one process, for all frameworks.

    A parameter server does not join the workers' collectives: it gets `TF_CONFIG` and no GPU.

    Args:
        visible: as for `cuda.visible_gpus`.
        memory_share: as for `gpu_memory_share.environment`.
        is_independent: whether frameworks see a world of this process only.
    """
    if is_independent:
        world, endpoints = _world_of_one(place, endpoints)
        (place,) = world.places
    shared = {
        **cuda.environment(place, visible),
        **tensorflow.environment(world, place, endpoints),
    }
    if place.role != WORKER:
        return shared
    return {
        **shared,
        **torch.environment(
            world, place, endpoints.master, restarts, is_hosted=endpoints.is_hosted
        ),
        **jax.environment(place, endpoints, visible),
        **lightning.environment(world),
        **gpu_memory_share.environment(place, memory_share),
    }


def _world_of_one(place: RankPlacement, endpoints: Endpoints) -> tuple[World, Endpoints]:
    container = replace(place.container, gpus=place.gpus)
    alone = replace(place, rank=0, local_rank=0, node_rank=0, container=container)
    server = endpoints.servers[place.rank]
    # With port 0, the store of the only rank chooses a free port.
    return World((alone,), 1), Endpoints(("127.0.0.1", 0), server, (server,))
