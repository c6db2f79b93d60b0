"""Whether GPUs can be opened, by a stand-in for CUDA's driver library."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from hopsgpu.agent import gpu_access
from hopsgpu.agent.gpu_access import find_unopened, try_to_open, why_not
from hopsgpu.gpu.node.discovery_script import CONTAINER_GPUS


class Cuda:
    """The calls of libcuda that are used, all of them as old as UUIDs; one of them fails."""

    def __init__(self, failing: str = "", code: int = 0) -> None:
        self._failing, self._code = failing, code

    def _told(self, name: str) -> int:
        return self._code if name == self._failing else 0

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self._told("cuInit")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        assert ordinal == 0
        return self._told("cuDeviceGet")

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        return self._told("cuDevicePrimaryCtxRetain")

    def cuGetErrorName(self, code: int, name: Any) -> int:
        if code == 46:
            name._obj.value = b"CUDA_ERROR_DEVICE_UNAVAILABLE"
        return 0


def test_a_gpu_that_opens_has_no_reason() -> None:
    assert why_not(Cuda()) == ""


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_gpu_that_does_not_open(call: str) -> None:
    assert why_not(Cuda(call, 46)) == f"{call}: CUDA_ERROR_DEVICE_UNAVAILABLE"
    assert why_not(Cuda(call, 4711)) == f"{call}: error 4711"


def test_each_gpu_is_tried_in_a_process_of_its_own(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\n"
        'case "$CUDA_VISIBLE_DEVICES" in\n'
        "GPU-bad) echo cuInit: CUDA_ERROR_UNKNOWN ;;\n"
        "GPU-crash) kill -SEGV $$ ;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(gpu_access.sys, "executable", str(program))
    found = asyncio.run(find_unopened(["GPU-good", "GPU-bad", "GPU-crash"]))
    assert found == {
        "GPU-bad": "cuInit: CUDA_ERROR_UNKNOWN",
        "GPU-crash": "the process that opens it exited with code -11",
    }


def test_a_try_that_cannot_be_started_is_a_reason_and_no_end_of_the_agent(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_access.sys, "executable", str(tmp_path / "no-python"))
    found = asyncio.run(find_unopened(["GPU-1"]))
    assert found["GPU-1"].startswith("cannot start the process that opens it: [Errno 2]")


def test_simulated_gpus_are_not_tried(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [
        {
            "address": address,
            "name": name,
            "driver": "550",
            "state": "healthy",
            "reason": "",
            "parent": "",
        }
        for address, name in (("GPU-sim", "Simulated A100"), ("GPU-real", "NVIDIA A100"))
    ]
    (tmp_path / CONTAINER_GPUS).write_text(json.dumps({"gpus": gpus, "isolated": False}))
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho tried\n")
    program.chmod(0o755)
    monkeypatch.setattr(gpu_access.sys, "executable", str(program))
    assert asyncio.run(find_unopened([])) == {}
    assert asyncio.run(find_unopened(["GPU-sim", "GPU-real"])) == {"GPU-real": "tried"}


@pytest.mark.parametrize(
    ("libraries", "why"),
    [
        ({"libcuda.so.1": Cuda()}, ""),
        ({"libcuda.so.1": Cuda("cuInit", 46)}, "cuInit: CUDA_ERROR_DEVICE_UNAVAILABLE"),
        ({}, ""),
        (
            {"libnvidia-ml.so.1": object()},
            "this node has libnvidia-ml.so.1 but not CUDA's driver library: no libcuda.so.1",
        ),
    ],
)
def test_a_node_with_nvml_alone_cannot_open_its_gpus(libraries: dict[str, Any], why: str) -> None:
    def load(name: str) -> Any:
        if name not in libraries:
            raise OSError(f"no {name}")
        return libraries[name]

    assert try_to_open(load) == why


def test_the_try_is_a_program_that_says_what_comes_of_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "hopsgpu.agent.gpu_access"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-none"},
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert ran.stdout.strip() == try_to_open(ctypes.CDLL)
    else:
        assert ran.stdout.startswith("cu")
