"""Stand-ins for the driver: a fake `pynvml` and a fake `nvidia-smi` that play the same node.

What they play is a JSON file, which STANDIN_GPUS names: `driver`, `gpus` and, for a driver in
trouble, `hangs`, `nvml_error`, `crashes`, `smi_fails`, `smi_garbage`. A GPU has `bus`, `uuid`,
`name`, `mib` and what else it is to tell.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def gpu(number: int, **more: Any) -> dict[str, Any]:
    """A GPU that is well; `more` says what is else with it, and None takes a thing away."""
    told = {
        "bus": f"00000000:{number + 1:02X}:00.0",
        "uuid": f"GPU-0000000{number}-aaaa-bbbb-cccc-dddddddddddd",
        "name": "NVIDIA H100 80GB HBM3",
        "mib": 81559,
        "processes": [],
        "mig": None,
        "recovery": 0,
        "rows": [0, 0, 0, 0],
        "ecc": [0, 0],
        "clocks": 1,
    }
    return told | more


def mig_device(number: int, **more: Any) -> dict[str, Any]:
    """A MIG device of a GPU."""
    told = {
        "uuid": f"MIG-0000000{number}-1111-2222-3333-444444444444",
        "mib": 19968,
        "profile": "1g.20gb",
        "gi": number + 3,
        "processes": [],
    }
    return told | more


def play(file: Path, gpus: list[dict[str, Any]], **more: Any) -> Path:
    """Writes what the stand-ins play."""
    file.write_text(json.dumps({"driver": "550.54.15", "gpus": gpus} | more))
    return file


def install(bin_directory: Path, *, smi: bool = True) -> None:
    """Puts the fake nvidia-smi onto a PATH."""
    bin_directory.mkdir(exist_ok=True)
    if smi:
        tool = bin_directory / "nvidia-smi"
        tool.write_bytes((HERE / "nvidia_smi.py").read_bytes())
        tool.chmod(0o755)
