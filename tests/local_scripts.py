"""Scripts on a local master: each in a home directory of its own, with simulated GPUs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hopsgpu.devcluster.node_gpus import PlannedGpu
from hopsgpu.devcluster.nvidia_smi_standin import standin_script

UUIDS = [f"GPU-{str(n) * 8}-1111-2222-3333-444444444444" for n in range(3)]
OF_CLUSTERS = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "HOPSGPU_ROOT", "SPARK_HOME", "SPARK_CONF_DIR")


def simulate_gpus(nvidia_smi: Path, uuids: Sequence[str]) -> Path:
    """Write a stand-in for nvidia-smi that lists these GPUs."""
    gpus = (PlannedGpu(n, n, uuid, "Simulated A100", 40960) for n, uuid in enumerate(uuids))
    nvidia_smi.write_text(standin_script(tuple(gpus)))
    nvidia_smi.chmod(0o755)
    return nvidia_smi


def local_environ(home: Path, nvidia_smi: Path | None, *paths: Path) -> dict[str, str]:
    """Return the environment of a script that finds no cluster; `paths` are its PYTHONPATH."""
    (home / "tmp").mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in OF_CLUSTERS}
    environ |= {"HOME": str(home), "TMPDIR": str(home / "tmp")}
    environ |= {"HOPSGPU_LEASE_DIR": str(home / "leases")}
    if nvidia_smi is not None:
        environ["HOPSGPU_NVIDIA_SMI"] = str(nvidia_smi)
    if paths:
        environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return environ


@contextlib.contextmanager
def running(
    script: Path, home: Path, environ: dict[str, str], *arguments: Path
) -> Iterator[subprocess.Popen[str]]:
    """Start a script, whose first argument is its home; its errors go to `home / "errors"`."""
    pipe = subprocess.PIPE
    command = [sys.executable, *map(str, (script, home, *arguments))]
    with (home / "errors").open("w") as errors:
        process = subprocess.Popen(
            command, env=environ, stdin=pipe, stdout=pipe, stderr=errors, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
