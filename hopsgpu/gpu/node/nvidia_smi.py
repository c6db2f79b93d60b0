"""A node's GPUs as nvidia-smi reports them, if Python has no NVML."""

import os
import re
import shutil
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple
from xml.sax.saxutils import unescape

from hopsgpu.gpu.node.devices import (
    DriverError,
    GpuDevice,
    GpuProcess,
    HungDriverError,
    Listing,
    NoDriverError,
    as_line,
    bus_id,
    bus_ids,
    foreign_processes,
    run_bounded,
)
from hopsgpu.gpu.node.health import RECOVERY_ACTIONS, Readings

TOOL = "nvidia-smi"
# The nvidia-smi to use, or its directory. If the variable is set, NVML is not used. It is for nodes
# that have nvidia-smi elsewhere, and for nodes whose GPUs are simulated or partitioned.
VARIABLE = "HOPSGPU_NVIDIA_SMI"
# YARN's own plugin searches these directories (GpuDiscoverer.DEFAULT_BINARY_SEARCH_DIRS).
_DIRECTORIES = ("/usr/bin", "/bin", "/usr/local/nvidia/bin")
# nvidia-smi's message about a lost GPU, before or instead of the other GPUs.
_LOST = re.compile(
    r"Unable to determine the device handle for gpu\s*(?:\d+:\s*)?"
    r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])?:?\s*(.*)",
    re.IGNORECASE,
)
_NOT_SHOWN = "No devices were found"
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
# A PCI bus id in NVML's form.
_BUS = re.compile(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-9A-F]")
_BEGIN, _END = "<nvidia_smi_log>", "</nvidia_smi_log>"
_GPU_BEGIN = re.compile(r"<gpu(?=[\s>])")
_GPU_END = "</gpu>"
_LIST_BEGIN, _LIST_END = "<processes>", "</processes>"
_PROCESS_BEGIN, _PROCESS_END = "<process_info>", "</process_info>"
_NAME_BEGIN, _NAME_END = "<process_name>", "</process_name>"
_TAG = re.compile(r"<(/?)([A-Za-z_]\w*)([^<>]*)>")
_ID = re.compile(r'\bid="([^"]*)"')
_QUOTES = {"&quot;": '"', "&apos;": "'"}
# The driver prints this in place of a name that it does not know.
_UNKNOWN = re.compile(r"N/A|ERR!|\[.*\]")
# The driver prints these in place of an empty list, or of a list that the GPU does not support.
_NO_LIST = ("", "N/A", "None")
# The driver prints these in place of a value if the GPU cannot be used.
_FATAL = ("GPU is lost", "GPU requires reset")
# Not isdigit(), which accepts "²"; and a pid as the kernel accepts it.
_NUMBER = re.compile("[0-9]{1,18}")
_PID = re.compile("[1-9][0-9]{0,8}")
_NUMERAL = re.compile("[0-9]+")
# More GPUs than any node has.
_MAX_GPUS = 64
# More memory than any GPU has (16 TiB): such a number is an error of the driver.
_MAX_MIB = 2**24


class Output(NamedTuple):
    """The output of `nvidia-smi -q -x`.

    Attributes:
        gpus: the GPUs that the output describes completely. Their attribute "id" is the bus id, or
            else the UUID, or else the index.
        cut: the ids of the GPUs that the output describes incompletely.
        is_consistent: whether the output is complete, and has each GPU once and not more GPUs than
            it counts. Otherwise it was cut off, or the name of a process pretends to be a GPU.
        gpu_count: how many GPUs the output counts.
        outside: text before and after the document.
    """

    driver: str
    gpus: Tuple[ElementTree.Element, ...]
    cut: Tuple[str, ...]
    is_consistent: bool
    gpu_count: int
    outside: str


class _Answer(NamedTuple):
    """The GPUs by id, why GPUs are lost, by id ("" if it is unknown), and the number of GPUs."""

    devices: Dict[str, List[GpuDevice]]
    lost: Dict[str, str]
    is_consistent: bool
    gpu_count: int = 0


