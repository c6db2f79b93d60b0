"""JAX's environment variables, for `jax.distributed.initialize`.

Source: jax/_src/distributed.py, which reads `JAX_COORDINATOR_ADDRESS` and `JAX_LOCAL_DEVICE_IDS`;
the number of processes and the number of this process are arguments.
"""

from __future__ import annotations

from hopsgpu.core.gang import RankPlacement
from hopsgpu.frameworks.cuda import visible_gpus
from hopsgpu.frameworks.endpoints import Endpoints, host_port

VARIABLES = ("HOPSGPU_COORDINATOR", "JAX_COORDINATOR_ADDRESS", "JAX_LOCAL_DEVICE_IDS")


def environment(
    place: RankPlacement, endpoints: Endpoints, visible: str | None = None
) -> dict[str, str]:
    """Return the variables of one worker.

    The coordinator is the `host:port` at which rank 0 may listen. A rank with GPUs also gets
    `JAX_LOCAL_DEVICE_IDS`, the indexes of its own GPUs among the visible ones.
    """
    coordinator = host_port(endpoints.coordinator)
    variables = {"HOPSGPU_COORDINATOR": coordinator, "JAX_COORDINATOR_ADDRESS": coordinator}
    if seen := visible_gpus(place, visible):
        indexes = ",".join(str(seen.index(gpu)) for gpu in place.gpus)
        variables["JAX_LOCAL_DEVICE_IDS"] = indexes
    return variables
