"""Processes of the cluster's containers, which all run on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.conftest import until


def executor_jvm() -> int:
    """The executor's JVM: the keeper watches it; it is the container's only java."""
    own = os.environ["CONTAINER_ID"].encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_java = (process / "comm").read_text() == "java\n"
            if is_java and b"CONTAINER_ID=" + own in (process / "environ").read_bytes():
                return int(process.name)
        except OSError:
            continue
    raise LookupError("no JVM of this container")


def python_workers() -> list[tuple[int, int]]:
    """When each of Spark's Python workers began, and its pid; the latest runs the agent."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            fields = (process / "stat").read_text().rpartition(") ")[2].split()
            above = Path(f"/proc/{fields[1]}/cmdline").read_bytes()
        except OSError:
            continue
        if b"pyspark.worker" in command and b"pyspark.worker" in above:
            found.append((int(fields[19]), int(process.name)))
    return found


def pids_in(directory: Path, number: int) -> list[int]:
    """What so many ranks have written, each into its file."""
    assert until(lambda: len([f for f in directory.iterdir() if f.read_text()]) == number, 90)
    return [int((directory / str(rank)).read_text()) for rank in range(number)]


def family(pid: int) -> list[int]:
    """A process and all that descends from it."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = (thread / "children").read_text()
        except OSError:  # it has just ended
            continue
        found += [process for child in children.split() for process in family(int(child))]
    return found


def signal_all(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process and to all that descends from it."""
    for process in family(pid):
        os.kill(process, number)