def find_nvidia_smi(environ: Mapping[str, str]) -> str:
    """Return the path of the node's nvidia-smi.

    Raises:
        NoDriverError: there is none.
        DriverError: the environment names one that cannot be run.
    """
    value = environ.get(VARIABLE)
    if value:
        path = Path(value) / TOOL if Path(value).is_dir() else Path(value)
        if not os.access(str(path), os.X_OK):
            raise DriverError(f"{VARIABLE}={value}: must be an executable {TOOL} or its directory")
        return str(path.absolute())
    places = [*environ.get("PATH", "").split(os.pathsep), *_DIRECTORIES]
    executable = shutil.which(TOOL, path=os.pathsep.join(filter(None, places)))
    if executable is None:
        raise NoDriverError(f"no {TOOL} on the PATH or in {', '.join(_DIRECTORIES)}")
    return str(Path(executable).absolute())


def read(environ: Mapping[str, str], seconds: float) -> Listing:
    """Return the node's GPUs; `seconds` bounds all calls of nvidia-smi together.

    Raises:
        NoDriverError: there is no nvidia-smi.
        HungDriverError: nvidia-smi did not answer in time.
        DriverError: nvidia-smi cannot be run or failed, or its answer is unintelligible.
    """
    smi = find_nvidia_smi(environ)
    kernel = bus_ids()
    deadline = time.monotonic() + seconds
    answer = _query([smi], deadline)
    if not answer.is_consistent or (answer.lost and not answer.devices):
        # If one GPU is lost, old drivers report nothing else of the node.
        answer = _query_each(smi, kernel, answer, deadline)
    answer.lost.pop("", None)
    by_bus = {bus: list(devices) for bus, devices in answer.devices.items()}
    for bus, why in answer.lost.items():
        problem = f"{TOOL} cannot reach it: {why or 'no reason given'}"
        by_bus.setdefault(bus, [GpuDevice(_bus_address(bus), readings=Readings(problem))])
    # A tool that the environment names may show only some of the usable GPUs.
    is_isolated = VARIABLE not in environ and len(by_bus) < len(kernel)
    return Listing(_with_unique_addresses(by_bus), is_isolated)


def _query_each(smi: str, kernel: Tuple[str, ...], answer: _Answer, deadline: float) -> _Answer:
    """Ask for each GPU alone, by its bus id or else its index.

    Only the first GPU of an output can be trusted: no name of a process comes before it.
    """
    devices: Dict[str, List[GpuDevice]] = {}
    lost = dict(answer.lost)
    for name in kernel or map(str, range(min(answer.gpu_count, _MAX_GPUS))):
        try:
            single = _query([smi, "-i", name], deadline)
        except HungDriverError:
            raise
        except DriverError as error:
            # A GPU that only the kernel lists belongs to another container.
            if not kernel or _NOT_SHOWN not in str(error):
                lost[name] = str(error)
            continue
        if single.devices:
            bus = next(iter(single.devices))
            devices[bus] = single.devices[bus]
            lost.pop(bus, None)
        else:
            why = next(iter(single.lost.values()), "") or answer.lost.get(name, "")
            lost[next(iter(single.lost), "") or name] = why
    return _Answer(devices, lost, True)


def _with_unique_addresses(by_bus: Mapping[str, List[GpuDevice]]) -> Tuple[GpuDevice, ...]:
    """Return the GPUs in the order of their bus ids, each with an address of its own."""
    devices: Dict[str, GpuDevice] = {}
    for bus in sorted(by_bus):
        for index, device in enumerate(by_bus[bus]):
            if device.address in devices:
                problem = f"{TOOL} reports the UUID of another GPU for it: {device.address}"
                device = device._replace(
                    address=_bus_address(bus, index), readings=Readings(problem)
                )
            devices[device.address] = device
    return tuple(devices.values())


def _bus_address(bus: str, index: int = 0) -> str:
    """Return the address of a GPU, or of its MIG device with this index, that reports no UUID."""
    return f"PCI-{bus}/{index}" if index else f"PCI-{bus}"


