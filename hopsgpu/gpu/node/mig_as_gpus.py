"""An nvidia-smi for YARN's GPU plugin that shows each MIG device as a GPU.

YARN's plugin reads `nvidia-smi -q -x` and counts whole GPUs. With this program in
`yarn.nodemanager.resource-plugins.gpu.path-to-discovery-executables`, it counts MIG devices, and
whole GPUs beside them. `yarn-scripts/mig-nvidia-smi` is this module and its imports in one file
(see `hopsgpu.gpu.script_archive`).
"""

import os
import sys
from pathlib import Path
from typing import Dict, List, Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

from hopsgpu.gpu.node.devices import DriverError, GpuDevice
from hopsgpu.gpu.node.nvidia_smi import TOOL, find_nvidia_smi, read

# YARN gives up after 10 s.
_SECONDS = 9.0


def xml_of(devices: Sequence[GpuDevice]) -> str:
    """Return devices as GPUs in the XML of `nvidia-smi -q -x`, as far as YARN reads it."""
    numbers: Dict[str, int] = {}
    driver = next((device.driver for device in devices if device.driver), "")
    lines = [
        '<?xml version="1.0" ?>',
        "<nvidia_smi_log>",
        f"<driver_version>{escape(driver)}</driver_version>",
        f"<attached_gpus>{len(devices)}</attached_gpus>",
    ]
    for device in devices:
        # YARN uses the minor number only to isolate whole GPUs. MIG devices of one GPU share it.
        number = numbers.setdefault(device.parent or device.address, len(numbers))
        lines += _gpu(device, number)
    return "\n".join([*lines, "</nvidia_smi_log>", ""])


def _gpu(device: GpuDevice, number: int) -> List[str]:
    # YARN requires the used memory, but does not use it.
    memory = f"{device.memory_mib} MiB"
    return [
        f"<gpu id={quoteattr(device.address)}>",
        f"<product_name>{escape(device.name)}</product_name>",
        f"<uuid>{escape(device.address)}</uuid>",
        f"<minor_number>{number}</minor_number>",
        f"<fb_memory_usage><total>{memory}</total><used>0 MiB</used><free>{memory}</free>"
        "</fb_memory_usage>",
        "<utilization><gpu_util>N/A</gpu_util></utilization>",
        "</gpu>",
    ]


def without_program(environ: Mapping[str, str], program: str) -> Dict[str, str]:
    """Return the environment without the directories of the PATH that have this program."""
    places = environ.get("PATH", "").split(os.pathsep)
    return {
        **environ,
        "PATH": os.pathsep.join(
            place for place in places if not _is_same(Path(place or ".") / TOOL, program)
        ),
    }


def _is_same(path: Path, program: str) -> bool:
    try:
        return path.samefile(program)
    except OSError:
        return False


def main(arguments: Sequence[str], program: str) -> int:
    """Print the XML for `-q -x`, or become the node's nvidia-smi for other arguments."""
    environ = without_program(os.environ, program)
    try:
        smi = find_nvidia_smi(environ)
        if set(arguments) != {"-q", "-x"}:
            os.execv(smi, [smi, *arguments])
        sys.stdout.write(xml_of(read(environ, _SECONDS).devices))
    except (DriverError, OSError) as error:
        print(f"{TOOL} of MIG devices: {error}", file=sys.stderr)
        return 1
    return 0
