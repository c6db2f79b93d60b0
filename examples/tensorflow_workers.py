"""TensorFlow's MultiWorkerMirroredStrategy on a gang: every worker takes a part of each batch.

The steps are written out: `fit` of Keras 3 does not support this strategy with several workers.

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/tensorflow_workers.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hopsgpu

if TYPE_CHECKING:
    import tensorflow as tf

WORKERS = 2
BATCH = 32


def batches() -> tf.data.Dataset:
    """Return four batches of points on a plane, the same in every worker."""
    import tensorflow as tf

    x = tf.random.stateless_normal((4 * BATCH, 3), seed=(0, 1))
    y = tf.linalg.matvec(x, [1.0, -2.0, 3.0]) + 0.5
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def train(epochs: int) -> dict[str, Any]:
    """Fit the plane. All that the strategy needs is in TF_CONFIG, which hopsgpu sets."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        # What the workers subtract is summed over them.
        summed = tf.VariableAggregation.SUM
        weights = tf.Variable(tf.zeros(3), aggregation=summed)
        bias = tf.Variable(0.0, aggregation=summed)

    # Without annotations, which AutoGraph would evaluate.
    def step(x, y):  # type: ignore[no-untyped-def]
        with tf.GradientTape() as tape:
            errors = tf.linalg.matvec(x, weights) + bias - y
            # This worker's share of the mean over the whole batch.
            loss = tf.reduce_sum(errors**2) / BATCH
        for variable, gradient in zip(
            (weights, bias), tape.gradient(loss, (weights, bias)), strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        return loss

    @tf.function
    def run(x, y):  # type: ignore[no-untyped-def]
        return strategy.reduce("sum", strategy.run(step, (x, y)), axis=None)

    dataset = strategy.experimental_distribute_dataset(batches())
    losses = [float(run(x, y)) for _ in range(epochs) for x, y in dataset]
    return {
        "losses": losses,
        "weights": [*weights.numpy().tolist(), float(bias.numpy())],
        "replicas": strategy.num_replicas_in_sync,
    }


def main() -> None:
    spark = hopsgpu.session("tensorflow-workers")
    # TensorFlow takes every GPU that it sees: show each rank only its own.
    result = hopsgpu.launch(train, kwargs={"epochs": 10}, workers=WORKERS, visible="rank")
    spark.stop()
    print(f"loss {result.value['losses'][0]:.4f} -> {result.value['losses'][-1]:.4f}")
    print(f"plane {result.value['weights']}")


if __name__ == "__main__":
    main()
