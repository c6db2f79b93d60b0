"""Every framework and strategy once as a launch on the real cluster; a number is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from pyspark.sql import SparkSession

from tests.cluster.test_launch import quiet
from tests.proxy import refusing_proxy


@pytest.fixture
def proxied() -> Iterator[dict[str, str]]:
    """`env_vars` that name a proxy for the outside, which no rank asks for another."""
    with refusing_proxy() as proxy:
        yield proxy.variables
        assert proxy.asked == []


def test_tensorflow_workers(
    spark: SparkSession,
    gpus_back: Callable[[], int],
    example: Callable[[str], ModuleType],
    proxied: dict[str, str],
) -> None:
    train = example("tensorflow_workers").train
    # All addresses, which gRPC does not understand.
    env_vars = {**proxied, "NO_PROXY": "*"}
    result = quiet(train, kwargs={"epochs": 10}, workers=2, visible="rank", env_vars=env_vars)
    for value in result.values:
        assert value["replicas"] == 2
        assert value["losses"][-1] < 1e-3 < value["losses"][0]
        assert value["weights"] == pytest.approx([1.0, -2.0, 3.0, 0.5], abs=1e-2)


def test_tensorflow_parameter_servers(
    spark: SparkSession, gpus_back: Callable[[], int], example: Callable[[str], ModuleType]
) -> None:
    train = example("tensorflow_parameter_servers").train
    result = quiet(
        train, kwargs={"steps": 100}, workers=3, parameter_servers=1, memory_per_worker="2g"
    )
    assert result.value["done"] == 100
    assert result.value["weights"] == pytest.approx([1.0, -2.0, 3.0], abs=0.1)
    assert result.values[1:] == (None, None)
    assert [(rank.rank, rank.role) for rank in result.ranks] == [
        (0, "worker"),
        (1, "worker"),
        (2, "worker"),
        (3, "ps"),
    ]
    assert [rank.stopped for rank in result.ranks] == [False, True, True, True]
    assert result.ranks[3].gpus == ()


def test_jax_processes(
    spark: SparkSession,
    gpus_back: Callable[[], int],
    example: Callable[[str], ModuleType],
    proxied: dict[str, str],
) -> None:
    train = example("jax_processes").train
    result = quiet(train, kwargs={"steps": 50}, workers=2, env_vars=proxied)
    assert result.value["losses"][-1] < 1e-3 < result.value["losses"][0]
