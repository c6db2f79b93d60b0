"""A stand-in for NVML: what nvidia-ml-py's module tells of the GPUs in a JSON file.

STANDIN_GPUS names the file; see tests/unit/discovery_standins/__init__.py. It runs in every
Python that the discovery script runs in.
"""

import json
import os
import pathlib
import time
import types

_WORDS = {
    4: "Insufficient Permissions",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
}
_WORDS.update(
    {3: "Not Supported", 15: "GPU is lost", 16: "GPU requires restart", 999: "Unknown Error"}
)
_node = {}


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(_WORDS[value])
        self.value = value


def nvmlInit():
    _node.update(json.loads(pathlib.Path(os.environ["STANDIN_GPUS"]).read_text()))
    if _node.get("hangs"):
        time.sleep(600)
    if _node.get("crashes"):
        os.abort()
    if _node.get("nvml_error"):
        raise NVMLError(_node["nvml_error"])


def nvmlSystemGetDriverVersion():
    return _node["driver"]


def nvmlSystemGetProcessName(pid):
    names = {p["pid"]: p["name"] for gpu in _node["gpus"] for p in gpu.get("processes", [])}
    return names[pid].encode()  # as old versions give it


def nvmlDeviceGetCount():
    return len(_node["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    gpu = _node["gpus"][index]
    if gpu.get("handle_error"):
        raise NVMLError(gpu["handle_error"])
    return gpu


def _told(gpu, key):
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


def nvmlDeviceGetMemoryInfo(gpu):
    return types.SimpleNamespace(total=gpu["mib"] * 1024 * 1024)


def nvmlDeviceGetComputeRunningProcesses(gpu):
    return [types.SimpleNamespace(pid=p["pid"]) for p in _told(gpu, "processes")]


def nvmlDeviceGetMigMode(gpu):
    return [int(_told(gpu, "mig") is not None), 0]


def nvmlDeviceGetMaxMigDeviceCount(gpu):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(gpu, index):
    # with a gap, as there is after one of them was destroyed
    slices = [None, *gpu["mig"]]
    if index >= len(slices) or slices[index] is None:
        raise NVMLError(3)
    profile = slices[index]["profile"]
    return {"name": f"{gpu['name']} MIG {profile}" if profile else gpu["name"], **slices[index]}


def nvmlDeviceGetRemappedRows(gpu):
    return tuple(_told(gpu, "rows"))


def nvmlDeviceGetTotalEccErrors(gpu, kind, counter):
    assert kind == 1
    return _told(gpu, "ecc")[counter]


def nvmlDeviceGetCurrentClocksThrottleReasons(gpu):
    return _told(gpu, "clocks")


def nvmlDeviceGetRetiredPages(gpu, cause):
    return list(range(_told(gpu, "retired")[cause]))


def nvmlDeviceGetRetiredPagesPendingStatus(gpu):
    return _told(gpu, "retirement_pending")


def nvmlDeviceGetFieldValues(gpu, fields):
    assert fields == [230]
    if "recovery" not in gpu:
        return [types.SimpleNamespace(nvmlReturn=3)]
    value = types.SimpleNamespace(uiVal=gpu["recovery"])
    return [types.SimpleNamespace(nvmlReturn=0, value=value)]
