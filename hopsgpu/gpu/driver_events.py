"""What the driver tells of GPUs while ranks run on them: XID events, and that one has failed.

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
    """Something that befell a GPU.

    Attributes:
        gpu: its address.
        state: what it makes of the GPU, one of `discovery.health.STATES`.
        reason: in words.
    """

    gpu: str
    state: str
    reason: str

    def fields(self) -> dict[str, str]:
        """For a message."""
        return asdict(self)

    @property
    def is_fatal(self) -> bool:
        """Whether nothing more is to be expected of the GPU."""
        return self.state == BAD


def unusable(gpu: str, problem: str) -> GpuEvent:
    """The event of a GPU of which NVML says that it is lost, or has to be reset.

    Args:
        gpu: its address.
        problem: in NVML's words.
    """
    advice = "nvidia-smi --gpu-reset, or reboot the node if it is lost"
    return GpuEvent(gpu, BAD, f"the driver cannot use it any more ({problem}): {advice}")


@contextlib.contextmanager
def xid_events(nvml: Any, handles: Mapping[str, Any]) -> Iterator[Callable[[], list[GpuEvent]]]:
    """While inside, what gives the XID events that came since it was asked last.

    GPUs whose driver tells of no events (vGPU, WSL) have none. An event of a GPU of which only
    MIG devices are used counts for each of them.

    Args:
        nvml: the module pynvml, initialised.
        handles: NVML's, by address.

    Raises:
        NVMLError: on entry: this driver has no events at all.
    """
    addresses: dict[str, list[str]] = {}
    events = nvml.nvmlEventSetCreate()
    try:
        for address, handle in handles.items():
            try:
                whole = _whole(nvml, handle)
                addresses.setdefault(as_text(nvml.nvmlDeviceGetUUID(whole)), []).append(address)
                nvml.nvmlDeviceRegisterEvents(whole, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:
                continue  # it tells of none; its samples say what else is wrong with it

        def take() -> list[GpuEvent]:
            found: list[GpuEvent] = []
            while addresses:
                try:
                    told = nvml.nvmlEventSetWait_v2(events, 0)
                except nvml.NVMLError:
                    break  # no more of them; or the driver is gone, which the samples say
                verdict = judge_xid(int(told.eventData))
                found += [GpuEvent(gpu, *verdict) for gpu in whose(told.device)]
            return found

        def whose(device: Any) -> list[str]:
            try:
                return addresses.get(as_text(nvml.nvmlDeviceGetUUID(device)), [])
            except nvml.NVMLError:
                # A lost GPU may not tell its UUID. It is one of these; NVIDIA's k8s-device-plugin
                # too counts such an event for all (internal/rm/health.go).
                return list(handles)

        yield take
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlEventSetFree(events)


def _whole(nvml: Any, handle: Any) -> Any:
    """The GPU of a MIG device, which tells of its events; another handle as it is."""
    try:
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    except nvml.NVMLError:
        return handle
