"""The `nvidia-smi` that comes first on the PATH of a node's containers and its NodeManager.

For simulated GPUs the program is a stand-in. For real GPUs it is a wrapper that shows only the
node's GPUs. Both are POSIX shell scripts that start no other program, because the discovery script
runs them in every container.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from xml.sax.saxutils import escape

from hopsgpu.devcluster.node_gpus import PlannedGpu

DRIVER = "550.54.15"
_USED = 3
# Field of --query-gpu → (value, unit or ""): all fields that the stand-in knows.
FIELDS: dict[str, tuple[Callable[[PlannedGpu], object], str]] = {
    "index": (lambda g: g.index, ""),
    "uuid": (lambda g: g.uuid, ""),
    "gpu_uuid": (lambda g: g.uuid, ""),
    "name": (lambda g: g.name, ""),
    "gpu_name": (lambda g: g.name, ""),
    "driver_version": (lambda g: DRIVER, ""),
    "pci.bus_id": (lambda g: _bus(g), ""),
    "memory.total": (lambda g: g.memory, "MiB"),
    "memory.used": (lambda g: _USED, "MiB"),
    "memory.free": (lambda g: g.memory - _USED, "MiB"),
    "utilization.gpu": (lambda g: "[N/A]" if g.slices else 0, "%"),
    "utilization.memory": (lambda g: "[N/A]" if g.slices else 0, "%"),
    "temperature.gpu": (lambda g: 30, ""),
    "power.draw": (lambda g: "50.00", "W"),
    "compute_mode": (lambda g: "Default", ""),
    "compute_cap": (lambda g: "8.0", ""),
    "persistence_mode": (lambda g: "Enabled", ""),
    "mig.mode.current": (lambda g: "Enabled" if g.slices else "Disabled", ""),
    "ecc.errors.uncorrected.volatile.total": (lambda g: 0, ""),
}


def _xml_frame(attached: int) -> tuple[str, str]:
    begin = f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
\t<driver_version>{DRIVER}</driver_version>
\t<cuda_version>12.4</cuda_version>
\t<attached_gpus>{attached}</attached_gpus>
"""
    return begin, "</nvidia_smi_log>\n"


def _xml_mig(gpu: PlannedGpu) -> str:
    """Return the elements of a GPU's MIG devices, without UUIDs, as old drivers print them."""
    if not gpu.slices:
        return ""
    mode = "\t\t<mig_mode>\n\t\t\t<current_mig>Enabled</current_mig>\n\t\t</mig_mode>\n"
    devices = "".join(
        f"""\t\t\t<mig_device>
\t\t\t\t<index>{part.index}</index>
\t\t\t\t<gpu_instance_id>{part.index}</gpu_instance_id>
\t\t\t\t<compute_instance_id>0</compute_instance_id>
\t\t\t\t<fb_memory_usage>
\t\t\t\t\t<total>{part.memory} MiB</total>
\t\t\t\t\t<used>{_USED} MiB</used>
\t\t\t\t\t<free>{part.memory - _USED} MiB</free>
\t\t\t\t</fb_memory_usage>
\t\t\t</mig_device>
"""
        for part in gpu.slices
    )
    return f"{mode}\t\t<mig_devices>\n{devices}\t\t</mig_devices>\n"


def _listing(gpu: PlannedGpu) -> str:
    """Return the lines of `nvidia-smi -L`."""
    return f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})\n" + "".join(
        f"  MIG {part.profile:<11} Device {part.index:>2}: (UUID: {part.uuid})\n"
        for part in gpu.slices
    )


def _xml_gpu(gpu: PlannedGpu) -> str:
    utilization = "N/A" if gpu.slices else "0 %"
    return f"""\t<gpu id="{_bus(gpu)}">
\t\t<product_name>{escape(gpu.name)}</product_name>
{_xml_mig(gpu)}\t\t<uuid>{gpu.uuid}</uuid>
\t\t<minor_number>{gpu.minor}</minor_number>
\t\t<fb_memory_usage>
\t\t\t<total>{gpu.memory} MiB</total>
\t\t\t<reserved>0 MiB</reserved>
\t\t\t<used>{_USED} MiB</used>
\t\t\t<free>{gpu.memory - _USED} MiB</free>
\t\t</fb_memory_usage>
\t\t<utilization>
\t\t\t<gpu_util>{utilization}</gpu_util>
\t\t\t<memory_util>{utilization}</memory_util>
\t\t</utilization>
\t\t<temperature>
\t\t\t<gpu_temp>30 C</gpu_temp>
\t\t\t<gpu_temp_max_threshold>92 C</gpu_temp_max_threshold>
\t\t\t<gpu_temp_slow_threshold>89 C</gpu_temp_slow_threshold>
\t\t</temperature>
\t\t<processes>
\t\t</processes>
\t</gpu>
"""


