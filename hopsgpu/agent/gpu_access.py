"""A check that a container's processes can open its GPUs, as CUDA will, before any rank starts.

`python -m hopsgpu.agent.gpu_access` prints why the GPU in CUDA_VISIBLE_DEVICES cannot be opened, or
nothing. The check has its own process, because CUDA keeps a GPU open and may hang.

Source: the CUDA Driver API reference, "Initialization", "Device Management" and "Primary Context
Management".
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hopsgpu.agent.rank_environment import package_path
from hopsgpu.gpu.container_gpus import read_container_gpus

_CUDA, _NVML = "libcuda.so.1", "libnvidia-ml.so.1"
# Without persistence mode, the driver initialises the GPU at each open.
_TIMEOUT_SECONDS = 60.0
_SUCCESS = 0


async def find_unopened(gpus: Sequence[str]) -> dict[str, str]:
    """Return why GPUs cannot be opened, by UUID. Simulated GPUs are not checked."""
    simulated = read_container_gpus().simulated_addresses
    real = [gpu for gpu in gpus if gpu not in simulated]
    reasons = await asyncio.gather(*map(_check_gpu, real))
    return {gpu: why for gpu, why in zip(real, reasons, strict=True) if why}


async def _check_gpu(gpu: str) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            __name__,
            env={
                **os.environ,
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "CUDA_VISIBLE_DEVICES": gpu,
                "PYTHONPATH": package_path(),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        return f"cannot start the process that opens it: {error}"
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        return f"the driver did not answer within {_TIMEOUT_SECONDS:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        return f"the process that opens it exited with code {process.returncode}"
    return output.decode(errors="replace").strip()


def why_not(cuda: Any) -> str:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls = (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
    )
    for name, arguments in calls:
        code = getattr(cuda, name)(*arguments)
        if code != _SUCCESS:
            return f"{name}: {_error(cuda, code)}"
    # The exit releases the context: the call for that has another name before CUDA 11.
    return ""


def _error(cuda: Any, code: int) -> str:
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"").decode() or f"error {code}"


def try_to_open(load: Callable[[str], Any]) -> str:
    """Return why the one visible GPU cannot be opened; "" if it can, or the driver is not found.

    The ranks' own variables may name the directory of the driver's libraries.
    """
    try:
        return why_not(load(_CUDA))
    except OSError as error:
        problem = str(error)
    try:
        load(_NVML)
    except OSError:
        return ""
    return f"this node has {_NVML} but not CUDA's driver library: {problem}"


if __name__ == "__main__":
    print(try_to_open(ctypes.CDLL))
