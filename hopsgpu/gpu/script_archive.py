"""Packs the programs that run on nodes, where hopsgpu is not installed."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from hopsgpu.core.spec import MAX_GPUS

# The directory in the container: Spark runs `./hopsgpu-discovery/gpus-2`.
ALIAS = "hopsgpu-discovery"
_SHEBANG = "#!/usr/bin/env python3\n"
# Spark passes no argument to the script, so each amount has a script of its own.
_LAUNCHER = """import os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
from hopsgpu.gpu.node.discovery_script import main
sys.exit(main({amount}))
"""
_CHECK = """import sys
sys.dont_write_bytecode = True
from hopsgpu.gpu.node.health_check import main
sys.exit(main())
"""


def script_for(amount: int) -> str:
    """Return the path, in the container, of the script that gives out `amount` GPUs."""
    return f"./{ALIAS}/gpus-{amount}"


def marker_script(resource: str) -> str:
    return f"./{ALIAS}/{_marker_file(resource)}"


def _marker_file(resource: str) -> str:
    return f"marker-{resource.replace('/', '-')}"


def node_modules(*without: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of each module that the nodes need, for Python 3.6 or later."""
    yield "hopsgpu/__init__.py", ""
    yield "hopsgpu/gpu/__init__.py", ""
    for file in sorted((Path(__file__).parent / "node").glob("*.py")):
        if file.stem not in without:
            yield f"hopsgpu/gpu/node/{file.name}", file.read_text(encoding="utf-8")


def pack_scripts(target: Path, markers: Iterable[str] = ()) -> Path:
    """Write the archive that YARN unpacks as `ALIAS`: scripts for amounts and markers, and modules.

    A marker is a YARN resource that marks nodes.
    """
    with tarfile.open(target, "w:gz") as archive:
        for amount in range(1, MAX_GPUS + 1):
            _add(archive, f"gpus-{amount}", _SHEBANG + _LAUNCHER.format(amount=amount), 0o755)
        for marker in sorted(set(markers)):
            answer = json.dumps({"name": marker, "addresses": ["0"]})
            _add(archive, _marker_file(marker), f"#!/bin/sh\necho '{answer}'\n", 0o755)
        for name, text in node_modules():
            _add(archive, name, text, 0o644)
    return target


def _add(archive: tarfile.TarFile, name: str, text: str, mode: int) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.mode = mode
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def pack_health_check(target: Path) -> Path:
    """Write the NodeManagers' health check as one file, for an administrator to copy.

    The file is a zip archive that Python runs (PEP 441), uncompressed so that a pager can show it.
    """
    modules = node_modules("discovery_script", "leases", "lease_keeper")
    with target.open("wb") as file:
        file.write(_SHEBANG.encode())
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, text in [("__main__.py", _CHECK), *modules]:
                # A ZipInfo always has the same date, so the same modules give the same file.
                archive.writestr(zipfile.ZipInfo(name), text)
    target.chmod(0o755)
    return target


if __name__ == "__main__":
    # `python -m hopsgpu.gpu.script_archive yarn-scripts/gpu-health-check`, after each change.
    pack_health_check(Path(sys.argv[1]))
