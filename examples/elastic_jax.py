"""An elastic gang with JAX: one process per rank, two or three of them, data parallel.

`jax.distributed.initialize` is called once in a process, and each world has processes of its own:
so the mesh of a world is made from the devices that it has.

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/elastic_jax.py
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import hopsgpu

if TYPE_CHECKING:
    import jax

WORKERS = (2, 3)
BATCH = 96  # of all ranks together: a multiple of each number of ranks


def train(steps: int) -> dict[str, Any]:
    """Fit a plane; return its weights, and the number of processes that the last world had."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    ctx = hopsgpu.context()
    # JAX would handle SIGTERM, which ends a world: the ranks would only be killed, 5 s later.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=os.environ["HOPSGPU_COORDINATOR"],
        num_processes=ctx.world_size,
        process_id=ctx.rank,
    )
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())

    def loss_of(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ weights - x @ jnp.array([1.0, -2.0, 3.0])) ** 2)

    # The compiler sums over the ranks, because the batch is split and the weights are not.
    @jax.jit(out_shardings=whole)
    def run(weights: jax.Array, speed: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        loss, gradient = jax.value_and_grad(loss_of)(weights, x)
        speed = 0.9 * speed - 0.0002 * gradient
        return weights + speed, speed, loss

    first, weights, speed = 0, np.zeros(3, np.float32), np.zeros(3, np.float32)
    found = ctx.latest_checkpoint()
    if found is not None:
        with np.load(found) as state:
            first, weights, speed = int(state["step"]) + 1, state["weights"], state["speed"]
    weights, speed = (jax.device_put(array, whole) for array in (weights, speed))

    for step in range(first, steps):
        # The step determines the batch of the whole gang, of which each rank takes its part.
        x = np.random.default_rng(step).standard_normal((BATCH, 3), np.float32)
        own = np.split(x, ctx.world_size)[ctx.rank]
        batch = jax.make_array_from_process_local_data(split, own)
        weights, speed, loss = run(weights, speed, batch)
        # Every rank asks; one saves, because all have the same state.
        if (ctx.should_checkpoint(step) or step % 100 == 99) and ctx.rank == 0:
            np.savez("state.npz", step=step, weights=weights, speed=speed)
            ctx.save_checkpoint("state.npz", step)
        ctx.report(step, loss=float(loss))
    fitted = np.asarray(weights).tolist()
    jax.distributed.shutdown()
    return {"weights": fitted, "ranks": ctx.world_size}


def main() -> None:
    spark = hopsgpu.session("elastic-jax")
    # A process of JAX takes every GPU that it sees: show each rank only its own.
    result = hopsgpu.launch(train, kwargs={"steps": 1000}, workers=WORKERS, visible="rank")
    spark.stop()
    for world in result.worlds:
        print(f"world {world.generation}: {world.ranks} ranks, {world.end} {world.why}")
    print(f"plane {result.value['weights']}")


if __name__ == "__main__":
    main()
