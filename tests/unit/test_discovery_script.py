"""The discovery script as Spark runs it: a process in a container's directory."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hopsgpu.discovery import script, shipping
from hopsgpu.spec import MOST_GPUS

UUIDS = [f"GPU-0000000{n}-aaaa-bbbb-cccc-dddddddddddd" for n in range(4)]
ALL = "printf '%s\\n' " + " ".join(UUIDS)


class Executor:
    """A process that runs the script as its child, as the executor's JVM does, and lives on."""

    def __init__(self, directory: Path, amount: int, environment: dict[str, str]) -> None:
        directory.mkdir()
        shutil.copy(script.__file__, directory / f"gpus-{amount}")
        code = (
            "import subprocess, sys\n"
            f"ran = subprocess.run(['./gpus-{amount}'], capture_output=True, text=True)\n"
            "print(repr((ran.returncode, ran.stdout, ran.stderr)), flush=True)\n"
            "sys.stdin.read()\n"
        )
        (directory / f"gpus-{amount}").chmod(0o755)
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.code, self.out, self.err = eval(self.process.stdout.readline())

    @property
    def gpus(self) -> list[str]:
        said = json.loads(self.out)
        assert said["name"] == "gpu"
        assert json.loads((self.directory / script.GIVEN_OUT).read_text()) == said["addresses"]
        return list(said["addresses"])

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate()


Start = Callable[..., Executor]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "bin").mkdir()
    executors: list[Executor] = []

    def started(amount: int, smi: str | None = None) -> Executor:
        tool = tmp_path / "bin" / "nvidia-smi"
        if smi != "":
            tool.write_text(f"#!/bin/sh\n{smi or ALL}\n")
            tool.chmod(0o755)
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        environment = {"PATH": path, "HOPSGPU_LEASE_DIR": str(tmp_path / "leases")}
        executors.append(Executor(tmp_path / f"container{len(executors)}", amount, environment))
        return executors[-1]

    yield started
    for executor in executors:
        executor.end()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (
        Path(script.__file__)
        .read_text()
        .replace("PATIENCE_SECONDS = 20.0", "PATIENCE_SECONDS = 0.3")
    )
    assert "= 0.3" in text
    (tmp_path / "impatient.py").write_text(text)
    monkeypatch.setattr(script, "__file__", str(tmp_path / "impatient.py"))


def test_each_executor_gets_other_gpus_and_exactly_its_amount(start: Start) -> None:
    first, second, third = start(1), start(2), start(1)
    assert len(first.gpus) == 1 and len(second.gpus) == 2 and len(third.gpus) == 1
    assert sorted(first.gpus + second.gpus + third.gpus) == UUIDS


def test_a_gpu_ends_with_its_executor_however_that_ends(start: Start) -> None:
    holder = start(4)
    assert holder.gpus == UUIDS
    waiting = time.monotonic()
    holder.end(signal.SIGKILL)
    assert start(4).gpus == UUIDS
    assert time.monotonic() - waiting < 10


def test_nothing_is_given_out_twice(start: Start, impatient: None) -> None:
    start(3)
    late = start(2)
    assert late.code == 1
    assert "2 GPUs were asked for; this node shows 4" in late.err
    assert "1 of them are not leased" in late.err
    assert late.out == ""
    assert not (late.directory / script.GIVEN_OUT).exists()
    assert len(start(1).gpus) == 1  # what the late one had taken is free again


@pytest.mark.parametrize(
    ("smi", "words"),
    [
        ("", "no nvidia-smi on this node"),
        ("echo 'driver mismatch' >&2; exit 9", "nvidia-smi failed (driver mismatch)"),
        ("echo 'No devices were found'", "this node shows 0 (none)"),
        ("exit 0", "this node shows 0 (none)"),
    ],
)
def test_a_node_without_gpus_says_so(start: Start, smi: str, words: str) -> None:
    if smi == "" and shutil.which("nvidia-smi", path="/usr/bin:/bin"):
        smi, words = "exit 1", "nvidia-smi failed"
    executor = start(1, smi)
    assert (executor.code, executor.out) == (1, "")
    assert words in executor.err


def test_a_lease_directory_that_is_a_link_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "leases").symlink_to(tmp_path / "elsewhere")
    executor = start(1)
    assert executor.code == 1
    assert "remove it" in executor.err


def test_a_lock_file_that_is_a_link_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    (tmp_path / "victim").write_text("dear")
    (tmp_path / "leases" / UUIDS[0]).symlink_to(tmp_path / "victim")
    executor = start(1)
    assert executor.code == 1
    assert (tmp_path / "victim").read_text() == "dear"


def test_a_lock_file_that_a_cleaner_removed_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "gpu").touch()
    removed = os.open(tmp_path / "gpu", os.O_RDWR)
    fcntl.flock(removed, fcntl.LOCK_EX)
    (tmp_path / "gpu").unlink()
    held = script.try_lease(tmp_path, "gpu")
    assert held is not None
    assert script.try_lease(tmp_path, "gpu") is None
    for descriptor in (removed, held):
        os.close(descriptor)


def test_all_users_of_the_node_may_take_the_locks(start: Start, tmp_path: Path) -> None:
    start(1)
    leases = tmp_path / "leases"
    assert leases.stat().st_mode & 0o7777 == 0o1777
    assert {f.stat().st_mode & 0o777 for f in leases.iterdir()} == {0o666}


def test_the_archive_has_the_script_under_a_name_for_each_amount(tmp_path: Path) -> None:
    with tarfile.open(shipping.pack_scripts(tmp_path / "s.tar.gz")) as archive:
        members = {member.name: member for member in archive.getmembers()}
    assert members.keys() == {f"gpus-{n}" for n in range(1, MOST_GPUS + 1)}
    assert all(member.mode & 0o111 for member in members.values())
    assert shipping.script_for(2) == f"./{shipping.ALIAS}/gpus-2"


def test_a_name_without_an_amount() -> None:
    with pytest.raises(script.Failure, match="does not end in -AMOUNT"):
        script.amount_of("gpus")
