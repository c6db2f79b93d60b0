"""Ranks whose frameworks would train with other ranks than all of the gang end with an error."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.core.rank_warnings import read_warnings
from tests.contract.framework_ranks import error_of, local_gang, processes, results

FILE = Path(__file__)
MEANT = "If each rank should train by itself, pass independent_ranks=True to launch()"


def run(function: str, **kwargs: Any) -> list[Any]:
    return results(local_gang(1, 2), FILE, function, is_checked=True, **kwargs)


def error(function: str, **kwargs: Any) -> str:
    """How rank 0 fails, which needs no other."""
    world = local_gang(1, 2)
    with processes(world, FILE, function, is_checked=True, **kwargs) as started:
        return error_of(started.processes[0])


def group(imported: bool = False, **options: Any) -> int:
    if imported:
        from torch.distributed import init_process_group
    else:
        import torch.distributed

        init_process_group = torch.distributed.init_process_group
    init_process_group("gloo", **options)
    import torch.distributed as dist

    size = dist.get_world_size()
    dist.new_group([dist.get_rank()])
    dist.destroy_process_group()
    return size


@pytest.mark.parametrize("imported", [False, True])
def test_torch_joins_all_ranks(imported: bool) -> None:
    assert run("group", imported=imported) == [2, 2]


@pytest.mark.parametrize("size", [1, 3])
def test_torch_must_not_join_other_ranks(size: int) -> None:
    said = error("group", world_size=size, rank=0)
    assert f"torch.distributed would train with {size} rank" in said
    assert "but the gang has 2" in said and said.endswith(MEANT)


def fit(steps: int, join: bool) -> list[str]:
    import torch

    if join:
        torch.distributed.init_process_group("gloo")
    layer = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 3))
    for _ in range(steps):
        for (rows,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1):
            layer(rows).sum().backward()
            optimizer.step()
    return read_warnings(Path(os.environ["HOPSGPU_CONTEXT"]).parent)


def test_ranks_that_train_by_themselves_with_torch_are_a_warning() -> None:
    for warnings in run("fit", steps=2, join=False):
        (warning,) = warnings
        assert warning.startswith("each rank trains by itself: an optimizer of torch made a step")
    assert run("fit", steps=2, join=True) == [[], []]
    assert run("fit", steps=0, join=False) == [[], []]


def jitted() -> float:
    import jax
    import jax.numpy as jnp

    return float(jax.jit(jnp.sum)(jnp.ones(3)))


def test_jax_without_other_ranks_is_no_error() -> None:
    assert run("jitted") == [3.0, 3.0]


def gradients_of_jax(joins: bool, imported: bool) -> list[str]:
    import jax
    import jax.numpy as jnp

    grad = jax.grad(lambda x: jnp.sum(x**2))  # made before the ranks are connected
    if joins:
        connect_jax(2)
    if imported:
        from jax import value_and_grad

        assert value_and_grad(lambda x: x**2)(3.0)[1] == 6.0
    assert jax.jit(grad)(jnp.ones(2)).tolist() == [2.0, 2.0]
    return read_warnings(Path(os.environ["HOPSGPU_CONTEXT"]).parent)


@pytest.mark.parametrize("imported", [False, True])
def test_gradients_of_jax_in_ranks_that_are_not_connected_are_a_warning(imported: bool) -> None:
    for (warning,) in run("gradients_of_jax", joins=False, imported=imported):
        assert warning.startswith("each rank trains by itself: JAX computed a gradient")
    assert run("gradients_of_jax", joins=True, imported=imported) == [[], []]


def gradients_of_tensorflow(joins: bool) -> list[str]:
    import tensorflow as tf

    several = tf.distribute.MultiWorkerMirroredStrategy
    strategy = several() if joins else tf.distribute.get_strategy()
    with strategy.scope():
        variable = tf.Variable(2.0)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = variable * variable
        return tape.gradient(loss, variable)

    strategy.run(tf.function(step))
    return read_warnings(Path(os.environ["HOPSGPU_CONTEXT"]).parent)


def test_gradients_of_tensorflow_in_ranks_that_are_not_connected_are_a_warning() -> None:
    for (warning,) in run("gradients_of_tensorflow", joins=False):
        assert warning.startswith("each rank trains by itself: TensorFlow computed a gradient")
    assert run("gradients_of_tensorflow", joins=True) == [[], []]


def connect_jax(size: int) -> int:
    import jax

    jax.distributed.initialize(os.environ["HOPSGPU_COORDINATOR"], size, int(os.environ["RANK"]))
    return jax.process_count()


def test_jax_joins_all_ranks() -> None:
    assert run("connect_jax", size=2) == [2, 2]
    assert "jax.distributed would train with 1 rank" in error("connect_jax", size=1)


def fit_keras(backend: str, joins: bool = False) -> float:
    os.environ["KERAS_BACKEND"] = backend
    if joins and backend == "jax":
        connect_jax(2)
    elif joins:
        import torch

        torch.distributed.init_process_group("gloo")
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    if joins and backend == "jax":
        shared = keras.distribution.DataParallel(auto_shard_dataset=False)
        keras.distribution.set_distribution(shared)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    return float(np.asarray(model.layers[0].kernel).sum())


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_keras_must_not_train_in_each_rank(backend: str) -> None:
    said = error("fit_keras", backend=backend)
    assert f"Keras on {backend} would train with 1 rank, but the gang has 2" in said
    assert said.endswith(MEANT)


def test_keras_trains_with_all_ranks_of_jax() -> None:
    first, second = run("fit_keras", backend="jax", joins=True)
    assert first == second


def test_a_process_group_alone_does_not_make_keras_exchange_gradients() -> None:
    world = local_gang(1, 2)
    with processes(
        world, FILE, "fit_keras", is_checked=True, backend="torch", joins=True
    ) as started:
        for process in started.processes:
            assert "Keras on torch would train with 1 rank" in error_of(process)


def train_lightning(package: str, **options: Any) -> tuple[int, float]:
    import importlib

    import torch

    lightning = importlib.import_module(package)
    logging.getLogger(package).setLevel(logging.ERROR)

    class Plane(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(int(os.environ["RANK"]))
    rows = torch.utils.data.DataLoader(torch.randn(16, 3), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = Plane()
    trainer.fit(model, rows)
    return trainer.world_size, model.layer.weight.sum().item()


@pytest.mark.soak
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("containers", [1, 2])
def test_lightnings_cli_trains_as_one_world(package: str, containers: int) -> None:
    """LightningCLI passes all arguments of the Trainer, also those that nobody gave."""
    first, second = results(
        local_gang(containers, 2 // containers),
        FILE,
        "train_lightning",
        is_checked=True,
        package=package,
        devices="auto",
        num_nodes=1,
    )
    assert first == second and first[0] == 2


@pytest.mark.soak
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_lightning_must_not_train_in_each_rank(package: str) -> None:
    said = error("train_lightning", package=package, devices=1, num_nodes=1)
    assert "Lightning's Trainer would train with 1 rank, but the gang has 2" in said
    assert said.endswith(MEANT)


def set_up_fabric(**options: Any) -> int:
    import lightning
    import torch

    fabric = lightning.Fabric(accelerator="cpu", **options)
    fabric.launch()
    layer = torch.nn.Linear(3, 1)
    fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    return int(fabric.world_size)


@pytest.mark.soak
def test_fabric_trains_as_one_world() -> None:
    assert run("set_up_fabric") == [2, 2]
    said = error("set_up_fabric", devices=1, num_nodes=1)
    assert "Lightning's Fabric would train with 1 rank" in said


def accelerated(**options: Any) -> int:
    from accelerate import PartialState

    return int(PartialState(**options).num_processes)


@pytest.mark.soak
def test_accelerate_must_find_all_ranks() -> None:
    assert run("accelerated", cpu=True) == [2, 2]
    assert "accelerate would train with 1 rank" in error("accelerated")
