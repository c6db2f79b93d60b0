"""The NodeManagers' health check, as the one file that an administrator copies to a node."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.gpu import script_archive
from hopsgpu.gpu.node import devices, health_check
from hopsgpu.gpu.node.devices import DriverError, GpuDevice, HungDriverError, Listing, NoDriverError
from tests.bounds import HANG_SECONDS
from tests.unit import discovery_standins as standins
from tests.unit.discovery_standins import gpu
from tests.unit.discovery_standins.node import no_real_driver, pythons

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = ROOT / "yarn-scripts" / "gpu-health-check"
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
    """Return the lines that the file prints, copied to a node that has nothing else."""
    copied = Path(shutil.copy(INSTALLED, directory / "gpu-health-check"))
    standins.install(directory / "bin", smi=gpus is not None)
    (directory / "bin" / "python3").symlink_to(python)
    file = standins.play(directory / "node.json", gpus or [], **driver)
    environ = {
        "PATH": f"{directory / 'bin'}:/usr/bin:/bin",
        "STANDIN_GPUS": str(file),
        "TMPDIR": str(directory),
    }
    ran = subprocess.run(
        [copied, *arguments],
        env=environ,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


def errors(lines: list[str]) -> list[str]:
    """Find errors like Hadoop's NodeHealthScriptRunner.hasErrors."""
    return [line for line in lines if line.startswith("ERROR")]


def test_the_file_is_what_the_modules_are(tmp_path: Path) -> None:
    """To write them: python -m hopsgpu.gpu.script_archive ."""
    for name, (directory, _, _) in script_archive.PROGRAMS.items():
        installed = ROOT / directory / name
        assert os.access(installed, os.X_OK)
        packed = script_archive.pack_program(tmp_path / name)
        assert installed.read_bytes() == packed.read_bytes()


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


def test_a_hung_driver_on_a_node_without_gpus(tmp_path: Path) -> None:
    """The node was installed from the same image as nodes with GPUs."""
    try:
        lines = run(tmp_path, WELL, "6", hangs=True)
    finally:
        os.kill(int((tmp_path / "node.json.hung").read_text()), signal.SIGKILL)
    assert "the driver hangs" in lines[0]
    if not health_check._has_gpus(health_check.PCI_DEVICES):
        assert (
            lines[0].startswith("no GPUs")
            and not (tmp_path / health_check.hang_file().name).exists()
        )


def test_a_node_without_a_driver_keeps_its_containers(tmp_path: Path) -> None:
    lines = run(tmp_path, None)
    assert not errors(lines)
    if no_real_driver():
        assert lines[0].startswith("no GPUs: no nvidia-smi")


def test_no_line_of_a_driver_becomes_an_error(tmp_path: Path) -> None:
    """A product's name, or a tool's output, may contain any text."""
    lines = run(tmp_path, [gpu(0, name="x\nERROR", recovery=4), gpu(1)])
    assert len(lines) == 1 and not errors(lines)


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    """The kernel's PCI devices of a node with a network card and an NVIDIA GPU."""
    root = tmp_path / "pci"
    for name, vendor, kind in (("00", "0x15b3", "0x020000"), ("01", "0x10de", "0x030200")):
        (root / name).mkdir(parents=True)
        (root / name / "vendor").write_text(f"{vendor}\n")
        (root / name / "class").write_text(f"{kind}\n")
    return root


@dataclasses.dataclass
class Checked:
    """Checks on a simulated node, each with the record of the last one."""

    patch: pytest.MonkeyPatch
    pci: Path
    hang: Path

    def __call__(self, answer: Listing | DriverError, kernel: tuple[str, ...] = ()) -> str:
        def asked(seconds: float) -> Listing:
            if isinstance(answer, DriverError):
                raise answer
            return answer

        self.patch.setattr(health_check, "ask_driver", asked)
        self.patch.setattr(health_check, "bus_ids", lambda: kernel)
        (line,) = health_check.report(1.0, self.hang, self.pci)
        return line


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, pci: Path, tmp_path: Path) -> Checked:
    return Checked(monkeypatch, pci, tmp_path / "hang")


def test_an_error_is_told_in_a_locale_of_ascii(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """YARN ignores the output of a script that fails."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    (line,) = run(tmp_path, [{**gpu(0, error=LOST), "name": "NVIDIA é"}])
    assert line.startswith("ERROR") and "NVIDIA \\xe9" in line


GOOD = Listing((GpuDevice("GPU-a"),))
HANGS = HungDriverError("the driver hangs")
MISMATCH = DriverError("Driver/library version mismatch")


def test_a_broken_driver_counts_where_there_is_a_gpu(checked: Checked, pci: Path) -> None:
    """A node without GPUs may be installed from the same image."""
    assert checked(MISMATCH).startswith("ERROR") and str(MISMATCH) in checked(MISMATCH)
    (pci / "01" / "class").write_text("0x068000\n")  # an NVSwitch
    assert checked(MISMATCH) == f"no GPUs: {MISMATCH}"
    checked.pci = pci / "nowhere"
    for error in (MISMATCH, NoDriverError("no nvidia-smi"), HANGS, HANGS):
        assert checked(error) == f"no GPUs: {error}"


def test_what_computes_goes_on_after_an_upgrade_of_the_driver(checked: Checked) -> None:
    """The kernel module has the GPUs, and does not fit the new libraries."""
    line = checked(MISMATCH, kernel=("00000000:01:00.0",))
    assert not line.startswith("ERROR") and str(MISMATCH) in line


def test_missing_driver_is_reported(checked: Checked) -> None:
    line = checked(NoDriverError("no nvidia-smi"))
    assert not line.startswith("ERROR") and "has a GPU" in line


def test_no_mig_device_is_an_administrators_affair(checked: Checked) -> None:
    assert checked(Listing(())) == "0 GPUs, all healthy"


def test_a_driver_has_to_hang_twice(checked: Checked) -> None:
    """A node with overloaded disks answers late."""
    for other in (GOOD, MISMATCH, NoDriverError("none")):
        checks = [checked(HANGS).startswith("ERROR") for _ in range(3)]
        assert checks == [False, True, True]
        checked(other)


def test_a_hang_of_long_ago_is_not_the_last_checks(checked: Checked) -> None:
    checked(HANGS)
    os.utime(checked.hang, (1.0, 1.0))
    assert not checked(HANGS).startswith("ERROR")
    assert checked(HANGS).startswith("ERROR")


@pytest.mark.parametrize("trap", ["link", "directory", "fifo"])
def test_what_another_put_in_the_place_of_the_note(
    checked: Checked, tmp_path: Path, trap: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("dear")
    os.utime(victim, (1.0, 1.0))
    if trap == "link":
        checked.hang.symlink_to(victim)
    else:
        checked.hang.mkdir() if trap == "directory" else os.mkfifo(checked.hang)
    for _ in range(2):
        assert not checked(HANGS).startswith("ERROR")
    assert victim.read_text() == "dear" and victim.stat().st_mtime == 1.0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another")
def test_another_users_note_is_none(checked: Checked) -> None:
    checked(HANGS)
    os.chown(checked.hang, 65534, 65534)
    assert not checked(HANGS).startswith("ERROR")


def test_the_kernels_list_of_gpus(tmp_path: Path) -> None:
    (tmp_path / "0000:c1:00.0").mkdir()
    (tmp_path / "0000:0a:00.0").mkdir()
    assert devices.bus_ids(tmp_path) == ("00000000:0A:00.0", "00000000:C1:00.0")
    assert devices.bus_ids(tmp_path / "nowhere") == ()
