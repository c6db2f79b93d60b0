"""Rules for whether a GPU is fit for work: pure functions of what the driver reports.

A "healthy" GPU is given out first. A "watch" GPU computes, and is given out after the healthy GPUs.
On a "bad" GPU, programs fail, or their results cannot be trusted.
"""

from types import MappingProxyType
from typing import Iterator, Mapping, NamedTuple, Optional, Tuple

HEALTHY = "healthy"
WATCH = "watch"
BAD = "bad"
# The order in which GPUs are given out.
STATES = (HEALTHY, WATCH, BAD)

# nvmlDeviceGpuRecoveryAction_t of nvml.h: value → (state, nvidia-smi's word, what to do). NVIDIA's
# guide "GPU Memory Error Management" (Error Recovery and Response Flags) says for each action
# whether new work may start. A GPU to be drained and reset still computes, at a reduced capacity.
RECOVERY_ACTIONS: Mapping[int, Tuple[str, str, str]] = MappingProxyType(
    {
        0: (HEALTHY, "None", ""),
        1: (BAD, "Reset", "nvidia-smi --gpu-reset"),
        2: (BAD, "Reboot", "reboot the node"),
        3: (BAD, "Drain P2P", "end the processes that use peer-to-peer traffic"),
        4: (WATCH, "Drain and Reset", "drain the GPU, then nvidia-smi --gpu-reset"),
        5: (BAD, "Recover IMEX Domain", "restore the IMEX domain"),
        6: (BAD, "Bus Reset", "reset its PCIe bus"),
        7: (BAD, "System Reboot", "reboot the system"),
    }
)
_NO_ACTION = 0
# NVIDIA's "GPU Memory Error Management", "Row Remapping": 64 retirements at most before Ampere.
_MAX_RETIRED_PAGES = 64
_MANY_RETIRED_PAGES = 60


class HealthVerdict(NamedTuple):
    """The verdict on a GPU's health: HEALTHY, WATCH or BAD, and the reasons with their numbers, or
    "".
    """

    state: str
    reason: str


class Readings(NamedTuple):
    """The readings of a GPU's health from NVML or nvidia-smi; None for what was not reported.

    A MIG device has the readings of its GPU.

    Attributes:
        problem: why the GPU cannot be queried, in the driver's words, or "".
        has_unread_processes: whether processes that may compute on the GPU could not be read.
        recovery_action: a key of RECOVERY_ACTIONS (drivers from R565 on).
        volatile_double_bit: uncorrectable ECC errors since the driver was loaded.
        aggregate_double_bit: the same over the GPU's life.
        sram_threshold_exceeded: whether the SRAM had more such errors than NVIDIA accepts.
        remapped_correctable: rows of memory remapped for correctable errors (from Ampere on).
        remapped_uncorrectable: rows of memory remapped for uncorrectable errors.
        remap_pending: whether a row will be remapped when the GPU is reset.
        remap_failed: whether a remapping has ever failed.
        retired_pages: pages of memory that are no longer used (before Ampere).
        retirement_pending: whether a page will be retired when the driver is reloaded.
        hw_thermal: whether the hardware halves the clocks, or worse, because of the temperature.
        hw_power_brake: the same at the power supply's request.
        sw_thermal: whether the driver lowers the clocks because of the temperature.
    """

    problem: str = ""
    has_unread_processes: bool = False
    recovery_action: Optional[int] = None
    volatile_double_bit: Optional[int] = None
    aggregate_double_bit: Optional[int] = None
    sram_threshold_exceeded: Optional[bool] = None
    remapped_correctable: Optional[int] = None
    remapped_uncorrectable: Optional[int] = None
    remap_pending: Optional[bool] = None
    remap_failed: Optional[bool] = None
    retired_pages: Optional[int] = None
    retirement_pending: Optional[bool] = None
    hw_thermal: Optional[bool] = None
    hw_power_brake: Optional[bool] = None
    sw_thermal: Optional[bool] = None


