"""The NodeManagers' health check, as the one file that an administrator copies to a node."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.discovery import check, devices, shipping
from hopsgpu.discovery.devices import Device, DriverError, HungDriverError, Listing, NoDriverError
from hopsgpu.discovery.health import Readings
from tests.unit import discovery_standins as standins
from tests.unit.discovery_standins import gpu
from tests.unit.discovery_standins.node import no_real_driver, pythons

INSTALLED = Path(__file__).resolve().parents[2] / "yarn-scripts" / "gpu-health-check"
PYTHONS = pythons()
LOST = 15
WELL = [gpu(0), gpu(1)]


def run(
    directory: Path,
    gpus: list[dict[str, Any]] | None,
    *arguments: str,
    python: str = sys.executable,
    **driver: Any,
) -> list[str]:
    """Lines that the file prints, copied to a node that has nothing else."""
    copied = Path(shutil.copy(INSTALLED, directory / "gpu-health-check"))
    standins.install(directory / "bin", smi=gpus is not None)
    (directory / "bin" / "python3").symlink_to(python)
    file = standins.play(directory / "node.json", gpus or [], **driver)
    environ = {"PATH": f"{directory / 'bin'}:/usr/bin:/bin", "STANDIN_GPUS": str(file)}
    ran = subprocess.run(
        [copied, *arguments],
        env=environ,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


def errors(lines: list[str]) -> list[str]:
    """As Hadoop's NodeHealthScriptRunner.hasErrors finds them."""
    return [line for line in lines if line.startswith("ERROR")]


def test_the_file_is_what_the_modules_are(tmp_path: Path) -> None:
    """Otherwise: python -m hopsgpu.discovery.shipping yarn-scripts/gpu-health-check"""
    assert os.access(INSTALLED, os.X_OK)
    packed = shipping.pack_health_check(tmp_path / "packed")
    assert INSTALLED.read_bytes() == packed.read_bytes()


@pytest.mark.parametrize("version", sorted(PYTHONS))
def test_every_python_checks(tmp_path: Path, version: str) -> None:
    lines = run(tmp_path, [gpu(0, error=LOST), gpu(1)], python=PYTHONS[version])
    assert len(lines) == 1 and "GPU is lost" in lines[0]
    assert not errors(lines)


def test_a_node_that_is_well(tmp_path: Path) -> None:
    assert run(tmp_path, WELL) == ["2 GPUs, all healthy"]


def test_a_line_for_each_gpu_that_is_not(tmp_path: Path) -> None:
    lines = run(tmp_path, [gpu(0, recovery=1), gpu(1, rows=[0, 1, 1, 0]), gpu(2)])
    assert len(lines) == 2 and not errors(lines)
    assert gpu(0)["uuid"] in lines[0] and "is bad" in lines[0]
    assert gpu(1)["uuid"] in lines[1] and "is watch" in lines[1]


def test_no_gpu_can_be_used(tmp_path: Path) -> None:
    lines = run(tmp_path, [gpu(0, recovery=1), gpu(1, error=LOST)])
    assert errors(lines) == lines and len(lines) == 1
    assert "GPU is lost" in lines[0] and "'Reset'" in lines[0]


def test_a_hung_driver(tmp_path: Path) -> None:
    try:
        lines = run(tmp_path, WELL, "1.5", hangs=True)
    finally:
        os.kill(int((tmp_path / "node.json.hung").read_text()), signal.SIGKILL)
    assert errors(lines) == lines and "the driver hangs" in lines[0]


def test_a_node_without_a_driver_keeps_its_containers(tmp_path: Path) -> None:
    lines = run(tmp_path, None)
    assert not errors(lines)
    if no_real_driver():
        assert lines[0].startswith("no GPUs: no nvidia-smi")


def test_no_line_of_a_driver_becomes_an_error(tmp_path: Path) -> None:
    """A product's name, or what a tool says, may hold any text."""
    lines = run(tmp_path, [gpu(0, name="x\nERROR", recovery=4), gpu(1)])
    assert len(lines) == 1 and not errors(lines)


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    """What the kernel has of a node with a network card and an NVIDIA GPU."""
    for name, vendor, kind in (("00", "0x15b3", "0x020000"), ("01", "0x10de", "0x030200")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    return tmp_path


def listing(monkeypatch: pytest.MonkeyPatch, answer: Listing | DriverError) -> None:
    def listed(seconds: float) -> Listing:
        if isinstance(answer, DriverError):
            raise answer
        return answer

    monkeypatch.setattr(check, "list_devices", listed)


def test_a_broken_driver_counts_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, pci: Path
) -> None:
    """And not on a node that was installed from the same image and has none."""
    listing(monkeypatch, DriverError("version mismatch"))
    assert errors(check.report(1.0, pci)) == [
        "ERROR no GPU of this node can be used: version mismatch"
    ]
    (pci / "01" / "class").write_text("0x068000\n")  # an NVSwitch
    assert check.report(1.0, pci) == ["no GPUs: version mismatch"]
    assert check.report(1.0, pci / "nowhere") == ["no GPUs: version mismatch"]


def test_what_else_the_driver_may_be(monkeypatch: pytest.MonkeyPatch, pci: Path) -> None:
    listing(monkeypatch, NoDriverError("no nvidia-smi"))
    assert not errors(check.report(1.0, pci))
    listing(monkeypatch, HungDriverError("it hangs"))
    assert errors(check.report(1.0, pci))
    # a GPU that has MIG enabled and no MIG device: an administrator's affair
    listing(monkeypatch, Listing(()))
    assert not errors(check.report(1.0, pci))


def test_a_hung_driver_whose_gpus_the_kernel_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Device("PCI-00000000:01:00.0", readings=Readings("the driver hangs"))
    listing(monkeypatch, Listing((bad,)))
    (line,) = check.report(1.0)
    assert line.startswith("ERROR") and "PCI-00000000:01:00.0" in line


def test_the_kernels_list_of_gpus(tmp_path: Path) -> None:
    (tmp_path / "0000:c1:00.0").mkdir()
    (tmp_path / "0000:0a:00.0").mkdir()
    assert devices.bus_ids(tmp_path) == ("00000000:0A:00.0", "00000000:C1:00.0")
    assert devices.bus_ids(tmp_path / "nowhere") == ()
