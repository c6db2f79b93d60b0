"""Processes of a cluster's containers, which all run on this machine, with those of others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hopsgpu.devcluster.kubernetes_network import network_of
from tests.conftest import until
from tests.in_ranks import mark_of


def is_of_cluster(process: Path, cluster: Path) -> bool:
    """Whether a process runs in a directory of a cluster, or in a control group of its pods."""
    if (process / "cwd").readlink().is_relative_to(cluster):
        return True
    return f"/{network_of(cluster).name}/" in (process / "cgroup").read_text()


def processes_of(cluster: Path, command: bytes) -> set[int]:
    """Those in all containers of a cluster whose command line has that in it."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_one = command in (process / "cmdline").read_bytes().replace(b"\0", b" ")
            if is_one and is_of_cluster(process, cluster):
                found.add(int(process.name))
        except OSError:
            continue
    return found


def inner_pid(pid: int) -> int:
    """The ID of a process in its own container, which may count them itself: a pod does."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nNSpid:")[2].partition("\n")[0].split()[-1])


def outer_pid(container: str, pid: int) -> int:
    """The ID on this machine of a process that a container counts as `pid`."""
    mark, groups, found = mark_of(container), set(), {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            group = (process / "cgroup").read_text()
            if mark in (process / "environ").read_bytes():
                groups.add(group)
            if inner_pid(int(process.name)) == pid:
                found[group] = int(process.name)
        except OSError:
            continue
    # A pod has control groups of its own, in which all its processes are.
    return next(outer for group, outer in found.items() if group in groups)


def python_workers(cluster: Path, container: str = "") -> list[tuple[int, int]]:
    """When each of Spark's Python workers began, and its pid; the latest runs the agent.

    Of all containers, or of one, by its ID.
    """
    found = []
    for pid in processes_of(cluster, b"pyspark.worker"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            above = Path(f"/proc/{fields[1]}/cmdline").read_bytes()
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if b"pyspark.worker" in above and (not container or mark_of(container) in environ):
            found.append((int(fields[19]), pid))
    return found


def pids_in(directory: Path, number: int) -> list[int]:
    """What so many ranks have written, each into its file."""
    assert until(lambda: len([f for f in directory.iterdir() if f.read_text()]) == number)
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