def _query(command: List[str], deadline: float) -> _Answer:
    code, out, err = run_bounded([*command, "-q", "-x"], deadline - time.monotonic())
    output = read_output(out)
    messages = f"{output.outside if output else out}\n{err}"
    lost = {
        bus_id(bus) if bus else "": as_line(why.strip()) for bus, why in _LOST.findall(messages)
    }
    if output is None or not (output.gpus or output.cut or output.is_consistent):
        if lost:
            return _Answer({}, lost, True)
        words = " ".join(as_line(line) for line in messages.split("\n")).split()
        reason = "its output is incomplete" if output else " ".join(words)[:300] or "no output"
        raise DriverError(f"{TOOL} failed with exit code {code}: {reason}")
    if not output.gpus:
        lost.update((gpu, f"the output of {TOOL} about it is incomplete") for gpu in output.cut)
    has_slices = any(_slices(gpu) for gpu in output.gpus)
    listing = run_bounded([*command, "-L"], deadline - time.monotonic())[1] if has_slices else ""
    slices = _parse_slices(listing)
    devices: Dict[str, List[GpuDevice]] = {}
    for gpu in output.gpus:
        # Only the first GPU with an id can be trusted: see `_query_each`.
        devices.setdefault(gpu.attrib["id"], _devices(gpu, output.driver, slices))
    return _Answer(devices, lost, output.is_consistent, output.gpu_count)


def read_output(out: str) -> Optional[Output]:
    """Return the parsed output of `nvidia-smi -q -x`; None if there is no document in it.

    The output is not well-formed XML if the name of a process, or garbage in a GPU's memory, has
    XML's special characters. Therefore each GPU is read up to its processes, and the name of each
    process as it is.
    """
    begin, end = out.find(_BEGIN), out.rfind(_END)
    if begin < 0:
        return None
    is_closed = end > begin
    head, *blocks = _GPU_BEGIN.split(out[begin:end] if is_closed else out[begin:])
    log = _parse("", head)
    attached = read_number(_text(log, "nvidia_smi_log/attached_gpus"))
    count = len(blocks) if attached is None else attached
    gpus: List[ElementTree.Element] = []
    cut: List[str] = []
    for index, block in enumerate(blocks):
        facts, has_list, rest = block.partition(_LIST_BEGIN)
        attributes, _, fields = facts.partition(">")
        gpu = _parse("gpu", fields.partition(_GPU_END)[0])
        gpu.set("id", _id_of(gpu, attributes, index))
        if has_list:
            _add_processes(gpu, rest)
        if has_list or _GPU_END in facts:
            gpus.append(gpu)
        else:
            cut.append(gpu.attrib["id"])
    ids = {*cut, *(gpu.attrib["id"] for gpu in gpus)}
    is_consistent = is_closed and not cut and len(ids) == len(blocks) <= count
    driver = as_line(_text(log, "nvidia_smi_log/driver_version"))
    outside = out[:begin] + (out[end:] if is_closed else "")
    return Output(driver, tuple(gpus), tuple(cut), is_consistent, count, outside)


def _parse(name: str, text: str) -> ElementTree.Element:
    """Return a new element with the elements of a text.

    Unlike an XML parser, this function accepts each character and each tag. It knows no entities
    of a document type, so nothing can be expanded.
    """
    path = [ElementTree.Element(name)]
    position = 0
    for tag in _TAG.finditer(text):
        _add_text(path[-1], text[position : tag.start()])
        position = tag.end()
        is_end, name, rest = tag.groups()
        if not is_end:
            path.append(ElementTree.SubElement(path[-1], name))
            if rest.endswith("/"):
                path.pop()
        elif name in (element.tag for element in path[1:]):
            while path.pop().tag != name:
                pass
    _add_text(path[-1], text[position:])
    return path[0]


def _add_text(element: ElementTree.Element, text: str) -> None:
    if not len(element):
        element.text = (element.text or "") + unescape(text, _QUOTES)


