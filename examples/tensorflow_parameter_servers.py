"""TensorFlow's ParameterServerStrategy on a gang.

Rank 0 is the chief: it hands out the steps. The other ranks compute them, in no order, on
variables that the parameter servers keep; these run without GPU beside the ranks. When the chief
returns, all others are stopped.

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/tensorflow_parameter_servers.py
"""

from __future__ import annotations

from typing import Any

import hopsgpu

WORKERS = 3
PARAMETER_SERVERS = 1
BATCH = 32


def train(steps: int) -> dict[str, Any]:
    """Fit a plane; the chief's return value is the result."""
    import tensorflow as tf

    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.task_type != "chief":
        server = tf.distribute.Server(
            cluster.cluster_spec(), job_name=cluster.task_type, task_index=cluster.task_id
        )
        server.join()  # until the chief has returned

    strategy = tf.distribute.ParameterServerStrategy(cluster)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = tf.Variable(tf.zeros(3))
        done = tf.Variable(0)

    @tf.function
    def step(number):  # type: ignore[no-untyped-def] # AutoGraph would evaluate annotations
        x = tf.random.stateless_normal((BATCH, 3), seed=(0, number))
        y = tf.linalg.matvec(x, [1.0, -2.0, 3.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
        weights.assign_sub(0.05 * tape.gradient(loss, weights))
        done.assign_add(1)
        return loss

    losses = [coordinator.schedule(step, args=(tf.constant(n),)) for n in range(steps)]
    coordinator.join()
    return {
        "losses": [float(loss.fetch()) for loss in losses],
        "weights": weights.numpy().tolist(),
        "done": int(done.numpy()),
    }


def main() -> None:
    spark = hopsgpu.session("tensorflow-parameter-servers")
    result = hopsgpu.launch(
        train,
        kwargs={"steps": 200},
        workers=WORKERS,
        parameter_servers=PARAMETER_SERVERS,
        memory_per_worker="2g",  # of a parameter server too
        visible="rank",
    )
    spark.stop()
    print(f"{result.value['done']} steps, loss {result.value['losses'][-1]:.4f}")
    print(f"plane {result.value['weights']}")


if __name__ == "__main__":
    main()
