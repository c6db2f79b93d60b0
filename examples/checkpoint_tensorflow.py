"""A training that is killed and resumes: tf.train.Checkpoint on a gang.

eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
python examples/checkpoint_tensorflow.py
"""

from __future__ import annotations

import os
import signal

import hopsgpu

STEPS = 6


def train(steps: int, die_at: int | None = None) -> float:
    """Return the loss after some steps; if `die_at` is given, the first attempt is killed there."""
    import tensorflow as tf

    ctx = hopsgpu.context()
    weights, momentum = tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros(3))
    done = tf.Variable(0)
    state = tf.train.Checkpoint(weights=weights, momentum=momentum, done=done)
    found = ctx.latest_checkpoint()
    if found is not None:
        state.read(str(found / "state")).assert_consumed()
        print(f"resumes at step {int(done)}")

    loss = 0.0
    for step in range(int(done), steps):
        if step == die_at and ctx.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        x = tf.random.stateless_normal((32, 3), seed=(0, step))
        with tf.GradientTape() as tape:
            errors = tf.linalg.matvec(x, weights) - tf.linalg.matvec(x, [1.0, -2.0, 3.0])
            squares = tf.reduce_mean(errors**2)
        momentum.assign(0.9 * momentum + tape.gradient(squares, weights))
        weights.assign_sub(0.05 * momentum)
        done.assign(step + 1)
        loss = float(squares)
        # Several files of one prefix: saved as the directory that they are in.
        state.write("checkpoint/state")
        ctx.save_checkpoint("checkpoint", step, keep=2, metric=loss)
    return loss


def main() -> None:
    spark = hopsgpu.session("checkpoint-tensorflow")
    whole = hopsgpu.launch(train, args=(STEPS,), gpus_per_worker=0)
    # Killed at step 4; the next attempt resumes.
    killed = hopsgpu.launch(train, args=(STEPS, 4), gpus_per_worker=0, retries=1)
    # Half of the steps; a later launch does the rest.
    half = hopsgpu.launch(train, args=(STEPS // 2,), gpus_per_worker=0)
    resumed = hopsgpu.launch(train, args=(STEPS,), gpus_per_worker=0, resume=half.run_id)
    spark.stop()
    print(f"loss {whole.value:.6f}, killed {killed.value:.6f}, resumed {resumed.value:.6f}")


if __name__ == "__main__":
    main()
