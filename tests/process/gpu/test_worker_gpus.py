"""The script by which a Spark Worker lists its GPUs, as the one file that is copied to a node."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hopsgpu.devcluster.node_gpus import plan_gpus
from hopsgpu.devcluster.nvidia_smi_standin import standin_script
from tests.bounds import HANG_SECONDS
from tests.unit.discovery_standins.node import pythons

INSTALLED = Path(__file__).resolve().parents[3] / "spark-scripts" / "worker-gpus"
PYTHONS = pythons()


def run(
    directory: Path, smi: str | None, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run the file on a node that has this nvidia-smi and nothing else."""
    copied = Path(shutil.copy(INSTALLED, directory / "worker-gpus"))
    programs = directory / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(python)
    if smi is not None:
        (programs / "nvidia-smi").write_text(smi)
        (programs / "nvidia-smi").chmod(0o755)
    return subprocess.run(
        [copied],
        env={"PATH": f"{programs}:/bin", "HOPSGPU_NVIDIA_SMI": str(programs / "nvidia-smi")},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("version", sorted(PYTHONS))
def test_the_uuids_of_all_gpus_are_listed(tmp_path: Path, version: str) -> None:
    gpus = plan_gpus(tmp_path, 1, 3).nodes["node1"]
    ran = run(tmp_path, standin_script(gpus), PYTHONS[version])
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == {"name": "gpu", "addresses": [gpu.uuid for gpu in gpus]}


def test_mig_devices_are_listed_in_place_of_their_gpus(tmp_path: Path) -> None:
    gpus = plan_gpus(tmp_path, 1, 2, ("3g.20gb", "1g.5gb")).nodes["node1"]
    answer = json.loads(run(tmp_path, standin_script(gpus)).stdout)
    assert answer["addresses"] == [device.uuid for gpu in gpus for device in gpu.slices]


@pytest.mark.parametrize(
    ("smi", "reason"),
    [
        (None, "HOPSGPU_NVIDIA_SMI"),
        (standin_script(()), "no GPU"),
        ("#!/bin/sh\necho driver mismatch\nexit 9\n", "driver mismatch"),
    ],
)
def test_without_a_gpu_it_fails_and_says_why(tmp_path: Path, smi: str | None, reason: str) -> None:
    ran = run(tmp_path, smi)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("hopsgpu worker-gpus: ")
    assert reason in ran.stderr
    assert "leave out the spark.worker.resource.gpu properties" in ran.stderr
