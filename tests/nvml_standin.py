"""A stand-in for NVIDIA's `pynvml`, for GPUs of which only the utilisation matters.

It knows every UUID. Their utilisation in percent is the content of the file `utilisation` beside
it; where that is "unknown", it is not supported, as that of a MIG device.
"""

from __future__ import annotations

from pathlib import Path

_MODULE = """
import pathlib
from types import SimpleNamespace

NVML_TEMPERATURE_GPU = 0
nvmlMemory_v2 = 2
nvmlEventTypeXidCriticalError = 8

class NVMLError(Exception):
    value = 999

class NVMLError_NotSupported(NVMLError):
    value = 3

class NVMLError_FunctionNotFound(NVMLError):
    value = 13

class NVMLError_ArgumentVersionMismatch(NVMLError):
    value = 25

def nvmlInit():
    pass

def nvmlShutdown():
    pass

def nvmlEventSetCreate():
    raise NVMLError("no events")

def nvmlDeviceGetHandleByUUID(uuid):
    return uuid

def nvmlDeviceGetUtilizationRates(handle):
    told = pathlib.Path(__file__).with_name("utilisation").read_text()
    if told == "unknown":
        raise NVMLError_NotSupported("Not Supported")
    return SimpleNamespace(gpu=int(told), memory=1)

def _not_supported(*arguments, **options):
    raise NVMLError_NotSupported("Not Supported")

nvmlDeviceGetMemoryInfo = nvmlDeviceGetPowerUsage = nvmlDeviceGetTemperature = _not_supported
"""


def install(directory: Path, utilisation: str = "80") -> Path:
    """Write the stand-in into a directory for the front of PYTHONPATH; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "pynvml.py").write_text(_MODULE)
    tell(directory, utilisation)
    return directory


def tell(directory: Path, utilisation: str) -> None:
    """Set what it tells of all GPUs from now on: percent, or "unknown"."""
    draft = directory / "draft"
    draft.write_text(utilisation)
    # Readers find the old text or the new one.
    draft.rename(directory / "utilisation")
