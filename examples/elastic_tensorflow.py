"""An elastic gang with TensorFlow's MultiWorkerMirroredStrategy, of two or three workers.

The strategy has a fixed number of workers. So each world makes its own from TF_CONFIG, which
hopsgpu sets anew, and continues from the latest checkpoint.

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/elastic_tensorflow.py
"""

from __future__ import annotations

import signal
from typing import Any

import hopsgpu

WORKERS = (2, 3)
BATCH = 96  # of all ranks together: a multiple of each number of ranks


def train(steps: int) -> dict[str, Any]:
    """Fit a plane; return its weights, and the number of replicas that the last world had."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # The strategy handles SIGTERM, which ends a world: the ranks would only be killed, 5 s later.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctx = hopsgpu.context()
    with strategy.scope():
        # What the workers subtract is summed over them.
        weights = tf.Variable(tf.zeros(3), aggregation=tf.VariableAggregation.SUM)
    done = tf.Variable(0)
    state = tf.train.Checkpoint(weights=weights, done=done)
    found = ctx.latest_checkpoint()
    if found is not None:
        state.read(str(found / "state")).assert_consumed()

    # Without annotations, which AutoGraph would evaluate.
    def step_of(x):  # type: ignore[no-untyped-def]
        with tf.GradientTape() as tape:
            errors = tf.linalg.matvec(x, weights) - tf.linalg.matvec(x, [1.0, -2.0, 3.0])
            # This worker's share of the mean over the whole batch.
            loss = tf.reduce_sum(errors**2) / BATCH
        weights.assign_sub(0.002 * tape.gradient(loss, weights))
        return loss

    @tf.function
    def run(x):  # type: ignore[no-untyped-def]
        return strategy.reduce("sum", strategy.run(step_of, (x,)), axis=None)

    for step in range(int(done), steps):
        # The step determines the batch of the whole gang, of which each rank takes its part.
        x = tf.random.stateless_normal((BATCH, 3), seed=(0, step))
        loss = run(tf.split(x, ctx.world_size)[ctx.rank])
        if ctx.should_checkpoint(step) or step % 100 == 99:
            done.assign(step + 1)
            # The strategy wants every worker to write; one copy is enough on the lake.
            state.write("checkpoint/state")
            if ctx.rank == 0:
                ctx.save_checkpoint("checkpoint", step)
        ctx.report(step, loss=loss.numpy())
    return {"weights": weights.numpy().tolist(), "replicas": strategy.num_replicas_in_sync}


def main() -> None:
    spark = hopsgpu.session("elastic-tensorflow")
    # TensorFlow takes every GPU that it sees: show each rank only its own.
    result = hopsgpu.launch(train, kwargs={"steps": 1000}, workers=WORKERS, visible="rank")
    spark.stop()
    for world in result.worlds:
        print(f"world {world.generation}: {world.ranks} ranks, {world.end} {world.why}")
    print(f"plane {result.value['weights']}")


if __name__ == "__main__":
    main()
