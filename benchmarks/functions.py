"""The functions that the launchers run. Ranks import this module, so it imports nothing slow."""

from __future__ import annotations

from collections.abc import Sequence


def nothing() -> int:
    """Return at once."""
    return 1


def torch_all_reduce() -> float:
    """Return the sum of the ranks + 1, by gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    dist.destroy_process_group()
    return float(number)


def tensorflow_all_reduce() -> float:
    """Return the number of the ranks, by TensorFlow's collectives."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    summed = strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, tf.constant(1.0)
        )
    )
    return float(summed)


def first_line() -> float:
    """When the function's first line ran, in seconds since the epoch."""
    import time

    return time.time()


def trial(index: int, seconds: Sequence[float]) -> dict[str, float]:
    """Run a trial that takes as long as requested."""
    import time

    began = time.time()
    time.sleep(seconds[index])
    return {"loss": seconds[index], "began": began, "ended": time.time()}


def own_trial(first: int, seconds: Sequence[float]) -> dict[str, float]:
    """This rank's trial of a round."""
    import hopsgpu

    return trial(first + hopsgpu.context().rank, seconds)
