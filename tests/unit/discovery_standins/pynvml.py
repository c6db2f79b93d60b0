"""A stand-in for NVML, the module of nvidia-ml-py, in every Python that a test starts.

STANDIN_GPUS names a JSON file with the GPUs of the discovery script: see
tests/unit/discovery_standins/__init__.py. While ranks run, every UUID is a GPU whose utilisation in
percent is in the file `utilisation` beside this module; "unknown" means not supported, as for a MIG
device.
"""

import json
import os
import pathlib
import time
import types

NVML_TEMPERATURE_GPU = 0
nvmlMemory_v2 = 2
nvmlEventTypeXidCriticalError = 8
_WORDS = {
    3: "Not Supported",
    4: "Insufficient Permissions",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    15: "GPU is lost",
    16: "GPU requires restart",
    999: "Unknown Error",
}
_node = {}


class NVMLError(Exception):
    value = 999

    def __init__(self, value=None):
        self.value = value or self.value
        super().__init__(_WORDS[self.value])


class NVMLError_NotSupported(NVMLError):
    value = 3


class NVMLError_FunctionNotFound(NVMLError):
    value = 13


class NVMLError_ArgumentVersionMismatch(NVMLError):
    value = 25


def nvmlInit():
    if "STANDIN_GPUS" in os.environ:
        _node.update(json.loads(pathlib.Path(os.environ["STANDIN_GPUS"]).read_text()))
    if _node.get("hangs"):
        time.sleep(600)
    if _node.get("crashes"):
        os.abort()
    if _node.get("nvml_error"):
        raise NVMLError(_node["nvml_error"])


def nvmlShutdown():
    pass


def nvmlEventSetCreate():
    raise NVMLError


def nvmlDeviceGetHandleByUUID(uuid):
    return uuid


def nvmlDeviceGetUtilizationRates(uuid):
    utilisation = pathlib.Path(__file__).with_name("utilisation").read_text()
    if utilisation == "unknown":
        raise NVMLError_NotSupported
    return types.SimpleNamespace(gpu=int(utilisation), memory=1)


def _not_supported(*arguments):
    raise NVMLError_NotSupported


nvmlDeviceGetPowerUsage = nvmlDeviceGetTemperature = _not_supported


def nvmlSystemGetDriverVersion():
    return _node["driver"]


def nvmlSystemGetProcessName(pid):
    names = {p["pid"]: p["name"] for gpu in _node["gpus"] for p in gpu.get("processes", [])}
    return names[pid].encode()  # as old versions of nvidia-ml-py do


def nvmlDeviceGetCount():
    return len(_node["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    gpu = _node["gpus"][index]
    if gpu.get("handle_error"):
        raise NVMLError(gpu["handle_error"])
    return gpu


def _reading(gpu, key):
    if gpu.get("error"):
        raise NVMLError(gpu["error"])
    if key not in gpu:
        raise NVMLError(3)
    return gpu[key]


def nvmlDeviceGetPciInfo(gpu):
    return types.SimpleNamespace(busId=gpu["bus"])


def nvmlDeviceGetUUID(gpu):
    if gpu.get("uuid_error"):
        raise NVMLError(gpu["uuid_error"])
    return gpu["uuid"]


def nvmlDeviceGetName(gpu):
    return gpu["name"]


def nvmlDeviceGetMemoryInfo(gpu, version=None):
    if version is not None:
        raise NVMLError_NotSupported
    return types.SimpleNamespace(total=gpu["mib"] * 1024 * 1024)


def nvmlDeviceGetComputeRunningProcesses(gpu):
    return [types.SimpleNamespace(pid=p["pid"]) for p in _reading(gpu, "processes")]


def nvmlDeviceGetMigMode(gpu):
    return [int(_reading(gpu, "mig") is not None), 0]


def nvmlDeviceGetMaxMigDeviceCount(gpu):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(gpu, index):
    # With a gap, as after the destruction of a MIG device.
    slices = [None, *gpu["mig"]]
    if index >= len(slices) or slices[index] is None:
        raise NVMLError(3)
    profile = slices[index]["profile"]
    return {"name": f"{gpu['name']} MIG {profile}" if profile else gpu["name"], **slices[index]}


def nvmlDeviceGetRemappedRows(gpu):
    return tuple(_reading(gpu, "rows"))


def nvmlDeviceGetTotalEccErrors(gpu, kind, counter):
    assert kind == 1
    return _reading(gpu, "ecc")[counter]


def nvmlDeviceGetCurrentClocksThrottleReasons(gpu):
    return _reading(gpu, "clocks")


def nvmlDeviceGetRetiredPages(gpu, cause):
    return list(range(_reading(gpu, "retired")[cause]))


def nvmlDeviceGetRetiredPagesPendingStatus(gpu):
    return _reading(gpu, "retirement_pending")


def nvmlDeviceGetFieldValues(gpu, fields):
    assert fields == [230]
    if "recovery" not in gpu:
        return [types.SimpleNamespace(nvmlReturn=3)]
    value = types.SimpleNamespace(uiVal=gpu["recovery"])
    return [types.SimpleNamespace(nvmlReturn=0, value=value)]
