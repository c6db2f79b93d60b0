"""Events that the driver reports of GPUs while ranks run on them: XIDs, and failed GPUs.

Source of the calls: the NVML API reference, "Event Handling Methods".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hopsgpu.gpu.node.health import BAD, judge_xid
from hopsgpu.gpu.node.nvml import as_text


@dataclass(frozen=True)
class GpuEvent:
    """An event of a GPU; `state` is one of `hopsgpu.gpu.node.health.STATES` after the event."""

    gpu: str
    state: str
    reason: str

    def fields(self) -> dict[str, str]:
        return asdict(self)

    @property
    def is_fatal(self) -> bool:
        return self.state == BAD


def failure_event(gpu: str, problem: str) -> GpuEvent:
    """Return the event of a GPU that NVML reports, in words, as lost or as to be reset."""
    advice = "nvidia-smi --gpu-reset, or reboot the node if it is lost"
    return GpuEvent(gpu, BAD, f"the driver can no longer use it ({problem}): {advice}")


@contextlib.contextmanager
def xid_events(nvml: Any, handles: Mapping[str, Any]) -> Iterator[Callable[[], list[GpuEvent]]]:
    """Yield a function that returns the XID events since its last call.

    GPUs whose driver reports no events (vGPU, WSL) have none. An event of a GPU that is used as
    MIG devices counts for each of these devices.

    Args:
        nvml: the module pynvml, initialised.
        handles: NVML's handles of the GPUs, by address.

    Raises:
        NVMLError: on entry: this driver has no events at all.
    """
    addresses: dict[str, list[str]] = {}
    events = nvml.nvmlEventSetCreate()
    try:
        for address, handle in handles.items():
            try:
                gpu = _physical_gpu(nvml, handle)
                addresses.setdefault(as_text(nvml.nvmlDeviceGetUUID(gpu)), []).append(address)
                nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:
                continue  # the GPU has no events; its samples show other problems

        def take_events() -> list[GpuEvent]:
            xids: list[GpuEvent] = []
            while addresses:
                try:
                    event = nvml.nvmlEventSetWait_v2(events, 0)
                except nvml.NVMLError:
                    break  # no more events; or no driver any more, which the samples show
                verdict = judge_xid(int(event.eventData))
                xids += [GpuEvent(gpu, *verdict) for gpu in gpus_of(event.device)]
            return xids

        def gpus_of(device: Any) -> list[str]:
            try:
                return addresses.get(as_text(nvml.nvmlDeviceGetUUID(device)), [])
            except nvml.NVMLError:
                # A lost GPU may not report its UUID. Count the event for all GPUs, as NVIDIA's
                # k8s-device-plugin does (internal/rm/health.go).
                return list(handles)

        yield take_events
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlEventSetFree(events)


def _physical_gpu(nvml: Any, handle: Any) -> Any:
    """Return the handle of the GPU, which reports the events of its MIG devices."""
    try:
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    except nvml.NVMLError:
        return handle