def _add_processes(gpu: ElementTree.Element, text: str) -> None:
    """Add the list of a GPU's processes, from the text after the list's first tag."""
    # Only the last end tag cannot be part of the name of a process.
    inner, list_end, _ = text.rpartition(_LIST_END)
    first, *rest = (inner if list_end else text).split(_PROCESS_BEGIN)
    listed = ElementTree.SubElement(gpu, "processes")
    listed.text = first
    for part in rest:
        info, end, _ = part.partition(_PROCESS_END)
        before, _, behind = info.partition(_NAME_BEGIN)
        name, _, after = behind.rpartition(_NAME_END)
        process = _parse("process_info" if end else "incomplete_process", before + after)
        ElementTree.SubElement(process, "process_name").text = unescape(name, _QUOTES)
        listed.append(process)
    if not list_end:
        ElementTree.SubElement(listed, "incomplete_list")


def _has_unread_processes(gpu: ElementTree.Element) -> bool:
    """Return whether the list may lack processes that compute on the GPU."""
    listed = gpu.find("processes")
    if listed is None:
        return False
    if not len(listed):
        return (listed.text or "").strip() not in _NO_LIST
    return any(
        process.tag != "process_info"
        or (_may_compute(process) and not _NUMERAL.fullmatch(_text(process, "pid")))
        for process in listed
    )


def _may_compute(process: ElementTree.Element) -> bool:
    return _text(process, "type") != "G"


def _id_of(gpu: ElementTree.Element, attributes: str, index: int) -> str:
    """Return the id of a GPU for `nvidia-smi -i`: the bus id if there is one."""
    attribute = _ID.search(attributes)
    for place in (attribute.group(1) if attribute else "", _text(gpu, "pci/pci_bus_id")):
        if _BUS.fullmatch(bus_id(place)):
            return bus_id(place)
    uuid = _text(gpu, "uuid")
    return uuid if _UUID.fullmatch(uuid) else str(index)


def _devices(
    gpu: ElementTree.Element, driver: str, slices: Mapping[str, Tuple[str, str]]
) -> List[GpuDevice]:
    """Return a GPU, or its MIG devices, whose UUIDs and profiles `_parse_slices` returned."""
    uuid, bus = _text(gpu, "uuid"), gpu.attrib["id"]
    readings = _readings(gpu)
    if not _UUID.fullmatch(uuid):
        uuid = _bus_address(bus)
        readings = Readings(readings.problem or f"{TOOL} reports no UUID of it")
    name = _text(gpu, "product_name")
    name = "" if _UNKNOWN.fullmatch(name) else as_line(name)
    device = GpuDevice(uuid, name, _mib(gpu), driver, readings)
    if readings.problem or _text(gpu, "mig_mode/current_mig") != "Enabled":
        return [device._replace(processes=_processes(gpu, None))]
    devices = []
    for index, part in enumerate(_slices(gpu)):
        mig_uuid = _text(part, "uuid")
        # Old drivers leave out the UUID here.
        key = mig_uuid if _UUID.fullmatch(mig_uuid) else f"{uuid} {_text(part, 'index')}"
        address, profile = slices.get(key, (key, ""))
        has_uuid = _UUID.fullmatch(address)
        devices.append(
            device._replace(
                address=address if has_uuid else _bus_address(bus, index + 1),
                name=f"{name} MIG {as_line(profile)}".strip(),
                memory_mib=_mib(part),
                readings=readings if has_uuid else Readings(f"{TOOL} reports no UUID of it"),
                processes=_processes(gpu, _instance(part)),
                parent=uuid,
            )
        )
    return devices


def _slices(gpu: ElementTree.Element) -> List[ElementTree.Element]:
    return gpu.findall("mig_devices/mig_device")


def _parse_slices(listing: str) -> Dict[str, Tuple[str, str]]:
    """Return the MIG devices of `nvidia-smi -L`: UUID and profile.

    Each has two keys: its UUID, and the UUID of its GPU with its index.
    """
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


