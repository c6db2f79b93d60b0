"""Checks whether a process that has imported frameworks may fork ranks."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# The jemalloc of pyarrow restarts its thread in a child.
_HARMLESS = frozenset({"jemalloc_bg_thd"})
_CUDA_ERROR_NOT_INITIALIZED = 3
_BAD_FORK = 1


def why_unsafe(modules: Mapping[str, Any]) -> str | None:
    """Return why this process may not fork ranks, for people, or None if it may.

    The check forks once, at which some libraries (OpenBLAS) stop their threads until they need
    them. Any other thread would be missing in a rank.
    """
    bad_fork = _try_fork(modules)
    return (
        stray_threads(_threads())
        or cuda_use(modules, _devices(), is_driver_initialised=_is_driver_initialised())
        or bad_fork
    )


def may_import(name: str) -> bool:
    """Try the import of a module in a child, and return whether ranks may be forked after it."""
    child = os.fork()
    if child == 0:
        is_safe = False
        try:
            importlib.import_module(name)
            is_safe = why_unsafe(sys.modules) is None
        finally:
            os._exit(0 if is_safe else 1)
    _, status = os.waitpid(child, 0)
    return status == 0


def forget_devices(modules: Mapping[str, Any]) -> None:
    """Make torch count the GPUs again in each rank, whose CUDA_VISIBLE_DEVICES differs.

    Up to torch 2.3, a module that reads the number at its import makes the number final.
    """
    count = getattr(modules.get("torch.cuda"), "device_count", None)
    if (forget := getattr(count, "cache_clear", None)) is not None:
        forget()


def stray_threads(names: Iterable[str]) -> str | None:
    """Return which threads a fork would lose, for people."""
    stray = sorted(set(names) - _HARMLESS)
    return f"importing started threads ({', '.join(stray)})" if stray else None


def cuda_use(
    modules: Mapping[str, Any], devices: Iterable[str], *, is_driver_initialised: bool
) -> str | None:
    """Return how CUDA was touched, for people, so that a forked child cannot use it."""
    cuda = modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "torch has initialised CUDA"
    if is_driver_initialised:
        return "importing initialised the CUDA driver"
    opened = sorted(set(devices))
    return f"importing opened {', '.join(opened)}" if opened else None


def _try_fork(modules: Mapping[str, Any]) -> str | None:
    """Return why torch refuses CUDA in a forked child, or None."""
    cuda = modules.get("torch.cuda")
    child = os.fork()
    if child == 0:
        try:
            bad = cuda is not None and cuda._is_in_bad_fork()
        finally:
            os._exit(_BAD_FORK if bad else 0)
    _, status = os.waitpid(child, 0)
    if status == 0:
        return None
    if os.waitstatus_to_exitcode(status) == _BAD_FORK:
        return "torch has queried the GPUs"
    return f"a trial fork ended with status {status}"


def _threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            # The thread may have just ended.
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text().rstrip("\n"))
    return names


def _devices() -> list[str]:
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        # The descriptor through which this directory was read is closed by now.
        with contextlib.suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith("/dev/nvidia"):
                opened.append(target)
    return opened


def _is_driver_initialised() -> bool:
    """Return whether cuInit was called: only then does the driver count devices."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # not loaded
    status: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return status != _CUDA_ERROR_NOT_INITIALIZED
