"""A node's GPUs as nvidia-smi reports them, for when Python has no NVML."""

import os
import re
import shutil
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from hopsgpu.gpu.node.devices import (
    Device,
    DriverError,
    Listing,
    NoDriverError,
    Process,
    bus_id,
    bus_ids,
    foreign_processes,
    run_bounded,
)
from hopsgpu.gpu.node.health import RECOVERY_ACTIONS, Readings

TOOL = "nvidia-smi"
# Names the nvidia-smi to use, or the directory that it is in, and leaves NVML out: for nodes that
# have nvidia-smi elsewhere, and for nodes whose GPUs are simulated or shared out.
VARIABLE = "HOPSGPU_NVIDIA_SMI"
# Where YARN's own plugin looks for it (GpuDiscoverer.DEFAULT_BINARY_SEARCH_DIRS).
_PLACES = ("/usr/bin", "/bin", "/usr/local/nvidia/bin")
# What it says of a lost GPU, before or instead of the other GPUs.
_LOST = re.compile(
    r"Unable to determine the device handle for gpu\s*(?:\d+:\s*)?"
    r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])?:?\s*(.*)",
    re.IGNORECASE,
)
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
_DOCUMENT = re.compile(r"<nvidia_smi_log>.*</nvidia_smi_log>", re.DOTALL)
# What it says in place of a value if the GPU cannot be used.
_FATAL = ("GPU is lost", "GPU requires reset")
# Not isdigit(), which accepts "²"; and a pid as the kernel accepts it.
_NUMBER = re.compile("[0-9]{1,18}")
_PID = re.compile("[1-9][0-9]{0,8}")


class _Answer(NamedTuple):
    """The GPUs with their bus ids, and why GPUs are lost, by bus id ("" for what is unknown)."""

    devices: List[Tuple[str, Device]]
    lost: Dict[str, str]


def find(environ: Mapping[str, str]) -> str:
    """Return the path of the node's nvidia-smi.

    Raises:
        NoDriverError: there is no nvidia-smi.
        DriverError: the environment names one that cannot be run.
    """
    named = environ.get(VARIABLE)
    if named:
        path = Path(named) / TOOL if Path(named).is_dir() else Path(named)
        if not os.access(str(path), os.X_OK):
            raise DriverError(f"{VARIABLE}={named}: must be an executable {TOOL} or its directory")
        return str(path.absolute())
    places = [*environ.get("PATH", "").split(os.pathsep), *_PLACES]
    found = shutil.which(TOOL, path=os.pathsep.join(filter(None, places)))
    if found is None:
        raise NoDriverError(f"no {TOOL} on the PATH or in {', '.join(_PLACES)}")
    return str(Path(found).absolute())


def read(environ: Mapping[str, str], seconds: float) -> Listing:
    """Return the node's GPUs.

    Args:
        seconds: time limit for all calls of nvidia-smi together.

    Raises:
        NoDriverError: there is no nvidia-smi.
        HungDriverError: nvidia-smi did not answer in time.
        DriverError: nvidia-smi cannot be run or failed, or its answer is unintelligible.
    """
    smi = find(environ)
    kernel = bus_ids()
    until = time.monotonic() + seconds
    answer = _query([smi], until)
    if not answer.devices and answer.lost:
        # If one GPU is lost, old drivers report nothing else of the node: ask for each GPU alone.
        for bus in kernel:
            one = _query([smi, "-i", bus], until)
            answer.devices.extend(one.devices)
            if not one.devices:
                answer.lost[bus] = next(iter(one.lost.values()), "") or answer.lost.get(bus, "")
    answer.lost.pop("", None)
    found = list(answer.devices)
    for bus, why in answer.lost.items():
        problem = f"{TOOL} cannot reach it: {why or 'no reason given'}"
        found.append((bus, Device(f"PCI-{bus}", readings=Readings(problem))))
    found.sort(key=lambda pair: pair[0])
    shown = {bus for bus, _ in found}
    # A tool that the environment names may show only a part of what can be used.
    isolated = VARIABLE not in environ and any(bus not in shown for bus in kernel)
    return Listing(tuple(device for _, device in found), isolated)


def _query(command: List[str], until: float) -> _Answer:
    code, out, err = run_bounded([*command, "-q", "-x"], until - time.monotonic())
    said = f"{out}\n{err}"
    lost = {bus_id(bus) if bus else "": why.strip() for bus, why in _LOST.findall(said)}
    document = _DOCUMENT.search(out)
    if document is None:
        if lost:
            return _Answer([], lost)
        words = " ".join(_DOCUMENT.sub("", said).split())[:300]
        raise DriverError(f"{TOOL} failed with exit code {code}: {words or 'no output'}")
    try:
        log = ElementTree.fromstring(document.group())
    except ElementTree.ParseError as error:
        raise DriverError(f"the output of {TOOL} cannot be parsed: {error}") from None
    driver = _text(log, "driver_version")
    devices: List[Tuple[str, Device]] = []
    for gpu in log.findall("gpu"):
        bus = bus_id(gpu.get("id") or _text(gpu, "pci/pci_bus_id"))
        devices += [(bus, device) for device in _devices(gpu, bus, driver)]
    if any(_slices(gpu) for gpu in log.findall("gpu")):
        listing = run_bounded([*command, "-L"], until - time.monotonic())[1]
        devices = [(bus, _listed(device, _listed_slices(listing))) for bus, device in devices]
    return _Answer(devices, lost)


