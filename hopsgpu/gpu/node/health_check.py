"""Check the health of a node's GPUs: the script that YARN's NodeManager runs.

`yarn-scripts/gpu-health-check` is this module, with what it needs, in one file; see
`hopsgpu.gpu.script_archive`. It is for `yarn.nodemanager.health-checker.script.path`: a line on
stdout that begins with ERROR makes the node UNHEALTHY, and all its containers are lost, also those
without a GPU. So the script prints ERROR only if no GPU of the node can be used, and nothing can
still be computing on one either. YARN ignores the output of a script that does not exit with 0, and
makes the node UNHEALTHY if the script takes longer than
`yarn.nodemanager.health-checker.script.timeout-ms` (Hadoop's
NodeHealthScriptRunner.reportHealthStatus). So this script exits with 0, and gives up on the driver
before that time.
"""

import contextlib
import os
import stat
import sys
import time
from pathlib import Path
from typing import List

from hopsgpu.gpu.node.devices import (
    Device,
    DriverError,
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
# An older hang was not noted by the last check: Hadoop's default is a check every 10 minutes.
_LAST_CHECK_SECONDS = 3600.0


def hang_file() -> Path:
    """Return the file that this user's checks leave for the next one while the driver hangs."""
    # Not tempfile, which fails without a usable directory: the check must report on GPUs even then.
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"hopsgpu-gpu-check-{os.geteuid()}-hang"


def _hung_before(file: Path) -> bool:
    """Note a hang; return whether the last check noted one too.

    All users share the directory: a file that another user put there means nothing.
    """
    before = 0.0
    with contextlib.suppress(OSError):  # there is no file
        found = file.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            before = found.st_mtime
    with contextlib.suppress(OSError):  # the disk is full, or the file is another user's
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(str(file), flags, 0o600), "wb") as note:
            os.utime(note.fileno())
    return 0 <= time.time() - before < _LAST_CHECK_SECONDS


def _forget(file: Path) -> None:
    with contextlib.suppress(OSError):  # there is no file, or it is another user's
        file.unlink()


def report(seconds: float, hang: Path, pci_devices: Path = PCI_DEVICES) -> List[str]:
    """Return the lines to print about this node's GPUs.

    Args:
        seconds: how long to wait for the driver.
        hang: file in which a check notes a hang for the next one.
        pci_devices: the kernel's directory of PCI devices.
    """
    try:
        devices = ask_driver(seconds).devices
    except DriverError as error:
        if not isinstance(error, HungDriverError):
            _forget(hang)
        # Nodes without GPUs may be installed from the same image as nodes with GPUs.
        if not _has_gpus(pci_devices):
            return [f"no GPUs: {error}"]
        return [_unanswered(error, hang)]
    _forget(hang)
    lines = [_line(device) for device in devices if device.verdict.state != HEALTHY]
    if devices and all(device.verdict.state == BAD for device in devices):
        return [f"{_UNUSABLE}: {'; '.join(lines)}"]
    return lines or ["1 GPU, healthy" if len(devices) == 1 else f"{len(devices)} GPUs, all healthy"]


def _unanswered(error: DriverError, hang: Path) -> str:
    """Return the line for a node that has GPUs, none of which the driver lists."""
    if isinstance(error, NoDriverError):
        return f"this node has a GPU, but neither NVML nor nvidia-smi: {error}"
    if isinstance(error, HungDriverError):
        # A node whose disks or memory are at their limit may answer late once.
        if _hung_before(hang):
            return f"{_UNUSABLE}: {error}"
        return f"the first hang is not an ERROR yet: {error}"
    if bus_ids():
        # The kernel module has the GPUs: after an upgrade of the libraries alone ("Driver/library
        # version mismatch") running computations continue, and must not be killed for it. New
        # containers get the GPUs as bad ones: see `list_devices`.
        return f"new containers cannot use the GPUs of this node: {error}"
    return f"{_UNUSABLE}: {error}"


def _line(device: Device) -> str:
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
    """Print the report; the optional argument is how many seconds to wait for the driver.

    Returns:
        Always 0.
    """
    try:
        seconds = float(sys.argv[1]) if sys.argv[1:] else _SECONDS
        lines = report(seconds, hang_file())
    except (OSError, ValueError) as error:
        lines = [f"the GPUs could not be checked: {error}"]
    said = "\n".join(" ".join(line.split()) for line in lines)
    # A NodeManager may run in an ASCII locale, in which printing fails; YARN ignores a script that
    # fails.
    print(said.encode("ascii", "backslashreplace").decode("ascii"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
