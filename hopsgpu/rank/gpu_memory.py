"""Limit the frameworks in a rank to their share of the GPU's memory.

The frameworks enforce the limit themselves; it is no isolation. CUDA's context, some hundred MB,
comes on top, as does memory that they use outside their allocators. Tested on an H100 with
PyTorch and JAX, not with TensorFlow.
Sources:

- PyTorch's reference, "torch.cuda.set_per_process_memory_fraction". The function initialises CUDA,
  so the call waits until torch initialises it (`torch.cuda._lazy_call`, as for
  `torch.manual_seed`). PYTORCH_CUDA_ALLOC_CONF also accepts a fraction, but not in older versions.
- TensorFlow's guide "Use a GPU", "Limiting GPU memory growth": a logical device of so many MB. It
  is set before GPUs are initialised, and with it TensorFlow refuses `set_memory_growth`. Before
  that, only NVML can tell how much memory a GPU has.
- JAX's page "GPU memory allocation": XLA_PYTHON_CLIENT_MEM_FRACTION, which newer releases call
  XLA_CLIENT_MEM_FRACTION. Setting both is an error.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hopsgpu.frameworks.gpu_memory_share import SHARE
from hopsgpu.rank.import_hook import call_when_imported
from hopsgpu.units import MIB

_JAX = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NEW_JAX = "XLA_CLIENT_MEM_FRACTION"
_LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def share_gpu() -> None:
    """Limit the frameworks of this rank, now or at their import, if the rank shares its GPU."""
    if SHARE not in os.environ:
        return
    share = float(os.environ[SHARE])
    if _NEW_JAX not in os.environ:
        os.environ.setdefault(_JAX, str(share))
    limits = {
        "torch.cuda": functools.partial(_limit_torch, share=share),
        "tensorflow": functools.partial(_limit_tensorflow, share=share),
    }
    call_when_imported(limits)


def own_devices(environment: Mapping[str, str]) -> list[int]:
    """Return the indices of the rank's own GPUs among the visible ones."""
    return [int(number) for number in environment.get(_LOCAL_DEVICES, "").split(",") if number]


def _limit_torch(cuda: Any, share: float) -> None:
    def limit() -> None:
        # Only for own GPUs: for any other visible GPU, the call would allocate memory there.
        for device in own_devices(os.environ):
            cuda.set_per_process_memory_fraction(share, device)

    cuda._lazy_call(limit)


def _limit_tensorflow(tensorflow: Any, share: float) -> None:
    config = tensorflow.config
    devices = config.list_physical_devices("GPU")
    if not devices:
        return
    try:
        memory = _memory_sizes(os.environ.get(_VISIBLE, "").split(","))
        for number in own_devices(os.environ):
            limit = config.LogicalDeviceConfiguration(int(memory[number] * share) // MIB)
            config.set_logical_device_configuration(devices[number], [limit])
    except (ImportError, LookupError, ValueError, RuntimeError) as error:
        problem = f"TensorFlow's share ({share:g}) of the GPU's memory could not be set: {error!r}"
        print(f"hopsgpu: {problem}", file=sys.stderr)


def _memory_sizes(gpus: Sequence[str]) -> list[int]:
    """Return the bytes of each GPU's memory.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        RuntimeError: NVML fails.
    """
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            handles = map(nvml.nvmlDeviceGetHandleByUUID, gpus)
            return [int(nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise RuntimeError(str(error)) from error