def judge_readings(readings: Readings) -> HealthVerdict:
    """Return the worst state that the rules give, with the reasons of all rules, the worst first.

    Readings that were not reported have no effect. The sources are NVIDIA's: the NVML API
    reference, and the guides "GPU Memory Error Management" (row remapping, recovery actions) and
    "Dynamic Page Retirement".
    """
    if readings.problem:
        # The other readings of a GPU that does not answer cannot be trusted.
        return HealthVerdict(BAD, readings.problem)
    verdicts = [*_recovery(readings), *_errors(readings), *_memory(readings), *_clocks(readings)]
    verdicts += _processes(readings)
    verdicts.sort(key=lambda verdict: -STATES.index(verdict.state))
    state = verdicts[0].state if verdicts else HEALTHY
    return HealthVerdict(state, "; ".join(verdict.reason for verdict in verdicts))


def _recovery(readings: Readings) -> Iterator[HealthVerdict]:
    action = readings.recovery_action
    if action is None or action == _NO_ACTION:
        return
    unknown = (WATCH, str(action), "see the NVML API reference")
    state, name, remedy = RECOVERY_ACTIONS.get(action, unknown)
    yield HealthVerdict(state, f"the driver's recovery action is {name!r}: {remedy}")


def _errors(readings: Readings) -> Iterator[HealthVerdict]:
    """Yield the verdicts on uncorrectable ECC errors.

    The calls are nvmlDeviceGetTotalEccErrors and nvmlDeviceGetSramEccErrorStatus. Such an error
    loses data, so the GPU is bad until a reset, which clears the volatile count. Exception: if the
    driver knows recovery actions and requires none, "the GPU can be immediately used again by
    starting a new GPU process" (GPU Memory Error Management, Error Recovery and Response Flags).
    The aggregate count shows past errors. Above the SRAM threshold, NVIDIA takes the GPU back.
    """
    if readings.sram_threshold_exceeded:
        yield HealthVerdict(
            BAD, "more uncorrectable SRAM errors than NVIDIA's threshold: replace it"
        )
    count, lifetime = readings.volatile_double_bit, readings.aggregate_double_bit
    if count:
        state = WATCH if readings.recovery_action == _NO_ACTION else BAD
        yield HealthVerdict(state, f"{count} double-bit ECC errors since the driver was loaded")
    elif lifetime:
        yield HealthVerdict(WATCH, f"{lifetime} double-bit ECC errors over its lifetime")


def _memory(readings: Readings) -> Iterator[HealthVerdict]:
    """Yield the verdicts on rows and pages of memory.

    The calls are nvmlDeviceGetRemappedRows and nvmlDeviceGetRetiredPages. A failed remapping leaves
    bad memory in use. A pending remapping does not, because the driver no longer uses the page.
    Until the reset, "unaffected applications can continue running without affecting accuracy and
    performance, and new workloads can be launched".
    """
    rows = (
        f"{readings.remapped_uncorrectable or 0} rows remapped for uncorrectable errors,"
        f" {readings.remapped_correctable or 0} for correctable ones"
    )
    if readings.remap_failed:
        yield HealthVerdict(BAD, f"a row of its memory could not be remapped ({rows}): replace it")
    if readings.remap_pending:
        yield HealthVerdict(WATCH, f"a row remapping is pending ({rows}): nvidia-smi --gpu-reset")
    pages = readings.retired_pages or 0
    if pages >= _MANY_RETIRED_PAGES:
        yield HealthVerdict(
            WATCH,
            f"{pages} pages of its memory are retired, of {_MAX_RETIRED_PAGES} at most: replace it",
        )
    if readings.retirement_pending:
        yield HealthVerdict(
            WATCH, f"a page retirement is pending ({pages} retired): reload the driver"
        )


