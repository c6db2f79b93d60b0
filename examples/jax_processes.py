"""JAX on a gang: one process per rank, data parallel with an explicit psum.

Rank 0 listens at HOPSGPU_COORDINATOR, a port that is held for it.

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/jax_processes.py
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import hopsgpu

if TYPE_CHECKING:
    import jax

WORKERS = 2
BATCH = 32


def train(steps: int) -> dict[str, Any]:
    """Fit a plane; every rank computes on its part of each batch."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    jax.distributed.initialize(
        coordinator_address=os.environ["HOPSGPU_COORDINATOR"],
        num_processes=int(os.environ["WORLD_SIZE"]),
        process_id=int(os.environ["RANK"]),
    )
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split, whole = PartitionSpec("data"), PartitionSpec()

    def loss_of(weights: jax.Array, x: jax.Array) -> jax.Array:
        # This rank's share of the mean over the whole batch.
        return jnp.sum((x @ weights - x @ jnp.array([1.0, -2.0, 3.0])) ** 2) / BATCH

    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(weights, x)
        loss, gradient = jax.lax.psum((loss, gradient), "data")
        return weights - 0.1 * gradient, loss

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(whole, split),
            out_specs=(whole, whole),
            # Gradients are summed by the psum above, not by the differentiation.
            check_vma=False,
        )
    )
    weights = jnp.zeros(3)
    losses = []
    for number in range(steps):
        x = jax.random.normal(jax.random.key(number), (BATCH, 3))
        part = BATCH // jax.process_count()
        own = x[jax.process_index() * part :][:part]
        batch = jax.make_array_from_process_local_data(NamedSharding(mesh, split), own)
        weights, loss = run(weights, batch)
        losses.append(float(loss))
    fitted = weights.tolist()
    jax.distributed.shutdown()
    return {"losses": losses, "weights": fitted}


def main() -> None:
    spark = hopsgpu.session("jax-processes")
    result = hopsgpu.launch(train, kwargs={"steps": 50}, workers=WORKERS)
    spark.stop()
    print(f"loss {result.value['losses'][0]:.4f} -> {result.value['losses'][-1]:.4f}")
    print(f"plane {result.value['weights']}")


if __name__ == "__main__":
    main()
