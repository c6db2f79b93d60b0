"""What frameworks are told of a rank's share of a GPU: stand-ins, and torch as far as it goes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hopsgpu.rank.gpu_memory import own_devices, share_gpu

GIB = 2**30


class Cuda(ModuleType):
    """torch.cuda before CUDA is initialised."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.queued: list[Callable[[], None]] = []
        self.told: list[tuple[float, int]] = []

    def _lazy_call(self, call: Callable[[], None]) -> None:
        self.queued.append(call)

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:
        self.told.append((fraction, device))


class Config:
    """tf.config on a node with two GPUs."""

    LogicalDeviceConfiguration = staticmethod(lambda memory_limit: memory_limit)

    def __init__(self, *, initialised: bool = False) -> None:
        self.limits: dict[str, list[int]] = {}
        self._initialised = initialised

    def list_physical_devices(self, kind: str) -> list[str]:
        return [f"/physical_device:{kind}:{number}" for number in range(2)]

    def set_logical_device_configuration(self, device: str, limits: list[int]) -> None:
        if self._initialised:
            raise RuntimeError("Virtual devices cannot be modified after being initialized")
        self.limits[device] = limits


class Error(Exception):
    """NVML's."""


def nvml(known: dict[str, int]) -> ModuleType:
    """pynvml of a node with GPUs of so many bytes."""

    def handle(uuid: str) -> str:
        if uuid not in known:
            raise Error("Not Found")
        return uuid

    module = ModuleType("pynvml")
    vars(module).update(
        NVMLError=Error,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=known[handle]),
    )
    return module


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process with the second of two GPUs, and with no framework yet."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in ("torch", "torch.cuda", "tensorflow"):
        # Set first, so that what a test imports under this name is undone.
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)
    variables = {
        "HOPSGPU_MEMORY_SHARE": "0.25",
        "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1",
        "JAX_LOCAL_DEVICE_IDS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
            # Set first, for what is set meanwhile to be undone.
            patch.setenv(name, "")
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def test_torch_is_told_once_it_initialises_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    share_gpu()
    assert cuda.told == []
    for call in cuda.queued:
        call()
    assert cuda.told == [(0.25, 1)]


def test_tensorflow_is_told_how_much_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
    monkeypatch.setitem(sys.modules, "pynvml", nvml({"GPU-0": 16 * GIB, "GPU-1": 80 * GIB}))
    share_gpu()
    assert config.limits == {"/physical_device:GPU:1": [20 * 1024]}


@pytest.mark.parametrize(
    ("known", "initialised", "problem"),
    [
        ({"GPU-0": GIB}, False, "Not Found"),
        ({"GPU-0": GIB, "GPU-1": GIB}, True, "cannot be modified"),
    ],
)
def test_a_share_that_tensorflow_cannot_be_told_is_in_the_log(
    known: dict[str, int],
    initialised: bool,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Config(initialised=initialised)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
    monkeypatch.setitem(sys.modules, "pynvml", nvml(known))
    share_gpu()
    said = capsys.readouterr().err
    assert "TensorFlow's share (0.25)" in said and problem in said


def test_what_is_imported_later_is_told_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("from torch import cuda\n")
    (tmp_path / "torch/cuda.py").write_text("queued = []\n_lazy_call = queued.append\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    share_gpu()
    # To look for it is not to import it.
    assert importlib.util.find_spec("torch") is not None
    torch: Any = importlib.import_module("torch")
    assert torch.__file__ == str(tmp_path / "torch/__init__.py")
    assert len(torch.cuda.queued) == 1


def test_jax_finds_it_in_the_environment() -> None:
    share_gpu()
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.25"


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_what_jax_was_told_by_others_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, ".5")
    share_gpu()
    assert {n: v for n, v in os.environ.items() if n.startswith("XLA_")} == {name: ".5"}


def test_a_rank_with_the_whole_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, finders = Cuda(), [*sys.meta_path]
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    monkeypatch.delenv("HOPSGPU_MEMORY_SHARE")
    share_gpu()
    assert not cuda.queued and sys.meta_path == finders
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ


def test_own_devices() -> None:
    assert own_devices({"JAX_LOCAL_DEVICE_IDS": "2,3"}) == [2, 3]
    assert own_devices({}) == []
