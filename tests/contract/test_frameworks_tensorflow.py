"""TensorFlow's strategies: processes that find each other by TF_CONFIG. They run the examples."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import until
from tests.contract.framework_ranks import (
    EXAMPLES,
    SECONDS,
    local_gang,
    processes,
    result_of,
    results,
    stray,
)

PLANE = [1.0, -2.0, 3.0]


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


def test_parameter_servers_train_until_the_chief_returns() -> None:
    gang = local_gang(3, servers=1)
    example = EXAMPLES / "tensorflow_parameter_servers.py"
    with processes(gang, example, "train", steps=100) as started:
        chief, *others = started.processes
        # A stray connection to any of the servers does no harm.
        for address in started.endpoints.servers:
            assert until(lambda at=address: stray(at), SECONDS)
        value = result_of(chief)
        assert value["done"] == 100
        assert value["weights"] == pytest.approx(PLANE, abs=0.1)
        # They never end by themselves, and SIGTERM ends them.
        assert [other.poll() for other in others] == [None] * 3
        for other in others:
            other.terminate()
        assert [other.wait(10) for other in others] == [-signal.SIGTERM] * 3
