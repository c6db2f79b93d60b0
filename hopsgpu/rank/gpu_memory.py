"""Limit the frameworks in a rank to their share of the GPU's memory.

The frameworks enforce the limit themselves; it is no isolation. CUDA's context, some hundred MB,
comes on top, as does memory that they use outside their allocators. Tested on an H100 with
PyTorch and JAX, not with TensorFlow.
Sources:

- PyTorch's reference, "torch.cuda.set_per_process_memory_fraction". It initialises CUDA, so it is
  called when torch does that itself (`torch.cuda._lazy_call`, as `torch.manual_seed` does).
  The variable PYTORCH_CUDA_ALLOC_CONF also accepts a fraction, but older torch rejects it.
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
_JAX_TOO = "XLA_CLIENT_MEM_FRACTION"
_OWN = "JAX_LOCAL_DEVICE_IDS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def share_gpu() -> None:
    """Limit the frameworks of this process, a rank, to its share of the GPU, if it has one.

    Frameworks that are already imported are limited at once, others when they are imported.
    """
    if SHARE not in os.environ:
        return
    share = float(os.environ[SHARE])
    if _JAX_TOO not in os.environ:
        os.environ.setdefault(_JAX, str(share))
    tell = {
        "torch.cuda": functools.partial(_tell_torch, share=share),
        "tensorflow": functools.partial(_tell_tensorflow, share=share),
    }
    call_when_imported(tell)


def own_devices(environment: Mapping[str, str]) -> list[int]:
    """Return the numbers of the rank's own GPUs among those that it sees."""
    return [int(number) for number in environment.get(_OWN, "").split(",") if number]


def _tell_torch(cuda: Any, share: float) -> None:
    def tell() -> None:
        # For any other GPU that the rank sees, the call would allocate memory there.
        for device in own_devices(os.environ):
            cuda.set_per_process_memory_fraction(share, device)

    cuda._lazy_call(tell)


def _tell_tensorflow(tensorflow: Any, share: float) -> None:
    config = tensorflow.config
    devices = config.list_physical_devices("GPU")
    if not devices:
        return
    try:
        memory = _memory(os.environ.get(_VISIBLE, "").split(","))
        for number in own_devices(os.environ):
            limit = config.LogicalDeviceConfiguration(int(memory[number] * share) // MIB)
            config.set_logical_device_configuration(devices[number], [limit])
    except (ImportError, LookupError, ValueError, RuntimeError) as error:
        problem = f"TensorFlow's share ({share:g}) of the GPU's memory could not be set: {error!r}"
        print(f"hopsgpu: {problem}", file=sys.stderr)


def _memory(gpus: Sequence[str]) -> list[int]:
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
