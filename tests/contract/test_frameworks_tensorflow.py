"""TensorFlow's strategies: processes that find each other by TF_CONFIG. They run the examples."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.contract.framework_ranks import (
    EXAMPLES,
    local_gang,
    processes,
    result_of,
    results,
    stray,
)

PLANE = [1.0, -2.0, 3.0]
BATCH = 32


@pytest.mark.soak
def test_multi_worker_training_is_that_of_one_process() -> None:
    example = EXAMPLES / "tensorflow_workers.py"
    with ThreadPoolExecutor() as pool:
        alone = pool.submit(results, local_gang(1), example, "train", epochs=5)
        workers = results(local_gang(2), example, "train", epochs=5)
    (one,) = alone.result()
    assert one["replicas"] == 1
    assert one["losses"][-1] < 0.01 * one["losses"][0]
    for worker in workers:
        assert worker["replicas"] == 2
        assert worker["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert worker["weights"] == pytest.approx(one["weights"], abs=1e-5)


@pytest.mark.soak
def test_parameter_servers_train_until_the_chief_returns() -> None:
    gang = local_gang(3, servers=1)
    example = EXAMPLES / "tensorflow_parameter_servers.py"
    with processes(gang, example, "train", steps=100) as started:
        chief, *others = started.processes
        # A stray connection to any of the servers does no harm.
        for address in started.endpoints.servers:
            assert until(lambda at=address: stray(at))
        value = result_of(chief)
        assert value["done"] == 100
        assert value["weights"] == pytest.approx(PLANE, abs=0.1)
        # They never end by themselves, and SIGTERM ends them.
        assert [other.poll() for other in others] == [None] * 3
        for other in others:
            other.terminate()
        assert [other.wait(HANG_SECONDS) for other in others] == [-signal.SIGTERM] * 3


def mirrored(steps: int) -> dict[str, Any]:
    """Fits the plane on two logical devices, and then on one of them alone."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])
    x = tf.random.stateless_normal((4 * BATCH, 3), seed=(0, 1))
    y = tf.linalg.matvec(x, PLANE)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat().take(steps)

    def fit(strategy: tf.distribute.Strategy) -> dict[str, Any]:
        with strategy.scope():
            weights = tf.Variable(tf.zeros(3), aggregation=tf.VariableAggregation.SUM)
        seen = set()

        # Without annotations, which AutoGraph would evaluate.
        def step(x, y):  # type: ignore[no-untyped-def]
            with tf.GradientTape() as tape:
                # This device's share of the mean over the whole batch.
                loss = tf.reduce_sum((tf.linalg.matvec(x, weights) - y) ** 2) / BATCH
            weights.assign_sub(0.1 * tape.gradient(loss, weights))
            seen.add((loss.device, int(x.shape[0])))
            return loss

        losses = []
        for batch in strategy.experimental_distribute_dataset(batches):
            losses.append(float(strategy.reduce("sum", strategy.run(step, batch), axis=None)))
        return {"losses": losses, "weights": weights.numpy().tolist(), "seen": sorted(seen)}

    return {
        "both": fit(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])),
        "one": fit(tf.distribute.OneDeviceStrategy("CPU:0")),
    }


def test_mirrored_training_within_a_rank_is_that_of_one_device() -> None:
    (rank,) = results(local_gang(1), Path(__file__), "mirrored", steps=20)
    both, one = rank["both"], rank["one"]
    assert [(name[-5:], part) for name, part in both["seen"]] == [
        ("CPU:0", BATCH // 2),
        ("CPU:1", BATCH // 2),
    ]
    assert [part for _, part in one["seen"]] == [BATCH]
    assert one["losses"][-1] < 0.01 * one["losses"][0]
    assert both["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert both["weights"] == pytest.approx(one["weights"], abs=1e-5)
