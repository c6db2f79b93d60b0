"""The health check of a node's GPUs that YARN's NodeManager runs.

`yarn-scripts/gpu-health-check` is this, with what it needs, in one file; see
`hopsgpu.discovery.shipping`. It is for `yarn.nodemanager.health-checker.script.path`: a line on
stdout that begins with ERROR makes the node UNHEALTHY, and all its containers are lost, also
those without a GPU. So it is printed only when no GPU of the node can be used. The output of a
script that does not exit with 0 is ignored, and a script that takes longer than
`yarn.nodemanager.health-checker.timeout-ms` makes the node UNHEALTHY (Hadoop's
NodeHealthScriptRunner.reportHealthStatus): this one exits with 0, and gives up on the driver
before that.
"""

import sys
from pathlib import Path
from typing import List

from hopsgpu.discovery.devices import (
    Device,
    DriverError,
    HungDriverError,
    NoDriverError,
    list_devices,
)
from hopsgpu.discovery.health import BAD, HEALTHY

PCI_DEVICES = Path("/sys/bus/pci/devices")
# Less than yarn-scripts/yarn-site-health.xml allows the whole script.
_SECONDS = 40.0
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"


def report(seconds: float, pci_devices: Path = PCI_DEVICES) -> List[str]:
    """What to print of this node's GPUs.

    Args:
        seconds: to wait for the driver.
        pci_devices: the kernel's directory of them.
    """
    try:
        devices = list_devices(seconds).devices
    except NoDriverError as error:
        return [f"no GPUs: {error}"]
    except HungDriverError as error:
        return [f"ERROR no GPU of this node can be used: {error}"]
    except DriverError as error:
        # Nodes without GPUs may be installed from the same image as those that have some.
        has = _has_gpus(pci_devices)
        return [f"{'ERROR no GPU of this node can be used' if has else 'no GPUs'}: {error}"]
    lines = [_line(device) for device in devices if device.verdict.state != HEALTHY]
    if devices and all(device.verdict.state == BAD for device in devices):
        return [f"ERROR no GPU of this node can be used: {'; '.join(lines)}"]
    return lines or [f"{len(devices)} GPUs, all healthy"]


def _line(device: Device) -> str:
    state, reason = device.verdict
    return " ".join(f"GPU {device.address} {device.name} is {state}: {reason}".split())


def _has_gpus(pci_devices: Path) -> bool:
    """Whether the kernel sees an NVIDIA display controller on the PCI bus (class 03)."""
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
    """Prints the report; an argument is how many seconds to wait for the driver.

    Returns:
        0 always.
    """
    seconds = float(sys.argv[1]) if sys.argv[1:] else _SECONDS
    try:
        lines = report(seconds)
    except (OSError, ValueError) as error:
        lines = [f"the GPUs could not be checked: {error}"]
    print("\n".join(" ".join(line.split()) for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
