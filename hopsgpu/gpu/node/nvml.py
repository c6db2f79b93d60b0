"""A node's GPUs as NVML reports them, through the module `pynvml` of nvidia-ml-py.

The names and numbers are those of the NVML API reference. Old drivers and old versions of
nvidia-ml-py lack some of the calls, and a GPU supports only some; what is not reported is None.
"""

from typing import Any, List, Optional, Tuple

from hopsgpu.gpu.node.devices import (
    Device,
    DriverError,
    Listing,
    NoDriverError,
    Process,
    as_line,
    bus_id,
    bus_ids,
    foreign_processes,
)
from hopsgpu.gpu.node.health import Readings

_NO_PERMISSION = 4
_LIBRARY_NOT_FOUND = 12
# The errors of a GPU that cannot be used: IRQ issue, lost, reset required.
FATAL = (11, 15, 16)
_MIB = 1024 * 1024
_ECC_UNCORRECTED, _ECC_VOLATILE, _ECC_AGGREGATE = 1, 0, 1
_RETIRED_MULTIPLE_SINGLE_BIT, _RETIRED_DOUBLE_BIT = 0, 1
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_SW_THERMAL, _HW_THERMAL, _HW_POWER_BRAKE = 0x20, 0x40, 0x80


class _LostError(Exception):
    """The GPU cannot be used; the message is NVML's."""