def _devices(gpu: ElementTree.Element, bus: str, driver: str) -> Iterable[Device]:
    uuid = _text(gpu, "uuid")
    readings = _readings(gpu)
    if not _UUID.fullmatch(uuid):
        uuid = f"PCI-{bus}"
        readings = Readings(readings.problem or f"{TOOL} reports no UUID of it")
    whole = Device(uuid, _text(gpu, "product_name"), _mib(gpu), driver, readings)
    if readings.problem or _text(gpu, "mig_mode/current_mig") != "Enabled":
        return [whole._replace(processes=_processes(gpu, None))]
    return [
        whole._replace(
            # Old drivers leave out the UUID: see `_listed`.
            address=_text(part, "uuid") or f"{uuid} {_text(part, 'index')}",
            name=f"{whole.name} MIG",
            memory_mib=_mib(part),
            processes=_processes(gpu, _instance(part)),
        )
        for part in _slices(gpu)
    ]


def _slices(gpu: ElementTree.Element) -> List[ElementTree.Element]:
    return gpu.findall("mig_devices/mig_device")


def _listed_slices(listing: str) -> Dict[str, Tuple[str, str]]:
    """Return UUIDs and profiles of MIG devices from `nvidia-smi -L`, by both forms of address."""
    slices: Dict[str, Tuple[str, str]] = {}
    gpu = ""
    for line in listing.splitlines():
        address = re.search(r"\(UUID: ([^)]+)\)", line)
        part = re.search(r"MIG\s+(\S+)\s+Device\s+(\d+):", line)
        if address and part:
            uuid, profile, index = address.group(1), part.group(1), part.group(2)
            slices[uuid] = slices[f"{gpu} {index}"] = (uuid, profile)
        elif address:
            gpu = address.group(1)
    return slices


def _listed(device: Device, slices: Mapping[str, Tuple[str, str]]) -> Device:
    """Return a MIG device with the UUID and the profile that are listed for it; a GPU as it is."""
    if device.address in slices:
        uuid, profile = slices[device.address]
        return device._replace(address=uuid, name=f"{device.name} {profile}")
    if " " in device.address:
        raise DriverError(f"{TOOL} reports no UUID of MIG device {device.address}")
    return device


def _processes(gpu: ElementTree.Element, instance: Optional[str]) -> Tuple[Process, ...]:
    """Return the processes that compute on a GPU, or on its MIG device with this instance."""
    return foreign_processes(
        Process(int(_text(one, "pid")), _text(one, "process_name"))
        for one in gpu.findall("processes/process_info")
        if "C" in _text(one, "type")
        and _PID.fullmatch(_text(one, "pid"))
        and instance in (None, _instance(one))
    )


def _instance(element: ElementTree.Element) -> str:
    return f"{_text(element, 'gpu_instance_id')}/{_text(element, 'compute_instance_id')}"


def _readings(gpu: ElementTree.Element) -> Readings:
    said = {(element.text or "").strip() for element in gpu.iter()}
    for problem in _FATAL:
        if problem in said:
            return Readings(f"{TOOL} reports: {problem}")
    names = {name: number for number, (_, name, _) in RECOVERY_ACTIONS.items()}
    retired = [
        _number(_text(gpu, f"retired_pages/{cause}/retired_count"))
        for cause in ("multiple_single_bit_retirement", "double_bit_retirement")
    ]
    pages = [count for count in retired if count is not None]
    return Readings(
        recovery_action=names.get(_text(gpu, "gpu_recovery_action")),
        volatile_double_bit=_uncorrectable(gpu, "volatile"),
        aggregate_double_bit=_uncorrectable(gpu, "aggregate"),
        sram_threshold_exceeded=_flag(gpu, "ecc_errors/aggregate/sram_threshold_exceeded"),
        remapped_correctable=_number(_text(gpu, "remapped_rows/remapped_row_corr")),
        remapped_uncorrectable=_number(_text(gpu, "remapped_rows/remapped_row_unc")),
        remap_pending=_flag(gpu, "remapped_rows/remapped_row_pending"),
        remap_failed=_flag(gpu, "remapped_rows/remapped_row_failure"),
        retired_pages=sum(pages) if pages else None,
        retirement_pending=_flag(gpu, "retired_pages/pending_retirement"),
        hw_thermal=_clocks(gpu, "hw_thermal_slowdown"),
        hw_power_brake=_clocks(gpu, "hw_power_brake_slowdown"),
        sw_thermal=_clocks(gpu, "sw_thermal_slowdown"),
    )


def _uncorrectable(gpu: ElementTree.Element, counter: str) -> Optional[int]:
    """Return the double-bit errors, which are listed by memory from Ampere on, in total before."""
    kinds = gpu.findall(f"ecc_errors/{counter}/*")
    numbers = [_number(kind.text or "") for kind in kinds if "uncorrectable" in kind.tag]
    counts = [count for count in numbers if count is not None]
    if counts:
        return sum(counts)
    return _number(_text(gpu, f"ecc_errors/{counter}/double_bit/total"))


def _clocks(gpu: ElementTree.Element, reason: str) -> Optional[bool]:
    for word in ("event", "throttle"):  # the older name
        state = _text(gpu, f"clocks_{word}_reasons/clocks_{word}_reason_{reason}")
        if state in ("Active", "Not Active"):
            return state == "Active"
    return None


def _flag(gpu: ElementTree.Element, path: str) -> Optional[bool]:
    return {"Yes": True, "No": False}.get(_text(gpu, path))


def _mib(element: ElementTree.Element) -> int:
    return _number(_text(element, "fb_memory_usage/total").partition(" ")[0]) or 0


def _number(text: str) -> Optional[int]:
    return int(text) if _NUMBER.fullmatch(text.strip()) else None


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()
