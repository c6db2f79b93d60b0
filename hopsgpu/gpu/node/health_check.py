"""Check the health of a node's GPUs: the script that YARN's NodeManager runs.

`yarn-scripts/gpu-health-check` is this module and its imports in one file (see
`hopsgpu.gpu.script_archive`), for `yarn.nodemanager.health-checker.script.path`. If a line on
stdout begins with ERROR, YARN makes the node UNHEALTHY, and all its containers are lost, also those
without a GPU. Therefore the script prints ERROR only if no GPU of the node can be used, and no
program can still be computing on a GPU.

YARN ignores the output of a script that does not exit with 0, and makes the node UNHEALTHY if the
script takes longer than `yarn.nodemanager.health-checker.script.timeout-ms` (Hadoop's
NodeHealthScriptRunner.reportHealthStatus). Therefore this script exits with 0, and stops waiting
for the driver before that time.
"""

import contextlib
import os
import stat
import sys
import time
from pathlib import Path
from typing import List

from hopsgpu.gpu.node.devices import (
    DriverError,
    GpuDevice,
    HungDriverError,
    NoDriverError,
    ask_driver,
    bus_ids,
)
from hopsgpu.gpu.node.health import BAD, HEALTHY

PCI_DEVICES = Path("/sys/bus/pci/devices")
# Less than yarn-scripts/yarn-site-health.xml allows the whole script.
_SECONDS = 40.0
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
_UNUSABLE = "ERROR no GPU of this node can be used"
# The last check did not record an older hang: Hadoop checks every 10 minutes by default.
_LAST_CHECK_SECONDS = 3600.0


def hang_file() -> Path:
    # Not tempfile, which fails without a usable directory: the check must report even then.
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"hopsgpu-gpu-check-{os.geteuid()}-hang"


def _record_hang(file: Path) -> bool:
    """Record a hang; return whether the last check recorded one too.

    All users share the directory: files of other users are ignored.
    """
    before = 0.0
    with contextlib.suppress(OSError):  # there is no file
        status = file.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            before = status.st_mtime
    with contextlib.suppress(OSError):  # the disk is full, or the file is another user's
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(str(file), flags, 0o600), "wb") as note:
            os.utime(note.fileno())
    return 0 <= time.time() - before < _LAST_CHECK_SECONDS


def _forget_hang(file: Path) -> None:
    with contextlib.suppress(OSError):  # there is no file, or another user owns it
        file.unlink()


def report(seconds: float, hang: Path, pci_devices: Path = PCI_DEVICES) -> List[str]:
    """Return the lines to print about this node's GPUs; wait at most `seconds` for the driver."""
    try:
        devices = ask_driver(seconds).devices
    except DriverError as error:
        if not isinstance(error, HungDriverError):
            _forget_hang(hang)
        # Nodes without GPUs may be installed from the same image as nodes with GPUs.
        if not _has_gpus(pci_devices):
            return [f"no GPUs: {error}"]
        return [_problem_line(error, hang)]
    _forget_hang(hang)
    lines = [_line(device) for device in devices if device.verdict.state != HEALTHY]
    if devices and all(device.verdict.state == BAD for device in devices):
        return [f"{_UNUSABLE}: {'; '.join(lines)}"]
    return lines or ["1 GPU, healthy" if len(devices) == 1 else f"{len(devices)} GPUs, all healthy"]


def _problem_line(error: DriverError, hang: Path) -> str:
    """Return the line for a node that has GPUs of which the driver lists none."""
    if isinstance(error, NoDriverError):
        return f"this node has a GPU, but neither NVML nor nvidia-smi: {error}"
    if isinstance(error, HungDriverError):
        # The driver of an overloaded node may answer late once.
        if _record_hang(hang):
            return f"{_UNUSABLE}: {error}"
        return f"the first hang is not an ERROR yet: {error}"
    if bus_ids():
        # The kernel module has the GPUs. After an upgrade of the libraries alone ("Driver/library
        # version mismatch"), running computations continue and must not be killed. New containers
        # get the GPUs as bad ones: see `list_devices`.
        return f"new containers cannot use the GPUs of this node: {error}"
    return f"{_UNUSABLE}: {error}"


def _line(device: GpuDevice) -> str:
    state, reason = device.verdict
    return " ".join(f"GPU {device.address} {device.name} is {state}: {reason}".split())


def _has_gpus(pci_devices: Path) -> bool:
    """Return whether the kernel sees an NVIDIA display controller (class 03) on the PCI bus."""
    try:
        devices = list(pci_devices.iterdir())
    except OSError:
        return False
    return any(
        _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY_CLASS)
        for device in devices
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def main() -> int:
    """Print the report; the optional argument is the longest wait for the driver, in seconds."""
    try:
        seconds = float(sys.argv[1]) if sys.argv[1:] else _SECONDS
        lines = report(seconds, hang_file())
    except (OSError, ValueError) as error:
        lines = [f"the GPUs could not be checked: {error}"]
    output = "\n".join(" ".join(line.split()) for line in lines)
    # In an ASCII locale other characters would make the script fail, and YARN would ignore it.
    print(output.encode("ascii", "backslashreplace").decode("ascii"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
