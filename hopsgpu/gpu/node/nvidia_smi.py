"""A node's GPUs as nvidia-smi reports them, for when Python has no NVML."""

import os
import re
import shutil
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple
from xml.sax.saxutils import unescape

from hopsgpu.gpu.node.devices import (
    Device,
    DriverError,
    HungDriverError,
    Listing,
    NoDriverError,
    Process,
    as_line,
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
# The driver prints these in place of a list that is empty, or that the GPU does not support.
_NO_LIST = ("", "N/A", "None")
# What it says in place of a value if the GPU cannot be used.
_FATAL = ("GPU is lost", "GPU requires reset")
# Not isdigit(), which accepts "²"; and a pid as the kernel accepts it.
_NUMBER = re.compile("[0-9]{1,18}")
_PID = re.compile("[1-9][0-9]{0,8}")
_NUMERAL = re.compile("[0-9]+")
# More GPUs than any node has.
_MOST_ASKED = 64
# More memory than any GPU has (16 TiB): such a number is an error of the driver.
_MOST_MIB = 2**24


class Output(NamedTuple):
    """The output of `nvidia-smi -q -x`.

    Attributes:
        driver: version of the driver.
        gpus: the GPUs, as far as the output describes them completely, each with an "id": its bus
            id, or for one that reports none its UUID, or else its index.
        cut: the ids of the GPUs that it describes incompletely.
        is_consistent: whether the output is complete, and has each GPU once and not more GPUs than
            it counts. If not, it was cut off, or the name of a process pretends to be a GPU.
        gpu_count: how many GPUs it counts.
        outside: what was printed before and after the document.
    """

    driver: str
    gpus: Tuple[ElementTree.Element, ...]
    cut: Tuple[str, ...]
    is_consistent: bool
    gpu_count: int
    outside: str


class _Answer(NamedTuple):
    """The GPUs by their ids, why GPUs are lost, by id ("" for what is unknown), and their count."""

    devices: Dict[str, List[Device]]
    lost: Dict[str, str]
    is_consistent: bool
    gpu_count: int = 0


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
    if not answer.is_consistent or (answer.lost and not answer.devices):
        # If one GPU is lost, old drivers report nothing else of the node.
        answer = _query_each(smi, kernel, answer, until)
    answer.lost.pop("", None)
    found = {bus: list(devices) for bus, devices in answer.devices.items()}
    for bus, why in answer.lost.items():
        problem = f"{TOOL} cannot reach it: {why or 'no reason given'}"
        found.setdefault(bus, [Device(_place(bus), readings=Readings(problem))])
    # A tool that the environment names may show only a part of what can be used.
    isolated = VARIABLE not in environ and len(found) < len(kernel)
    return Listing(_with_own_addresses(found), isolated)


def _query_each(smi: str, kernel: Tuple[str, ...], answer: _Answer, until: float) -> _Answer:
    """Ask for each GPU alone, by its bus id or else its index.

    The first GPU of an output comes before all names of processes, so it can be trusted.
    """
    devices: Dict[str, List[Device]] = {}
    lost = dict(answer.lost)
    for name in kernel or map(str, range(min(answer.gpu_count, _MOST_ASKED))):
        try:
            one = _query([smi, "-i", name], until)
        except HungDriverError:
            raise
        except DriverError as error:
            # A GPU of the kernel that is not shown at all belongs to another container.
            if not kernel or _NOT_SHOWN not in str(error):
                lost[name] = str(error)
            continue
        if one.devices:
            shown = next(iter(one.devices))
            devices[shown] = one.devices[shown]
            lost.pop(shown, None)
        else:
            why = next(iter(one.lost.values()), "") or answer.lost.get(name, "")
            lost[next(iter(one.lost), "") or name] = why
    return _Answer(devices, lost, True)


def _with_own_addresses(found: Mapping[str, List[Device]]) -> Tuple[Device, ...]:
    """Return the GPUs in the order of their bus ids, each with an address that no other one has."""
    devices: Dict[str, Device] = {}
    for bus in sorted(found):
        for index, device in enumerate(found[bus]):
            if device.address in devices:
                problem = f"{TOOL} reports the UUID of another GPU for it: {device.address}"
                device = device._replace(address=_place(bus, index), readings=Readings(problem))
            devices[device.address] = device
    return tuple(devices.values())


def _place(bus: str, index: int = 0) -> str:
    """Return the address of a GPU, or of a further MIG device of one, that reports no UUID."""
    return f"PCI-{bus}/{index}" if index else f"PCI-{bus}"


def _query(command: List[str], until: float) -> _Answer:
    code, out, err = run_bounded([*command, "-q", "-x"], until - time.monotonic())
    output = read_output(out)
    said = f"{output.outside if output else out}\n{err}"
    lost = {bus_id(bus) if bus else "": as_line(why.strip()) for bus, why in _LOST.findall(said)}
    if output is None or not (output.gpus or output.cut or output.is_consistent):
        if lost:
            return _Answer({}, lost, True)
        words = " ".join(as_line(line) for line in said.split("\n")).split()
        reason = "its output is incomplete" if output else " ".join(words)[:300] or "no output"
        raise DriverError(f"{TOOL} failed with exit code {code}: {reason}")
    if not output.gpus:
        lost.update((gpu, f"the output of {TOOL} about it is incomplete") for gpu in output.cut)
    has_slices = any(_slices(gpu) for gpu in output.gpus)
    listing = run_bounded([*command, "-L"], until - time.monotonic())[1] if has_slices else ""
    slices = _listed_slices(listing)
    devices: Dict[str, List[Device]] = {}
    for gpu in output.gpus:
        # The first one can be trusted: see `_query_each`.
        devices.setdefault(gpu.attrib["id"], _devices(gpu, output.driver, slices))
    return _Answer(devices, lost, output.is_consistent, output.gpu_count)


def read_output(out: str) -> Optional[Output]:
    """Return what `nvidia-smi -q -x` has printed; None if there is no document in it.

    It is no XML if the name of a process, or garbage in a GPU's memory, has characters of XML. So
    each GPU is read up to its processes, and of these each name is read as it is.
    """
    begin, end = out.find(_BEGIN), out.rfind(_END)
    if begin < 0:
        return None
    is_whole = end > begin
    head, *blocks = _GPU_BEGIN.split(out[begin:end] if is_whole else out[begin:])
    log = _parse("", head)
    counted = read_number(_text(log, "nvidia_smi_log/attached_gpus"))
    count = len(blocks) if counted is None else counted
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
    is_consistent = is_whole and not cut and len(ids) == len(blocks) <= count
    driver = as_line(_text(log, "nvidia_smi_log/driver_version"))
    outside = out[:begin] + (out[end:] if is_whole else "")
    return Output(driver, tuple(gpus), tuple(cut), is_consistent, count, outside)


def _parse(name: str, text: str) -> ElementTree.Element:
    """Return a new element with the elements of a text, whatever else the text has.

    Unlike XML's own parser it takes each character and each tag, and it knows no entities of a
    document type, so nothing can be expanded.
    """
    path = [ElementTree.Element(name)]
    done = 0
    for tag in _TAG.finditer(text):
        _add_text(path[-1], text[done : tag.start()])
        done = tag.end()
        is_end, name, rest = tag.groups()
        if not is_end:
            path.append(ElementTree.SubElement(path[-1], name))
            if rest.endswith("/"):
                path.pop()
        elif name in (element.tag for element in path[1:]):
            while path.pop().tag != name:
                pass
    _add_text(path[-1], text[done:])
    return path[0]


def _add_text(element: ElementTree.Element, text: str) -> None:
    if not len(element):
        element.text = (element.text or "") + unescape(text, _QUOTES)


def _add_processes(gpu: ElementTree.Element, text: str) -> None:
    """Add the list of a GPU's processes, as XML has it, from the text behind its first tag."""
    # The last end of the list is not that in the name of a process.
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
    """Return whether the list of processes lacks some of those that may compute on the GPU."""
    listed = gpu.find("processes")
    if listed is None:
        return False
    if not len(listed):
        return (listed.text or "").strip() not in _NO_LIST
    return any(
        one.tag != "process_info"
        or (_may_compute(one) and not _NUMERAL.fullmatch(_text(one, "pid")))
        for one in listed
    )


def _may_compute(process: ElementTree.Element) -> bool:
    return _text(process, "type") != "G"


def _id_of(gpu: ElementTree.Element, attributes: str, index: int) -> str:
    """Return what names a GPU for `nvidia-smi -i`, its bus id where there is one."""
    attribute = _ID.search(attributes)
    for place in (attribute.group(1) if attribute else "", _text(gpu, "pci/pci_bus_id")):
        if _BUS.fullmatch(bus_id(place)):
            return bus_id(place)
    uuid = _text(gpu, "uuid")
    return uuid if _UUID.fullmatch(uuid) else str(index)


def _devices(
    gpu: ElementTree.Element, driver: str, slices: Mapping[str, Tuple[str, str]]
) -> List[Device]:
    """Return a GPU, or its MIG devices.

    Args:
        slices: UUIDs and profiles of MIG devices: see `_listed_slices`.
    """
    uuid, bus = _text(gpu, "uuid"), gpu.attrib["id"]
    readings = _readings(gpu)
    if not _UUID.fullmatch(uuid):
        uuid = _place(bus)
        readings = Readings(readings.problem or f"{TOOL} reports no UUID of it")
    name = _text(gpu, "product_name")
    name = "" if _UNKNOWN.fullmatch(name) else as_line(name)
    whole = Device(uuid, name, _mib(gpu), driver, readings)
    if readings.problem or _text(gpu, "mig_mode/current_mig") != "Enabled":
        return [whole._replace(processes=_processes(gpu, None))]
    found = []
    for index, part in enumerate(_slices(gpu)):
        own = _text(part, "uuid")
        # Old drivers leave out the UUID here.
        key = own if _UUID.fullmatch(own) else f"{uuid} {_text(part, 'index')}"
        address, profile = slices.get(key, (key, ""))
        is_named = _UUID.fullmatch(address)
        found.append(
            whole._replace(
                address=address if is_named else _place(bus, index + 1),
                name=f"{name} MIG {as_line(profile)}".strip(),
                memory_mib=_mib(part),
                readings=readings if is_named else Readings(f"{TOOL} reports no UUID of it"),
                processes=_processes(gpu, _instance(part)),
            )
        )
    return found


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


def _processes(gpu: ElementTree.Element, instance: Optional[str]) -> Tuple[Process, ...]:
    """Return the processes that compute on a GPU, or on its MIG device with this instance."""
    return foreign_processes(
        Process(int(_text(one, "pid")), _text(one, "process_name"))
        for one in gpu.findall("processes/process_info")
        if _may_compute(one)
        and _PID.fullmatch(_text(one, "pid"))
        and instance in (None, _instance(one))
    )


def _instance(element: ElementTree.Element) -> str:
    return f"{_text(element, 'gpu_instance_id')}/{_text(element, 'compute_instance_id')}"


def _readings(gpu: ElementTree.Element) -> Readings:
    # Without the processes: one may have the name "GPU is lost".
    facts = (element for part in gpu if part.tag != "processes" for element in part.iter())
    said = {(element.text or "").strip() for element in facts}
    for problem in _FATAL:
        if problem in said:
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
    """Return the double-bit errors, which are listed by memory from Ampere on, in total before."""
    kinds = gpu.findall(f"ecc_errors/{counter}/*")
    numbers = [read_number(kind.text or "") for kind in kinds if "uncorrectable" in kind.tag]
    counts = [count for count in numbers if count is not None]
    if counts:
        return sum(counts)
    return read_number(_text(gpu, f"ecc_errors/{counter}/double_bit/total"))


def _clocks(gpu: ElementTree.Element, reason: str) -> Optional[bool]:
    for word in ("event", "throttle"):  # the older name
        state = _text(gpu, f"clocks_{word}_reasons/clocks_{word}_reason_{reason}")
        if state in ("Active", "Not Active"):
            return state == "Active"
    return None


def _flag(gpu: ElementTree.Element, path: str) -> Optional[bool]:
    return {"Yes": True, "No": False}.get(_text(gpu, path))


def _mib(element: ElementTree.Element) -> int:
    return read_mib(_text(element, "fb_memory_usage/total")) or 0


def read_mib(text: str) -> Optional[int]:
    """Return the MiB of "40960 MiB" or "40960"; None if that is no memory of a GPU."""
    number = read_number(text.partition(" ")[0])
    return number if number is not None and number <= _MOST_MIB else None


def read_number(text: str) -> Optional[int]:
    """Return the number that a text is; None for a negative one, and for any other text."""
    return int(text) if _NUMBER.fullmatch(text.strip()) else None


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()