def _clocks(readings: Readings) -> Iterator[HealthVerdict]:
    """Yield the verdicts on clocks that are held down: nvmlDeviceGetCurrentClocksEventReasons.

    The GPU computes correctly, at half its clock or less. A slow rank delays its gang. The state
    ends with its cause.
    """
    if readings.hw_thermal:
        yield HealthVerdict(
            WATCH, "the hardware slows it down because of its temperature: check the cooling"
        )
    if readings.hw_power_brake:
        yield HealthVerdict(
            WATCH, "the power supply slows it down (power brake): check the power supply"
        )
    if readings.sw_thermal:
        yield HealthVerdict(WATCH, "the driver slows it down because of its temperature")


def _processes(readings: Readings) -> Iterator[HealthVerdict]:
    """Yield a verdict on a GPU that may be in use, so that other GPUs are given out first."""
    if readings.has_unread_processes:
        yield HealthVerdict(
            WATCH,
            "not all of its processes can be read: another process may compute on it",
        )


class Xid(NamedTuple):
    """An error event of the driver.

    Attributes:
        state: state of the GPU after the event; HEALTHY if the application causes the event.
        meaning: meaning in the words of NVIDIA's catalogue.
    """

    state: str
    meaning: str
    action: str


_APPLICATION = "look for the cause in the program: the GPU is not at fault"
_RESET = "nvidia-smi --gpu-reset, or reboot the node"

# The source is NVIDIA's "Analyzing Xid Errors with the Xid Catalog", immediate actions. Events that
# NVIDIA's k8s-device-plugin ignores, because the application causes them, are HEALTHY
# (internal/rm/health.go). The plugin ignores 109 too, but the catalogue requires a reset: WATCH.
XIDS: Mapping[int, Xid] = MappingProxyType(
    {
        13: Xid(HEALTHY, "graphics engine exception", _APPLICATION),
        31: Xid(HEALTHY, "GPU memory page fault", _APPLICATION),
        43: Xid(HEALTHY, "GPU stopped processing the application", _APPLICATION),
        45: Xid(HEALTHY, "cleanup after a terminated application", _APPLICATION),
        68: Xid(HEALTHY, "NVDEC0 exception", _APPLICATION),
        46: Xid(BAD, "GPU stopped processing", _RESET),
        48: Xid(BAD, "double-bit ECC error", _RESET),
        62: Xid(BAD, "internal micro-controller halt", _RESET),
        63: Xid(WATCH, "memory row remapped or page retired", "reset the GPU when it is idle"),
        64: Xid(BAD, "memory row remapping or page retirement failed", _RESET),
        74: Xid(BAD, "NVLink error", _RESET),
        79: Xid(BAD, "GPU has fallen off the bus", "reboot the node; check its PCIe slot"),
        92: Xid(WATCH, "high rate of single-bit ECC errors", "ask the vendor if it persists"),
        94: Xid(
            WATCH, "contained memory error", "restart the program; reset the GPU when it is idle"
        ),
        95: Xid(BAD, "uncontained memory error", _RESET),
        109: Xid(WATCH, "context switch timeout", "reset the GPU if it recurs"),
        110: Xid(BAD, "security fault", "power-cycle the node"),
        119: Xid(BAD, "GSP RPC timeout", _RESET),
        120: Xid(BAD, "GSP error", _RESET),
        140: Xid(BAD, "unrecovered ECC error", _RESET),
        143: Xid(BAD, "GPU initialisation error", _RESET),
        154: Xid(WATCH, "recovery action changed", "nvidia-smi -q shows the action"),
        158: Xid(BAD, "GPU fatal timeout", _RESET),
    }
)


def judge_xid(number: int) -> HealthVerdict:
    """Return the verdict on a GPU for which the driver has just reported this event."""
    unknown = Xid(WATCH, "unknown to hopsgpu", "see NVIDIA's Xid catalogue")
    state, meaning, action = XIDS.get(number, unknown)
    return HealthVerdict(state, f"XID {number}, {meaning}: {action}")
