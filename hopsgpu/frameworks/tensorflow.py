"""TensorFlow's environment variable, `TF_CONFIG`.

Source: `tf.distribute.cluster_resolver.TFConfigClusterResolver`, and the guides "Multi-worker
training with Keras" and "Parameter server training".
"""

from __future__ import annotations

import json

from hopsgpu.core.gang import PARAMETER_SERVER, RankPlacement, World
from hopsgpu.frameworks.endpoints import Endpoints, host_port

VARIABLES = ("TF_CONFIG",)


def environment(world: World, place: RankPlacement, endpoints: Endpoints) -> dict[str, str]:
    """Return `TF_CONFIG` for one process, worker or parameter server.

    Without parameter servers, all ranks are workers, as MultiWorkerMirroredStrategy expects. With
    parameter servers, rank 0 is the chief, which coordinates, and rank 1 is worker 0.
    """
    servers = [host_port(address) for address in endpoints.servers]
    workers, ps = servers[: world.size], servers[world.size :]
    cluster = {"worker": workers}
    task = "worker", place.rank
    if ps:
        cluster = {"chief": workers[:1], "worker": workers[1:], "ps": ps}
        task = ("chief", 0) if place.rank == 0 else ("worker", place.rank - 1)
    if place.role == PARAMETER_SERVER:
        task = "ps", place.rank - world.size
    kind, index = task
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(config)}
