"""How frameworks are held to the ranks of the gang; stand-ins, and torch's signature."""

from __future__ import annotations

import inspect
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.frameworks.world_checks import WorldChecks, _requested_size


def installed(name: str, **members: Any) -> Any:
    """A stand-in for a framework's module, with the checks in it."""
    module = ModuleType(name)
    vars(module).update(members)
    WorldChecks(world_size=4).by_module()[name](module)
    return module


class Connector:
    """The Trainer's arguments as Lightning resolves them."""

    def __init__(self, devices: Any = "auto", num_nodes: Any = 1, strategy: str = "auto") -> None:
        self.found = devices, num_nodes, strategy


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("lightning.pytorch.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
        ("pytorch_lightning.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
        ("lightning.fabric.connector", "_Connector"),
        ("lightning_fabric.connector", "_Connector"),
    ],
)
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (2, 2)),
        ({"devices": "auto", "num_nodes": 1}, (2, 2)),
        ({"devices": -1}, (2, 2)),
        ({"devices": "-1", "num_nodes": "1"}, (2, 2)),
        ({"devices": None}, (2, 2)),
        # Explicit values are Lightning's to check.
        ({"devices": 1}, (1, 1)),
        ({"devices": [0]}, ([0], 1)),
        ({"devices": "auto", "num_nodes": 3}, (2, 3)),
    ],
)
def test_lightnings_defaults_become_those_of_the_gang(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    member: str,
    given: dict[str, Any],
    found: tuple[Any, Any],
) -> None:
    monkeypatch.setenv("PL_TRAINER_DEVICES", "2")
    monkeypatch.setenv("PL_TRAINER_NUM_NODES", "2")
    kind = type("Own", (Connector,), {"__init__": Connector.__init__})
    connector = vars(installed(name, **{member: kind}))[member]
    assert connector(**given, strategy="ddp").found == (*found, "ddp")
    assert connector(*given.values()).found[2] == "auto"
    with pytest.raises(TypeError, match="wrong"):
        connector(wrong=1)


def test_a_trainer_of_one_device_may_test_but_not_train() -> None:
    class Trainer:
        world_size = 1

        def fit(self, model: str) -> str:
            return f"fits {model}"

        def test(self) -> str:
            return "tests"

    trainer = installed("lightning.pytorch.trainer.trainer", Trainer=Trainer).Trainer()
    assert trainer.test() == "tests"
    with pytest.raises(ConfigError, match="1 rank, .* 4: .*devices="):
        trainer.fit("net")
    trainer.world_size = 4
    assert trainer.fit(model="net") == "fits net"


def test_a_process_that_the_rank_forks_may_train_as_it_likes() -> None:
    class Fabric:
        world_size = 1

        def setup(self) -> int:
            return 3

        def setup_optimizers(self) -> int:
            return 4

    fabric = installed("lightning.fabric.fabric", Fabric=Fabric).Fabric()
    for method in (fabric.setup, fabric.setup_optimizers):
        with pytest.raises(ConfigError, match="Fabric .* 1 rank"):
            method()
    child = os.fork()
    if child == 0:
        os._exit(fabric.setup())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_accelerate_must_find_all_ranks() -> None:
    class PartialState:
        def __init__(self, cpu: bool = False) -> None:
            self.num_processes = 4 if cpu else 1

    state = installed("accelerate.state", PartialState=PartialState)
    assert state.PartialState(cpu=True).num_processes == 4
    with pytest.raises(ConfigError, match="accelerate .* 1 rank.*cpu=True"):
        state.PartialState()


def test_jax_must_find_all_ranks() -> None:
    begun = []

    def initialize(coordinator: str | None = None, num_processes: int | None = None) -> None:
        begun.append(num_processes)

    found = SimpleNamespace(num_processes=4)
    module = installed("jax._src.distributed", initialize=initialize, global_state=found)
    module.initialize("node:1", 4)
    for size in (1, 5):
        with pytest.raises(ConfigError, match=rf"jax.distributed .* {size} rank"):
            module.initialize(num_processes=size)
    assert begun == [4]
    # JAX may find the number elsewhere, as in Slurm's variables.
    found.num_processes = 2
    with pytest.raises(ConfigError, match="2 ranks"):
        module.initialize()


def test_another_version_of_a_framework_is_not_checked_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    installed("lightning.fabric.connector")
    assert "not checked" in caplog.text and "lightning.fabric.connector" in caplog.text


@pytest.mark.parametrize(
    ("args", "kwargs", "size"),
    [
        ((), {}, 7),
        (("gloo",), {"init_method": "env://"}, 7),
        (("gloo",), {"world_size": 3, "rank": 0}, 3),
        (("gloo", "tcp://node:1?rank=0&world_size=5"), {}, 5),
        (("gloo", "tcp://node:1"), {"world_size": 2}, 2),
        # Not known before the call.
        (("gloo", "file:///shared"), {}, None),
        (("gloo",), {"store": object()}, None),
        # torch itself refuses it.
        ((), {"wrong": 1}, 7),
    ],
)
def test_the_world_size_that_a_process_group_requests(
    monkeypatch: pytest.MonkeyPatch, args: Any, kwargs: Any, size: int | None
) -> None:
    import torch.distributed as dist

    monkeypatch.setenv("WORLD_SIZE", "7")
    signature = inspect.signature(dist.init_process_group)
    assert _requested_size(signature, args, kwargs) == size


@pytest.mark.parametrize(
    ("backend", "enabled", "is_refused"),
    [
        ("nccl", "", True),
        ("cpu:gloo,cuda:nccl", "0", True),
        ("nccl", "1", False),
        ("gloo", "", False),
        # torch's default, here without CUDA.
        (None, "", False),
    ],
)
def test_nccl_is_refused_on_mig_devices_of_one_gpu(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, enabled: str, is_refused: bool
) -> None:
    import torch

    calls = []

    def init_process_group(backend: str | None = None, world_size: int = -1) -> None:
        calls.append(backend)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", enabled)
    c10d = SimpleNamespace(
        __name__="c10d", init_process_group=init_process_group, get_world_size=lambda: 2
    )
    checks = WorldChecks(2, "ranks 0 and 1 have MIG devices of one GPU")
    checks.by_module()["torch.distributed.distributed_c10d"](c10d)
    if is_refused:
        with pytest.raises(ConfigError, match=r"ranks 0 and 1 have MIG devices"):
            c10d.init_process_group(backend)
    else:
        c10d.init_process_group(backend)
    assert calls == ([] if is_refused else [backend])
