"""The GPUs of a node as its driver reports them, within a time limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Tuple, Union

from hopsgpu.gpu.node.health import STATES, HealthVerdict, Readings, judge_readings

# Without persistence mode the driver initialises each GPU again, which takes seconds per GPU.
ANSWER_SECONDS = 60.0
# The kernel module's list of a node's GPUs (NVIDIA's README, "The /proc Interface").
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")

# An option of the program that lists the GPUs: do not use NVML.
NO_NVML = "no-nvml"
_INNER_TIME_SHARE = 0.9
_MAX_QUOTED = 200
_MAX_NAME_LENGTH = 200
# CUDA's MPS server is not counted: it computes for its clients, which are listed too.
_MPS_SERVER = "nvidia-cuda-mps-server"


class DriverError(Exception):
    """The GPUs cannot be listed; the message says why."""


class NoDriverError(DriverError):
    """There is neither NVML nor nvidia-smi on this node."""


class HungDriverError(DriverError):
    """The driver did not answer in time."""


class GpuProcess(NamedTuple):
    """A process that computes on a GPU."""

    pid: int
    name: str


class GpuDevice(NamedTuple):
    """A GPU, or a MIG device of one.

    Attributes:
        address: UUID, in the form that CUDA_VISIBLE_DEVICES takes; "PCI-" and the bus id for a GPU
            that reports no UUID.
        name: the product; "" if it is unknown.
        memory_mib: memory in MiB; 0 if it is unknown.
        processes: processes that compute on it, as far as they are visible from here.
        parent: address of the GPU of which it is a MIG device; "" for a whole GPU.
    """

    address: str
    name: str = ""
    memory_mib: int = 0
    driver: str = ""
    readings: Readings = Readings()
    processes: Tuple[GpuProcess, ...] = ()
    parent: str = ""

    @property
    def verdict(self) -> HealthVerdict:
        return judge_readings(self.readings)

    @property
    def badness(self) -> int:
        """0 for a healthy GPU; the larger, the worse."""
        return STATES.index(self.verdict.state)

    def as_json(self) -> Dict[str, Any]:
        """Return the fields that the agent reads in the container's directory."""
        state, reason = self.verdict
        return {
            "address": self.address,
            "name": self.name,
            "memory_mib": self.memory_mib,
            "driver": self.driver,
            "state": state,
            "reason": reason,
            "parent": self.parent,
        }


class Listing(NamedTuple):
    """The GPUs that are visible from here.

    Attributes:
        devices: the GPUs, in the order of their PCI bus ids.
        is_isolated: whether the node is known to have GPUs that cannot be used from here.
    """

    devices: Tuple[GpuDevice, ...]
    is_isolated: bool = False


def list_devices(seconds: float = ANSWER_SECONDS) -> Listing:
    """Return the GPUs of this node, within a time limit.

    If the driver hangs or fails, all GPUs that the kernel lists are returned as bad ones.

    Raises:
        NoDriverError: there is neither NVML nor nvidia-smi.
        DriverError: the driver hangs (HungDriverError) or fails, or its answer is unintelligible,
            and the kernel lists no GPUs.
    """
    try:
        return ask_driver(seconds)
    except NoDriverError:
        raise
    except DriverError as error:
        devices = tuple(GpuDevice(f"PCI-{bus}", readings=Readings(str(error))) for bus in bus_ids())
        if not devices:
            raise
        return Listing(devices)


def ask_driver(seconds: float = ANSWER_SECONDS) -> Listing:
    """Return the GPUs of this node, from NVML if Python has `pynvml`, otherwise from nvidia-smi.

    If NVML fails, nvidia-smi is asked too.

    Raises:
        NoDriverError: there is neither NVML nor nvidia-smi.
        HungDriverError: the driver did not answer in `seconds`.
        DriverError: the driver failed, or its answer is unintelligible.
    """
    deadline = time.monotonic() + seconds
    why = ""
    # The second try is without NVML: its library may crash, or another module be named pynvml.
    for options in ((), (NO_NVML,)):
        seconds_left = deadline - time.monotonic()
        code, out, err = run_bounded([*_reading_program(seconds_left), *options], seconds_left)
        if code != 0:
            why = f"listing the GPUs failed with exit code {code}: {_last_line(err)}"
            continue
        try:
            # An imported module may print other lines.
            answers = [line for line in out.splitlines() if line.startswith("{")]
            return _decode(json.loads("".join(answers[-1:])))
        except (ValueError, KeyError, TypeError):
            why = f"the list of the GPUs cannot be parsed: {_last_line(out)[:_MAX_QUOTED]}"
    raise DriverError(why)


