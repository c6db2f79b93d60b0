"""Whether GPUs can be opened, by a stand-in for CUDA's driver library."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import pytest

from hopsgpu.worker import opening
from hopsgpu.worker.opening import unopened, why_not


class Cuda:
    """The calls of libcuda that are used; one of them fails."""

    def __init__(self, failing: str = "", code: int = 0) -> None:
        self._failing, self._code = failing, code
        self.held = 0

    def _told(self, name: str) -> int:
        return self._code if name == self._failing else 0

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self._told("cuInit")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        assert ordinal == 0
        return self._told("cuDeviceGet")

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.held += 1
        return self._told("cuDevicePrimaryCtxRetain")

    def cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> int:
        self.held -= 1
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        if code == 46:
            name._obj.value = b"CUDA_ERROR_DEVICE_UNAVAILABLE"
        return 0


def test_a_gpu_that_opens_is_let_go() -> None:
    cuda = Cuda()
    assert why_not(cuda) == "" and cuda.held == 0


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
    monkeypatch.setattr(opening.sys, "executable", str(program))
    found = asyncio.run(unopened(["GPU-good", "GPU-bad", "GPU-crash"]))
    assert found == {
        "GPU-bad": "cuInit: CUDA_ERROR_UNKNOWN",
        "GPU-crash": "the try to open it ended with -11",
    }


def test_nothing_is_tried_without_gpus_or_without_a_driver() -> None:
    assert asyncio.run(unopened([])) == {}
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert asyncio.run(unopened(["GPU-simulated"])) == {}
    else:
        assert asyncio.run(unopened(["GPU-simulated"])).keys() == {"GPU-simulated"}