def read(nvml: Any) -> Listing:
    """Return the node's GPUs.

    Args:
        nvml: the module pynvml.

    Raises:
        NoDriverError: the module is installed, but not the driver's library.
        DriverError: NVML cannot be initialised, or fails.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        kind = NoDriverError if error.value == _LIBRARY_NOT_FOUND else DriverError
        raise kind(f"NVML is not available: {error}") from None
    try:
        return _Reader(nvml).listing()
    except nvml.NVMLError as error:
        raise DriverError(f"NVML failed: {error}") from None


class _Reader:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._driver = as_text(nvml.nvmlSystemGetDriverVersion())

    def listing(self) -> Listing:
        found: List[Tuple[str, Device]] = []
        lost: List[str] = []
        isolated = False
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                bus = bus_id(as_text(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
            except self._nvml.NVMLError as error:
                # Another container's GPU, to which cgroups deny this one access.
                if error.value == _NO_PERMISSION:
                    isolated = True
                else:
                    lost.append(f"NVML cannot reach it: {error}")
                continue
            found += [(bus, device) for device in self._devices(handle, bus)]
        # NVML does not say which GPU does not answer: it is one that only the kernel has.
        known = {bus for bus, _ in found}
        missing = [] if isolated else [bus for bus in bus_ids() if bus not in known]
        found += [(bus, self._lost(bus, why)) for bus, why in zip(missing, lost)]
        found.sort(key=lambda pair: pair[0])
        return Listing(tuple(device for _, device in found), isolated)

    def _lost(self, bus: str, why: str) -> Device:
        return Device(f"PCI-{bus}", driver=self._driver, readings=Readings(why))

    def _devices(self, handle: Any, bus: str) -> List[Device]:
        try:
            readings = self._readings(handle)
            slices = self._slices(handle)
            parts = [handle] if slices is None else slices
            return [self._device(part, handle, readings) for part in parts]
        except (_LostError, self._nvml.NVMLError) as error:
            # Whatever is wrong with this GPU, the others can be used.
            uuid = self._ask("nvmlDeviceGetUUID", handle, fatal=())
            name = self._ask("nvmlDeviceGetName", handle, fatal=())
            lost = self._lost(bus, f"NVML reports: {error}")._replace(name=as_text(name or ""))
            return [lost if uuid is None else lost._replace(address=as_text(uuid))]

    def _device(self, handle: Any, parent: Any, readings: Readings) -> Device:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        calls = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
        running = [one for call in calls for one in self._ask(call, handle) or []]
        return Device(
            address=as_text(self._nvml.nvmlDeviceGetUUID(handle)),
            name=self._product(handle, parent),
            memory_mib=0 if memory is None else memory.total // _MIB,
            driver=self._driver,
            readings=readings,
            processes=foreign_processes(Process(one.pid, self._name(one.pid)) for one in running),
        )

    def _product(self, handle: Any, parent: Any) -> str:
        """Return the product's name; a MIG device's ends with "MIG" and, if known, its profile."""
        name = as_line(as_text(self._ask("nvmlDeviceGetName", handle) or ""))
        if handle is parent or "MIG" in name:
            return name
        return f"{as_text(self._ask('nvmlDeviceGetName', parent) or '')} MIG"

    def _name(self, pid: int) -> str:
        return as_text(self._ask("nvmlSystemGetProcessName", pid, fatal=()) or "")

    def _slices(self, handle: Any) -> Optional[List[Any]]:
        """Return handles of a GPU's MIG devices, or None if its MIG mode is off."""
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        if mode is None or not mode[0]:
            return None
        most = self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        slices = [self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(most)]
        return [one for one in slices if one is not None]

    def _readings(self, handle: Any) -> Readings:
        rows = self._ask("nvmlDeviceGetRemappedRows", handle) or (None,) * 4
        clocks = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        pending = self._ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        return Readings(
            recovery_action=self._recovery_action(handle),
            volatile_double_bit=self._double_bit(handle, _ECC_VOLATILE),
            aggregate_double_bit=self._double_bit(handle, _ECC_AGGREGATE),
            sram_threshold_exceeded=self._sram_threshold(handle),
            remapped_correctable=rows[0],
            remapped_uncorrectable=rows[1],
            remap_pending=_yes(rows[2]),
            remap_failed=_yes(rows[3]),
            retired_pages=self._retired(handle),
            retirement_pending=_yes(pending),
            hw_thermal=None if clocks is None else bool(clocks & _HW_THERMAL),
            hw_power_brake=None if clocks is None else bool(clocks & _HW_POWER_BRAKE),
            sw_thermal=None if clocks is None else bool(clocks & _SW_THERMAL),
        )

    def _double_bit(self, handle: Any, counter: int) -> Optional[int]:
        count = self._ask("nvmlDeviceGetTotalEccErrors", handle, _ECC_UNCORRECTED, counter)
        return None if count is None else int(count)

    def _sram_threshold(self, handle: Any) -> Optional[bool]:
        make = getattr(self._nvml, "c_nvmlEccSramErrorStatus_v1_t", None)
        if make is None:
            return None
        status = make()
        import ctypes

        # nvidia-ml-py expects the caller to pass a pointer.
        if self._ask("nvmlDeviceGetSramEccErrorStatus", handle, ctypes.byref(status)) is None:
            return None
        return bool(status.bThresholdExceeded)

    def _retired(self, handle: Any) -> Optional[int]:
        causes = (_RETIRED_MULTIPLE_SINGLE_BIT, _RETIRED_DOUBLE_BIT)
        pages = [self._ask("nvmlDeviceGetRetiredPages", handle, cause) for cause in causes]
        counts = [len(page) for page in pages if page is not None]
        return sum(counts) if counts else None

    def _recovery_action(self, handle: Any) -> Optional[int]:
        values = self._ask("nvmlDeviceGetFieldValues", handle, [_RECOVERY_ACTION])
        if values is None or values[0].nvmlReturn != 0:
            return None
        return int(values[0].value.uiVal)

    def _ask(self, call: str, *arguments: Any, fatal: Tuple[int, ...] = FATAL) -> Any:
        """Return what a call returns, or None if this NVML, or this GPU, does not support it.

        Raises:
            _LostError: the GPU cannot be used.
        """
        function = getattr(self._nvml, call, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in fatal:
                raise _LostError(str(error)) from None
            return None


def _yes(flag: Optional[int]) -> Optional[bool]:
    return None if flag is None else bool(flag)


def as_text(said: Any) -> str:
    """Return a text of NVML as str; old versions of nvidia-ml-py give bytes."""
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
