"""JAX's environment for `jax.distributed.initialize`.

Source: jax/_src/distributed.py, which reads `JAX_COORDINATOR_ADDRESS` and
`JAX_LOCAL_DEVICE_IDS`; the number of processes and of this one are arguments.
"""

from __future__ import annotations

from hopsgpu.core.gang import RankPlace
from hopsgpu.frameworks.cuda import visible_gpus
from hopsgpu.frameworks.endpoints import Endpoints, host_port

VARIABLES = ("HOPSGPU_COORDINATOR", "JAX_COORDINATOR_ADDRESS", "JAX_LOCAL_DEVICE_IDS")


def environment(
    place: RankPlace, endpoints: Endpoints, visible: str | None = None
) -> dict[str, str]:
    """The variables of one worker.

    Returns:
        `HOPSGPU_COORDINATOR`, `host:port` at which rank 0 may listen, the same as
        `JAX_COORDINATOR_ADDRESS`, and, for a rank with GPUs, which of those that it sees are its
        own.
    """
    coordinator = host_port(endpoints.coordinator)
    variables = {"HOPSGPU_COORDINATOR": coordinator, "JAX_COORDINATOR_ADDRESS": coordinator}
    if seen := visible_gpus(place, visible):
        own = ",".join(str(seen.index(gpu)) for gpu in place.gpus)
        variables["JAX_LOCAL_DEVICE_IDS"] = own
    return variables