def _reading_program(seconds: float) -> List[str]:
    """Return the command that asks the driver in a process of its own, which can be abandoned.

    The program is found where this module is, possibly in an archive.
    """
    root = Path(__file__).resolve().parents[3]
    program = (
        "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)];"
        "from hopsgpu.gpu.node.device_query import main; main()"
    )
    # The commands that the program starts must give up before the program's own time is over.
    inner = seconds * _INNER_TIME_SHARE
    return [sys.executable or "python3", "-B", "-c", program, str(root), str(inner)]


def encode(answer: Union[Listing, DriverError]) -> Dict[str, Any]:
    """Return the answer as the JSON fields that `ask_driver` reads."""
    if isinstance(answer, DriverError):
        return {"error": type(answer).__name__, "reason": str(answer)}
    devices = [
        {**device._asdict(), "readings": device.readings._asdict()} for device in answer.devices
    ]
    return {"devices": devices, "isolated": answer.is_isolated}


def _decode(answer: Dict[str, Any]) -> Listing:
    if "error" in answer:
        kinds = {kind.__name__: kind for kind in (NoDriverError, HungDriverError)}
        raise kinds.get(answer["error"], DriverError)(answer["reason"])
    # A GPU that is listed twice counts once.
    devices = {device.address: device for device in map(_device, answer["devices"])}
    return Listing(tuple(devices.values()), answer["isolated"])


def _device(fields: Dict[str, Any]) -> GpuDevice:
    readings = Readings(**fields.pop("readings"))
    processes = tuple(GpuProcess(*process) for process in fields.pop("processes"))
    return GpuDevice(readings=readings, processes=processes, **fields)


def foreign_processes(processes: Iterable[GpuProcess]) -> Tuple[GpuProcess, ...]:
    """Return the processes that take a GPU from its lessee.

    A process that is not visible from here has ended, or belongs to another PID namespace.
    """
    return tuple(
        GpuProcess(process.pid, as_line(process.name))
        for process in processes
        if not process.name.endswith(_MPS_SERVER) and _is_alive(process.pid)
    )


def as_line(name: str) -> str:
    """Return a name as a short text without control characters, for logs.

    The users of a node choose the names of processes, and a GPU's memory may contain garbage.
    """
    characters = name[:_MAX_NAME_LENGTH]
    return "".join(char if char.isprintable() else "\ufffd" for char in characters)


def _is_alive(pid: int) -> bool:
    try:
        # This works for other users' processes too; /proc may be mounted with hidepid.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def bus_ids(directory: Path = DRIVER_GPUS) -> Tuple[str, ...]:
    """Return the PCI bus ids of the GPUs that the kernel module has, without using a GPU."""
    try:
        return tuple(sorted(bus_id(gpu.name) for gpu in directory.iterdir()))
    except OSError:
        return ()  # no driver, or a container that hides it


def bus_id(text: str) -> str:
    """Return a PCI bus id in NVML's form, with a domain of eight digits."""
    domain, _, rest = text.upper().partition(":")
    return f"{domain.zfill(8)}:{rest}"


def run_bounded(command: Sequence[str], seconds: float) -> Tuple[int, str, str]:
    """Run a command that asks the driver; return its exit code, stdout and stderr.

    Raises:
        HungDriverError: the command takes longer than `seconds`, and was abandoned.
        OSError: the command cannot be started.
    """
    # In a process group of its own, to be killed with its children. In another directory, because
    # YARN must be able to remove the container's. Without our stdout, whose end Spark waits for.
    process = subprocess.Popen(
        command,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # SIGKILL does not end a process in the driver's uninterruptible sleep: do not wait for it.
        process.poll()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise HungDriverError(
                f"the driver hangs: no answer in {max(round(seconds, 1), 0):g} s"
            ) from None
        raise
    return process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
