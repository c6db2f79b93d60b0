"""From the world to the frameworks' environment variables: pure functions.

Beside them is what a user's function calls in a rank, for libraries that take no variables:
`lightning`, `transformers` and `xgboost` import theirs when they are called.
"""

from __future__ import annotations

from hopsgpu.core.gang import WORKER, RankPlace, World
from hopsgpu.frameworks import cuda, gpu_memory_share, jax, lightning, tensorflow, torch
from hopsgpu.frameworks.endpoints import Endpoints
from hopsgpu.frameworks.torch import Restarts

# All that `environment` may set. A rank inherits none of them from its executor.
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
    place: RankPlace,
    endpoints: Endpoints,
    restarts: Restarts,
    visible: str | None = None,
    memory_share: float | None = None,
) -> dict[str, str]:
    """The variables of one process, for every framework at once.

    A parameter server takes no part in the workers' collectives: it gets `TF_CONFIG` and no GPU.

    Args:
        world: the gang.
        place: the process's place in it.
        endpoints: where the gang meets.
        restarts: the run and the attempt.
        visible: which GPUs a rank sees, as in `cuda.visible_gpus`.
        memory_share: of its GPU that a rank may use, or None for all of it.
    """
    shared = {
        **cuda.environment(place, visible),
        **tensorflow.environment(world, place, endpoints),
    }
    if place.role != WORKER:
        return shared
    return {
        **shared,
        **torch.environment(world, place, endpoints.master, restarts, hosted=endpoints.hosted),
        **jax.environment(place, endpoints, visible),
        **lightning.environment(world),
        **gpu_memory_share.environment(place, memory_share),
    }