def _processes(gpu: ElementTree.Element, instance: Optional[str]) -> Tuple[GpuProcess, ...]:
    """Return the processes that compute on a GPU, or on its MIG device with this instance."""
    return foreign_processes(
        GpuProcess(int(_text(process, "pid")), _text(process, "process_name"))
        for process in gpu.findall("processes/process_info")
        if _may_compute(process)
        and _PID.fullmatch(_text(process, "pid"))
        and instance in (None, _instance(process))
    )


def _instance(element: ElementTree.Element) -> str:
    return f"{_text(element, 'gpu_instance_id')}/{_text(element, 'compute_instance_id')}"


def _readings(gpu: ElementTree.Element) -> Readings:
    # Without the processes: a process may have the name "GPU is lost".
    facts = (element for part in gpu if part.tag != "processes" for element in part.iter())
    values = {(element.text or "").strip() for element in facts}
    for problem in _FATAL:
        if problem in values:
            return Readings(f"{TOOL} reports: {problem}")
    names = {name: number for number, (_, name, _) in RECOVERY_ACTIONS.items()}
    retired = [
        read_number(_text(gpu, f"retired_pages/{cause}/retired_count"))
        for cause in ("multiple_single_bit_retirement", "double_bit_retirement")
    ]
    pages = [count for count in retired if count is not None]
    return Readings(
        has_unread_processes=_has_unread_processes(gpu),
        recovery_action=names.get(_text(gpu, "gpu_recovery_action")),
        volatile_double_bit=_uncorrectable(gpu, "volatile"),
        aggregate_double_bit=_uncorrectable(gpu, "aggregate"),
        sram_threshold_exceeded=_flag(gpu, "ecc_errors/aggregate/sram_threshold_exceeded"),
        remapped_correctable=read_number(_text(gpu, "remapped_rows/remapped_row_corr")),
        remapped_uncorrectable=read_number(_text(gpu, "remapped_rows/remapped_row_unc")),
        remap_pending=_flag(gpu, "remapped_rows/remapped_row_pending"),
        remap_failed=_flag(gpu, "remapped_rows/remapped_row_failure"),
        retired_pages=sum(pages) if pages else None,
        retirement_pending=_flag(gpu, "retired_pages/pending_retirement"),
        hw_thermal=_clocks(gpu, "hw_thermal_slowdown"),
        hw_power_brake=_clocks(gpu, "hw_power_brake_slowdown"),
        sw_thermal=_clocks(gpu, "sw_thermal_slowdown"),
    )


def _uncorrectable(gpu: ElementTree.Element, counter: str) -> Optional[int]:
    """Return the double-bit errors: from Ampere on, their sum over the kinds of memory."""
    kinds = gpu.findall(f"ecc_errors/{counter}/*")
    numbers = [read_number(kind.text or "") for kind in kinds if "uncorrectable" in kind.tag]
    counts = [count for count in numbers if count is not None]
    if counts:
        return sum(counts)
    return read_number(_text(gpu, f"ecc_errors/{counter}/double_bit/total"))


def _clocks(gpu: ElementTree.Element, reason: str) -> Optional[bool]:
    for word in ("event", "throttle"):  # older drivers use the second word
        state = _text(gpu, f"clocks_{word}_reasons/clocks_{word}_reason_{reason}")
        if state in ("Active", "Not Active"):
            return state == "Active"
    return None


def _flag(gpu: ElementTree.Element, path: str) -> Optional[bool]:
    return {"Yes": True, "No": False}.get(_text(gpu, path))


def _mib(element: ElementTree.Element) -> int:
    return read_mib(_text(element, "fb_memory_usage/total")) or 0


def read_mib(text: str) -> Optional[int]:
    """Return the number of "40960 MiB" or "40960"; None for other texts and impossible numbers."""
    number = read_number(text.partition(" ")[0])
    return number if number is not None and number <= _MAX_MIB else None


def read_number(text: str) -> Optional[int]:
    """Return a text of up to 18 digits as a number; None for any other text."""
    return int(text) if _NUMBER.fullmatch(text.strip()) else None


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()
