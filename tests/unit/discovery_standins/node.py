"""A node on which the discovery script runs as it does there, and its executors."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hopsgpu.gpu import script_archive
from hopsgpu.gpu.node.discovery_script import CONTAINER_GPUS, WaitLimits
from tests.unit import discovery_standins as standins

IMPATIENT = WaitLimits(leased=0.3, busy=0.2, bad=0.1, driver=20.0)
# Runs the script as its child, as the executor's JVM does, and lives on.
_EXECUTOR = """
import subprocess, sys
ran = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
out, err = ran.communicate()
print(repr((ran.returncode, out.decode(), err.decode())), flush=True)
sys.stdin.read()
"""


@functools.cache
def pythons() -> dict[str, str]:
    """Version → path of every Python of this machine that the nodes may have."""
    homes = [Path(sys.executable).parent]
    if root := os.environ.get("PYENV_ROOT"):
        homes += sorted(Path(root, "versions").glob("3.*/bin"))
    homes += map(Path, os.environ.get("PATH", "").split(os.pathsep))
    found: dict[str, str] = {}
    for minor in range(6, 14):
        for home in homes:
            python = home / f"python3.{minor}"
            # A shim of a version manager is there for versions that are not.
            if (
                python.exists()
                and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
            ):
                found.setdefault(f"3.{minor}", str(python))
    return found


def holders(leases: Path) -> dict[int, set[str]]:
    """Pids of the processes that have files of a directory of leases open, and which."""
    found: dict[int, set[str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed just then
                    path = descriptor.readlink()
                    if path.parent == leases:
                        found.setdefault(int(process.name), set()).add(path.name)
    return found


def keepers(root: Path) -> list[int]:
    """Pids of what is left of scripts of the node that is played there."""
    mark = f"HOPSGPU_LEASE_DIR={root / 'leases'}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if mark in environ and b"/gpus-" in command and b"-c" not in command.split(b"\0"):
            found.append(int(process.name))
    return found


class Executor:
    """A process that ran the script as its child and lives on.

    Args:
        java: its program, by name, as the script looks for it.
    """

    def __init__(
        self, java: Path, directory: Path, command: list[str], environ: dict[str, str]
    ) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [java, "-c", _EXECUTOR, *command],
            cwd=directory,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, f"it said nothing; exit code {self.process.wait()}"
        self.code, self.out, self.err = ast.literal_eval(said)

    @property
    def given_out(self) -> list[dict[str, Any]]:
        """What the agent finds; the same GPUs as Spark was told of."""
        assert self.code == 0, self.err
        said = json.loads(self.out)
        assert said["name"] == "gpu"
        left = json.loads((self.directory / CONTAINER_GPUS).read_text())
        assert [gpu["address"] for gpu in left["gpus"]] == said["addresses"]
        return list(left["gpus"])

    @property
    def left(self) -> list[dict[str, Any]]:
        """What the agent finds, where a master has assigned the GPUs."""
        assert (self.code, self.out) == (0, ""), self.err
        return list(json.loads((self.directory / CONTAINER_GPUS).read_text())["gpus"])

    @property
    def isolated(self) -> bool:
        """Whether the agent finds that the container is."""
        return bool(json.loads((self.directory / CONTAINER_GPUS).read_text())["isolated"])

    @property
    def gpus(self) -> list[str]:
        return [gpu["address"] for gpu in self.given_out]

    @property
    def refusal(self) -> str:
        """What a script that gave out nothing said."""
        assert (self.code, self.out) == (1, "")
        assert not (self.directory / CONTAINER_GPUS).exists()
        lines = self.err.splitlines()
        *waits, failure = lines
        # What it waited for before that.
        assert all(line.startswith("hopsgpu discovery INFO: ") for line in waits), self.err
        assert failure.startswith("hopsgpu discovery: "), self.err
        return failure

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate()


class Node:
    """A node: its driver, which is played, its leases, and what YARN has unpacked there.

    Args:
        root: a directory.
        python: that `/usr/bin/env python3` finds.
    """

    def __init__(self, root: Path, python: str = sys.executable) -> None:
        self.root = root
        self._stack = contextlib.ExitStack()
        self._containers = 0
        self.bin = root / "bin"
        standins.install(self.bin)
        (self.bin / "python3").symlink_to(python)
        self.java = root / "java"
        self.java.symlink_to(sys.executable)
        unpacked = root / script_archive.ALIAS
        with tarfile.open(script_archive.pack_scripts(root / "scripts.tar.gz")) as archive:
            archive.extractall(unpacked)
        self.environ = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOPSGPU_LEASE_DIR": str(root / "leases"),
            "STANDIN_GPUS": str(root / "node.json"),
            "CONTAINER_ID": "container_1_0001_01_000002",
        }

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        # What played a driver that does not let its callers die.
        with contextlib.suppress(FileNotFoundError):
            hung = int((self.root / "node.json.hung").read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(hung, signal.SIGKILL)

    def play(self, gpus: list[dict[str, Any]], **more: Any) -> None:
        standins.play(self.root / "node.json", gpus, **more)

    def with_nvml(self) -> None:
        """From now on Python has a `pynvml`, and there is no nvidia-smi."""
        self.environ["PYTHONPATH"] = str(standins.HERE)
        (self.bin / "nvidia-smi").unlink()

    def wrap_python(self) -> None:
        """From now on `python3` is a shell script that does not become Python."""
        python = (self.bin / "python3").readlink()
        (self.bin / "python3").unlink()
        (self.bin / "python3").write_text(f'#!/bin/sh\n{python} "$@"\n')
        (self.bin / "python3").chmod(0o755)

    def start(self, amount: int, limits: WaitLimits | None = None) -> Executor:
        """An executor whose JVM has just run the script."""
        script = f"./{script_archive.ALIAS}/gpus-{amount}"
        if limits is not None:
            script += "-impatient"
            shipped = self.root / script
            text = self.root / script_archive.ALIAS / f"gpus-{amount}"
            shipped.write_text(
                text.read_text().replace(
                    f"main({amount})",
                    f"main({amount}, __import__('hopsgpu.gpu.node.discovery_script', fromlist='x')"
                    f".{limits})",
                )
            )
            shipped.chmod(0o755)
        return self._run(script)

    def claim(
        self, assigned: Sequence[str], limits: WaitLimits = IMPATIENT
    ) -> list[dict[str, Any]]:
        """What an executor of a standalone worker finds, to which these GPUs are assigned."""
        return self.claiming(assigned, limits).left

    def claiming(self, assigned: Sequence[str], limits: WaitLimits = IMPATIENT) -> Executor:
        script = f"./{script_archive.ALIAS}/gpus-{len(assigned)}-claim{self._containers}"
        shipped = self.root / script
        text = (self.root / script_archive.ALIAS / f"gpus-{len(assigned)}").read_text()
        module = "__import__('hopsgpu.gpu.node.discovery_script', fromlist='x')"
        call = f"main({len(assigned)}, {module}.{limits}, assigned={list(assigned)!r})"
        shipped.write_text(text.replace(f"main({len(assigned)}, gpu_type='')", call))
        shipped.chmod(0o755)
        return self._run(script)

    def _run(self, script: str) -> Executor:
        directory = self.root / f"container{self._containers}"
        self._containers += 1
        directory.mkdir()
        (directory / script_archive.ALIAS).symlink_to(self.root / script_archive.ALIAS)
        executor = Executor(self.java, directory, [script], self.environ)
        self._stack.callback(executor.end)
        return executor


def no_real_driver() -> bool:
    """Whether this machine has no nvidia-smi of its own, which the script would find."""
    return shutil.which("nvidia-smi", path="/usr/bin:/bin:/usr/local/nvidia/bin") is None
