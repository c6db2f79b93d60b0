"""Every framework and strategy once as a launch on the real cluster; a number is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.launcher import arguments
from tests.cluster.test_launch import quiet
from tests.conftest import gpus_become
from tests.proxy import refusing_proxy

# Of each, tests/contract has ranks without a cluster.
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def gang(spark: SparkSession, manager: ClusterManager) -> Iterator[hopsgpu.Gang]:
    """Two ranks, each of which sees its own GPU; they are back once the tests have used them."""
    before = manager.gpus()[0]
    with pytest.MonkeyPatch.context() as patch:
        # It would be PyTorch, which none of them wants.
        patch.setattr(arguments, "likely_imports", tuple)
        held = hopsgpu.hold(workers=2, visible="rank", progress="off")
    with held:
        yield held
    assert gpus_become(manager, before), manager.gpus()


@pytest.fixture
def proxied() -> Iterator[dict[str, str]]:
    """`env_vars` that name a proxy for the outside, which no rank asks for another."""
    with refusing_proxy() as proxy:
        yield proxy.variables
        assert proxy.asked == []


def test_tensorflow_parameter_servers(
    spark: SparkSession, gpus_back: Callable[[], int], example: Callable[[str], ModuleType]
) -> None:
    train = example("tensorflow_parameter_servers").train
    result = quiet(
        train, kwargs={"steps": 100}, workers=2, parameter_servers=1, memory_per_worker="2g"
    )
    assert result.value["done"] == 100
    assert result.value["weights"] == pytest.approx([1.0, -2.0, 3.0], abs=0.1)
    assert result.values[1:] == (None,)
    assert [(rank.rank, rank.role) for rank in result.ranks] == [
        (0, "worker"),
        (1, "worker"),
        (2, "ps"),
    ]
    assert [rank.stopped for rank in result.ranks] == [False, True, True]
    assert result.ranks[2].gpus == ()


def test_tensorflow_workers(
    gang: hopsgpu.Gang, example: Callable[[str], ModuleType], proxied: dict[str, str]
) -> None:
    train = example("tensorflow_workers").train
    # All addresses, which gRPC does not understand.
    env_vars = {**proxied, "NO_PROXY": "*"}
    result = gang.launch(train, kwargs={"epochs": 10}, env_vars=env_vars, progress="off")
    for value in result.values:
        assert value["replicas"] == 2
        assert value["losses"][-1] < 1e-3 < value["losses"][0]
        assert value["weights"] == pytest.approx([1.0, -2.0, 3.0, 0.5], abs=1e-2)


def test_jax_processes(
    gang: hopsgpu.Gang, example: Callable[[str], ModuleType], proxied: dict[str, str]
) -> None:
    train = example("jax_processes").train
    result = gang.launch(train, kwargs={"steps": 50}, env_vars=proxied, progress="off")
    assert result.value["losses"][-1] < 1e-3 < result.value["losses"][0]
