"""Packs the programs that run on nodes, where hopsgpu is not installed."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from hopsgpu.core import gpu_names
from hopsgpu.core.gpu_names import MIG_PROFILES, profile_of
from hopsgpu.core.spec import MAX_GPUS

# The directory in the container: Spark runs `./hopsgpu-discovery/gpus-2`.
ALIAS = "hopsgpu-discovery"
_SHEBANG = "#!/usr/bin/env python3\n"
# Spark passes no argument to the script, so each amount has a script of its own, and so has one MIG
# device of each profile.
_LAUNCHER = """import os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
from hopsgpu.gpu.node.discovery_script import main
sys.exit(main({amount}, gpu_type={gpu_type!r}))
"""
_CHECK = """import sys
sys.dont_write_bytecode = True
from hopsgpu.gpu.node.health_check import main
sys.exit(main())
"""
_MIG_AS_GPUS = """import sys
sys.dont_write_bytecode = True
from hopsgpu.gpu.node.mig_as_gpus import main
sys.exit(main(sys.argv[1:], sys.argv[0]))
"""
_WORKER_GPUS = """import sys
sys.dont_write_bytecode = True
from hopsgpu.gpu.node.worker_gpus import main
sys.exit(main())
"""
# The programs for administrators: name → directory, module and what runs.
PROGRAMS = {
    "gpu-health-check": ("yarn-scripts", "health_check", _CHECK),
    "mig-nvidia-smi": ("yarn-scripts", "mig_as_gpus", _MIG_AS_GPUS),
    "worker-gpus": ("spark-scripts", "worker_gpus", _WORKER_GPUS),
}


def script_for(amount: int, gpu_type: str | None = None) -> str:
    """Return the path, in the container, of the script that gives out `amount` GPUs.

    Args:
        gpu_type: words of the product name. If they name a profile of MIG devices, the script
            prefers MIG devices of that profile.
    """
    profile = profile_of(gpu_type or "")
    suffix = f"-{profile}" if amount == 1 and profile in MIG_PROFILES else ""
    return f"./{ALIAS}/gpus-{amount}{suffix}"


def marker_script(resource: str) -> str:
    return f"./{ALIAS}/{_marker_file(resource)}"


def _marker_file(resource: str) -> str:
    return f"marker-{resource.replace('/', '-')}"


def node_modules(*without: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of each module that the nodes need, for Python 3.6 or later."""
    for package in ("hopsgpu", "hopsgpu/core", "hopsgpu/gpu"):
        yield f"{package}/__init__.py", ""
    yield "hopsgpu/core/gpu_names.py", Path(gpu_names.__file__).read_text(encoding="utf-8")
    for file in sorted((Path(__file__).parent / "node").glob("*.py")):
        if file.stem not in without:
            yield f"hopsgpu/gpu/node/{file.name}", file.read_text(encoding="utf-8")


def pack_scripts(target: Path, markers: Iterable[str] = ()) -> Path:
    """Write the archive that YARN unpacks as `ALIAS`: scripts for amounts and markers, and modules.

    A marker is a YARN resource that marks nodes.
    """
    with tarfile.open(target, "w:gz") as archive:
        for amount in range(1, MAX_GPUS + 1):
            _add_launcher(archive, f"gpus-{amount}", amount, "")
        for profile in MIG_PROFILES:
            _add_launcher(archive, f"gpus-1-{profile}", 1, profile)
        for marker in sorted(set(markers)):
            answer = json.dumps({"name": marker, "addresses": ["0"]})
            _add(archive, _marker_file(marker), f"#!/bin/sh\necho '{answer}'\n", 0o755)
        for name, text in node_modules():
            _add(archive, name, text, 0o644)
    return target


def _add_launcher(archive: tarfile.TarFile, name: str, amount: int, gpu_type: str) -> None:
    _add(archive, name, _SHEBANG + _LAUNCHER.format(amount=amount, gpu_type=gpu_type), 0o755)


def _add(archive: tarfile.TarFile, name: str, text: str, mode: int) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.mode = mode
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def pack_program(target: Path) -> Path:
    """Write a program for nodes as one file, for an administrator to copy.

    The file is a zip archive that Python runs (PEP 441), uncompressed so that a pager can show it.

    Args:
        target: a path whose name is that of the program, one of PROGRAMS.
    """
    _, module, main = PROGRAMS[target.name]
    unneeded = {program_module for _, program_module, _ in PROGRAMS.values()} - {module}
    modules = node_modules("discovery_script", "leases", "lease_keeper", *unneeded)
    with target.open("wb") as file:
        file.write(_SHEBANG.encode())
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, text in [("__main__.py", main), *modules]:
                # A ZipInfo always has the same date, so the same modules give the same file.
                archive.writestr(zipfile.ZipInfo(name), text)
    target.chmod(0o755)
    return target


if __name__ == "__main__":
    # `python -m hopsgpu.gpu.script_archive .` in the checkout, after each change.
    for program, (directory, _, _) in PROGRAMS.items():
        pack_program(Path(sys.argv[1], directory, program))
