"""The node memory that a rank's processes use, counting each shared page once.

The proportional set size (PSS; proc(5), smaps_rollup) charges each of n processes that map a page
with 1/n of it. The kernel computes it page by page. It is therefore read only if the sum of the
resident sets (RSS; statm), which is never less, exceeds a threshold. GPU memory and files that are
not mapped do not count.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hopsgpu.agent.shared_memory import cleaners
from hopsgpu.linux import comm, parent_of
from hopsgpu.units import MIB

_GIB = 2**30
_MAX_NAMED = 5
_POLL_SECONDS = 0.5
# YARN checks memory every 3 s; check more often than that.
_MAX_POLL_SECONDS = 2.0
_CONFIRM_SECONDS = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)
# Fields that do not depend on how many processes share the pages.
_MAPPED = re.compile(rb"^(?:\w+-\w+ |Rss:|Anonymous:|Swap:).*", re.MULTILINE)
_INIT = 1


@dataclass(frozen=True)
class MemoryUse:
    """The memory that processes use at a moment, in bytes by pid.

    Attributes:
        resident: RSS, in which each process counts shared pages in full.
        proportional: PSS; empty if it was not read.
        names: commands (proc(5), comm); empty with `proportional`.
    """

    resident: Mapping[int, int]
    proportional: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)


def measure_memory(root: int, rss_threshold: int) -> MemoryUse:
    """Measure the RSS of a session leader's `tree`, and the PSS if the RSS exceeds a threshold.

    A process that exits meanwhile counts 0. One that may not be inspected (setuid) counts its RSS.
    """
    parents = tree(root)
    resident = {pid: _resident(pid) for pid in parents}
    if sum(resident.values()) <= rss_threshold:
        return MemoryUse(resident)
    rollups = {pid: _rollup(pid) for pid in parents}
    # Between vfork and exec a child shares its parent's memory: do not count it twice.
    mapped = {pid: _MAPPED.findall(rollup or b"") for pid, rollup in rollups.items()}
    vforked = {
        pid for pid, parent in parents.items() if mapped[pid] and mapped[pid] == mapped.get(parent)
    }
    proportional = {
        pid: 0 if pid in vforked else _proportional(pid, rollup) for pid, rollup in rollups.items()
    }
    return MemoryUse(resident, proportional, {pid: comm(pid) or "ended" for pid in parents})


def surviving_processes(before: MemoryUse, now: MemoryUse) -> MemoryUse:
    """Return the processes of `now` that also existed before.

    New processes do not count yet: while threads of its parent allocate memory, `measure_memory`
    cannot always recognise a child between vfork and exec.
    """
    return MemoryUse(
        {pid: size for pid, size in now.resident.items() if pid in before.resident},
        {pid: size for pid, size in now.proportional.items() if pid in before.resident},
        now.names,
    )


def excess(before: MemoryUse, now: MemoryUse, limit: int) -> str | None:
    """Return by how much processes exceed a limit, for people, or None if they do not.

    Both measurements must show the excess: a process that exits during a measurement lets shared
    pages count too often, because processes are read one after the other.
    """
    sizes = surviving_processes(before, now).proportional
    used = sum(sizes.values())
    if min(used, sum(before.proportional.values())) <= limit:
        return None
    largest = sorted(((p, b) for p, b in sizes.items() if b), key=lambda item: -item[1])
    named = [f"{now.names[p]} (pid {p}) {b / MIB:,.0f} MiB" for p, b in largest[:_MAX_NAMED]]
    which = "its process" if len(largest) == 1 else f"the largest of its {len(largest)} processes"
    return (
        f"{_amounts(used, limit)} (the limit is memory_per_worker: raise it);"
        f" {which}: {', '.join(named)}"
    )


class MemoryWatch:
    """Repeated measurements of one rank's processes.

    Attributes:
        peak: largest measured PSS. The real peak may be higher, between measurements or by less
            than a quarter.
        pause: seconds until the next measurement.
    """

    def __init__(self, root: int, limit: int) -> None:
        self.peak = 0
        self.pause = _POLL_SECONDS
        self._root = root
        self._limit = limit
        self._previous = MemoryUse({})
        # The largest RSS at which the PSS was read.
        self._checked_rss = 0

    def poll(self) -> str | None:
        """Measure once, and return the `excess`."""
        began = time.monotonic()
        # Newer kernels count per core, so the sum in statm is slightly stale.
        near_limit = self._limit - self._limit // 16
        now = measure_memory(self._root, min(near_limit, self._checked_rss * 5 // 4))
        counted = surviving_processes(self._previous, now)
        reason = excess(self._previous, now, self._limit)
        if now.proportional:
            self._checked_rss = max(self._checked_rss, sum(counted.resident.values()))
            self.peak = max(self.peak, sum(counted.proportional.values()))
        # Measure for at most a tenth of the time: 100 GB can take 0.3 s and more.
        seconds = time.monotonic() - began
        self.pause = min(max(_POLL_SECONDS, 9 * seconds), _MAX_POLL_SECONDS)
        if sum(now.proportional.values()) > self._limit:
            self.pause = _CONFIRM_SECONDS
        self._previous = now
        return reason


def _amounts(used: int, limit: int) -> str:
    # Choose a unit in which the amounts differ.
    if limit < _GIB or used < 1.1 * limit:
        return f"{-(-used // MIB):,} MiB of {limit // MIB:,} MiB"
    return f"{used / _GIB:,.1f} GiB of {limit / _GIB:,.1f} GiB"


def tree(root: int) -> dict[int, int]:
    """Return pid → parent of a session leader, its session's orphans, and descendants of both.

    An orphan's new parent is init, or a subreaper: this process or the root's parent.
    """
    adopters = dict.fromkeys((_INIT, os.getpid(), parent_of(root)))
    todo = [(pid, parent) for parent in adopters for pid in children(parent)]
    todo = [(root, 0), *(pair for pair in todo if session(pair[0]) == root)]
    parents: dict[int, int] = {}
    for pid, parent in todo:
        if pid not in parents:
            parents[pid] = parent
            todo += [(child, pid) for child in children(pid)]
    return parents


def kill_tree(root: int) -> None:
    """Send SIGKILL to a rank's process group and `tree`, except to `cleaners`.

    The rank must not have been reaped, or its pid may belong to another process.
    """
    pids = tree(root)
    spared = cleaners(pids)
    # A signal to the group also reaches processes that are forked now, but spared ones too.
    groups = [] if spared else [(os.killpg, root)]
    for kill, pid in [*groups, *((os.kill, pid) for pid in pids if pid not in spared)]:
        # The process may have exited, or belong to another user (setuid).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    # The kernel lists children by the thread that forked them.
    tasks = f"/proc/{pid}/task"
    try:
        threads = os.listdir(tasks)  # noqa: PTH208 - called up to some thousand times a second
    except OSError:
        return []
    pids: list[int] = []
    for thread in threads:
        with contextlib.suppress(OSError):
            pids += map(int, _read(f"{tasks}/{thread}/children").split())
    return pids


def session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _resident(pid: int) -> int:
    try:
        return int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _rollup(pid: int) -> bytes | None:
    """Return a process's smaps_rollup; b"" after its exit, None if the kernel refuses."""
    try:
        return _read(f"/proc/{pid}/smaps_rollup")
    except ProcessLookupError:
        return b""
    except OSError:
        return None


def _proportional(pid: int, rollup: bytes | None) -> int:
    if rollup is None:
        return _resident(pid)
    match = _PSS.search(rollup)
    return int(match[1]) * 1024 if match else 0


def _read(path: str) -> bytes:
    # This costs a third of Path.read_bytes.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        # The kernel returns a list of children in pieces of a page.
        while part := os.read(descriptor, 64 * 1024):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