def standin_script(gpus: tuple[PlannedGpu, ...]) -> str:
    """Return a shell script that answers like an nvidia-smi of these GPUs.

    The script supports `-q -x`, `-L`, `--query-gpu` with the fields of FIELDS,
    `--query-compute-apps` (without any process), and `-i` with indices and UUIDs.
    """
    values = "".join(
        f"    {g.index}.{field}) value={shlex.quote(str(value(g)))} ;;\n"
        for g in gpus
        for field, (value, _) in FIELDS.items()
    )
    units = "".join(f"    {field}) unit={shlex.quote(u)} ;;\n" for field, (_, u) in FIELDS.items())
    names = "".join(f"{g.index}|{g.uuid}) gpu={g.index} ;; " for g in gpus)
    begin, end = _xml_frame(len(gpus))
    blocks = "".join(f"  {g.index}) printf '%s' {shlex.quote(_xml_gpu(g))} ;;\n" for g in gpus)
    listing = "".join(f"  {g.index}) printf '%s' {shlex.quote(_listing(g))} ;;\n" for g in gpus)
    return f"""#!/bin/sh
# A stand-in for nvidia-smi, written by hopsgpu's development cluster: its GPUs are simulated.
wanted='{" ".join(str(g.index) for g in gpus)}'
action=list fields= header=1 units=1

describe() {{  # GPU, field -> value, unit
  case "$2" in
{units}    *) echo "Field \\"$2\\" is not a valid field to query." ; exit 2 ;;
  esac
  case "$1.$2" in
{values}  esac
}}

select_gpus() {{
  wanted=
  IFS=,
  for one in $1; do
    case "$one" in {names}*) echo "No devices were found" ; exit 6 ;; esac
    wanted="$wanted $gpu"
  done
  unset IFS
}}

# As in a container of NVIDIA's runtime, which shows only the GPUs in this variable.
case "${{NVIDIA_VISIBLE_DEVICES:-all}}" in
  all) ;;
  none|void) wanted= ;;
  *) select_gpus "$NVIDIA_VISIBLE_DEVICES" ;;
esac

while [ $# -gt 0 ]; do
  case "$1" in
    -q|--query) ;;
    -x|--xml-format) action=xml ;;
    -qx|-xq) action=xml ;;
    -L|--list-gpus) action=list ;;
    --query-gpu=*) action=csv fields=${{1#*=}} ;;
    --query-compute-apps=*) action=apps fields=${{1#*=}} ;;
    --format=*)
      case ",$1," in *,noheader,*) header= ;; esac
      case ",$1," in *,nounits,*) units= ;; esac ;;
    -i|--id) select_gpus "$2"; shift ;;
    -i=*|--id=*) select_gpus "${{1#*=}}" ;;
    *) echo "the simulated nvidia-smi does not know $1" >&2; exit 2 ;;
  esac
  shift
done

row() {{  # GPU, or nothing for the header
  line= comma=
  IFS=,
  for field in $fields; do
    unset IFS
    field=${{field# }}
    describe "${{1:-0}}" "$field"
    if [ -z "$1" ]; then value="$field${{unit:+ [$unit]}}"
    elif [ -n "$units" ]; then value="$value${{unit:+ $unit}}"
    fi
    line="$line$comma$value" comma=', '
  done
  unset IFS
  printf '%s\\n' "$line"
}}

case "$action" in
xml)
  printf '%s' {shlex.quote(begin)}
  for gpu in $wanted; do case "$gpu" in
{blocks}  esac; done
  printf '%s' {shlex.quote(end)} ;;
apps)
  if [ -n "$header" ]; then printf '%s\\n' "$fields"; fi ;;
csv)
  if [ -n "$header" ]; then row ''; fi
  for gpu in $wanted; do row "$gpu"; done ;;
list)
  for gpu in $wanted; do case "$gpu" in
{listing}  esac; done ;;
esac
"""


def wrapper_script(smi: str, gpus: tuple[PlannedGpu, ...]) -> str:
    """Return a shell script that runs the real nvidia-smi for these GPUs only."""
    indices = ",".join(str(g.index) for g in gpus)
    smi = shlex.quote(smi)
    return f"""#!/bin/sh
# Written by hopsgpu's development cluster: this node's share of the machine's GPUs.
case " $* " in
  *" -i "*|*" -i="*|*" --id"*) exec {smi} "$@" ;;
esac
case "$1" in
  -*|'') exec {smi} -i {indices} "$@" ;;
esac
exec {smi} "$@"
"""


def _bus(gpu: PlannedGpu) -> str:
    return f"00000000:{gpu.index + 1:02X}:00.0"
