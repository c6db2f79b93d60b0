"""A node's GPUs as NVML reports them, through the module `pynvml` of nvidia-ml-py.

The names and numbers are those of the NVML API reference. A value is None if the driver,
nvidia-ml-py or the GPU does not support its call.
"""

from typing import Any, List, Optional, Tuple

from hopsgpu.gpu.node.devices import (
    DriverError,
    GpuDevice,
    GpuProcess,
    Listing,
    NoDriverError,
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
    """Return the node's GPUs, from the module pynvml.

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
        return _NvmlReader(nvml).listing()
    except nvml.NVMLError as error:
        raise DriverError(f"NVML failed: {error}") from None


class _NvmlReader:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._driver = as_text(nvml.nvmlSystemGetDriverVersion())

    def listing(self) -> Listing:
        devices: List[Tuple[str, GpuDevice]] = []
        lost: List[str] = []
        is_isolated = False
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                bus = bus_id(as_text(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
            except self._nvml.NVMLError as error:
                # Cgroups deny this container access to a GPU of another one.
                if error.value == _NO_PERMISSION:
                    is_isolated = True
                else:
                    lost.append(f"NVML cannot reach it: {error}")
                continue
            devices += [(bus, device) for device in self._devices(handle, bus)]
        # NVML does not say which GPU does not answer: take those that only the kernel lists.
        buses = {bus for bus, _ in devices}
        missing = [] if is_isolated else [bus for bus in bus_ids() if bus not in buses]
        devices += [(bus, self._lost_device(bus, why)) for bus, why in zip(missing, lost)]
        devices.sort(key=lambda pair: pair[0])
        return Listing(tuple(device for _, device in devices), is_isolated)

    def _lost_device(self, bus: str, why: str) -> GpuDevice:
        return GpuDevice(f"PCI-{bus}", driver=self._driver, readings=Readings(why))

    def _devices(self, handle: Any, bus: str) -> List[GpuDevice]:
        try:
            readings = self._readings(handle)
            mig_devices = self._mig_devices(handle)
            handles = [handle] if mig_devices is None else mig_devices
            return [self._device(visible, handle, readings) for visible in handles]
        except (_LostError, self._nvml.NVMLError) as error:
            # The other GPUs can still be used.
            uuid = self._ask("nvmlDeviceGetUUID", handle, fatal=())
            name = self._ask("nvmlDeviceGetName", handle, fatal=())
            lost = self._lost_device(bus, f"NVML reports: {error}")._replace(
                name=as_text(name or "")
            )
            return [lost if uuid is None else lost._replace(address=as_text(uuid))]

    def _device(self, handle: Any, parent: Any, readings: Readings) -> GpuDevice:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        calls = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
        running = [process for call in calls for process in self._ask(call, handle) or []]
        return GpuDevice(
            address=as_text(self._nvml.nvmlDeviceGetUUID(handle)),
            name=self._product(handle, parent),
            memory_mib=0 if memory is None else memory.total // _MIB,
            driver=self._driver,
            readings=readings,
            processes=foreign_processes(GpuProcess(p.pid, self._name(p.pid)) for p in running),
            parent=""
            if handle is parent
            else as_text(self._ask("nvmlDeviceGetUUID", parent) or ""),
        )

    def _product(self, handle: Any, parent: Any) -> str:
        name = as_line(as_text(self._ask("nvmlDeviceGetName", handle) or ""))
        if handle is parent or "MIG" in name:
            return name
        return f"{as_text(self._ask('nvmlDeviceGetName', parent) or '')} MIG"

    def _name(self, pid: int) -> str:
        return as_text(self._ask("nvmlSystemGetProcessName", pid, fatal=()) or "")

    def _mig_devices(self, handle: Any) -> Optional[List[Any]]:
        """Return handles of a GPU's MIG devices, or None if the MIG mode is off."""
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        if mode is None or not mode[0]:
            return None
        count = self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        call = "nvmlDeviceGetMigDeviceHandleByIndex"
        handles = [self._ask(call, handle, index) for index in range(count)]
        return [mig_device for mig_device in handles if mig_device is not None]

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
            remap_pending=_as_bool(rows[2]),
            remap_failed=_as_bool(rows[3]),
            retired_pages=self._count_retired_pages(handle),
            retirement_pending=_as_bool(pending),
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

    def _count_retired_pages(self, handle: Any) -> Optional[int]:
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
        """Return the result of a call, or None if this NVML, or this GPU, does not support it.

        Raise _LostError if the GPU cannot be used.
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


def _as_bool(flag: Optional[int]) -> Optional[bool]:
    return None if flag is None else bool(flag)


def as_text(value: Any) -> str:
    """Return a text of NVML as str; old versions of nvidia-ml-py return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
