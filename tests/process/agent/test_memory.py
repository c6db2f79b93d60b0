"""What a rank's processes use: real processes, and the decision about them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.agent.memory import (
    MemoryUse,
    MemoryWatch,
    excess,
    kill_tree,
    measure_memory,
    surviving_processes,
    tree,
)
from hopsgpu.control.channel import Channel
from hopsgpu.errors import RankFailed
from hopsgpu.units import MIB
from tests.bounds import HANG_SECONDS
from tests.conftest import gone, until
from tests.process.attempts.test_attempt import launch, running_server

Start = Callable[[str], int]

HOLD = """
kept = bytearray(b'x') * (100 << 20)
print('ready', flush=True)
time.sleep(600)
"""

# As an agent that is a subreaper: its rank's child has left a child.
ORPHANED = """
import ctypes, os, subprocess, sys, time
from pathlib import Path
from hopsgpu.agent.memory import kill_tree, tree

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
orphan = "import os, time; os.fork() or (print(os.getpid(), flush=True), time.sleep(600))"
rank = subprocess.Popen(
    [sys.executable, "-c", "import subprocess, sys, time;"
     "subprocess.run([sys.executable, '-c', sys.argv[1]]); time.sleep(600)", orphan],
    stdout=subprocess.PIPE, start_new_session=True)
pid = int(rank.stdout.readline())
while int(Path(f"/proc/{pid}/stat").read_text().split()[3]) != os.getpid():
    time.sleep(0.05)
wanted, deadline = {rank.pid: 0, pid: os.getpid()}, time.monotonic() + 900
while tree(rank.pid) != wanted and time.monotonic() < deadline:
    time.sleep(0.05)  # who was between them is not reaped yet
print(tree(rank.pid) == wanted)
kill_tree(rank.pid)
"""

# pause() on a stack of its own, as clone(2) with CLONE_VM and CLONE_VFORK.
VFORKED = """
import ctypes
libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(64 << 10)
top = ctypes.c_void_p(ctypes.addressof(stack) + (60 << 10) & ~15)
SIGCHLD, CLONE_VM, CLONE_VFORK = 17, 0x100, 0x4000
arguments = libc.pause, top, SIGCHLD | CLONE_VM | CLONE_VFORK, None
print('ready', flush=True)
"""

FORKED = """
kept = bytearray(b'x') * (200 << 20)
for _ in range(4):
    if os.fork() == 0:
        time.sleep(600)
print('ready', flush=True)
time.sleep(600)
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code as a rank is started, and waits until it has printed something."""
    started = []

    def process(code: str) -> int:
        command = [sys.executable, "-c", f"import mmap, os, subprocess, sys, time\n{code}"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        started.append(child)
        assert child.stdout is not None and child.stdout.readline()
        return child.pid

    yield process
    for child in started:
        kill_tree(child.pid)
        child.communicate()


def total(use: MemoryUse) -> int:
    return sum(use.proportional.values())


def test_a_process_alone(start: Start) -> None:
    pid = start(HOLD)
    assert list(measure_memory(pid, 0).proportional) == [pid]
    assert 100 * MIB < total(measure_memory(pid, 0)) < 130 * MIB
    assert measure_memory(pid, 0).names[pid].startswith("python")


def test_below_the_threshold_only_resident_sets_are_read(start: Start) -> None:
    pid = start(HOLD)
    use = measure_memory(pid, 200 * MIB)
    assert (use.proportional, use.names) == ({}, {})
    assert 100 * MIB < use.resident[pid] < 130 * MIB


def test_forked_children_share(start: Start) -> None:
    pid = start(FORKED)
    use = measure_memory(pid, 0)
    assert len(use.resident) == 5
    assert sum(use.resident.values()) > 1000 * MIB
    assert 200 * MIB < total(use) < 300 * MIB
    watch = MemoryWatch(pid, 400 * MIB)
    assert [watch.poll() for _ in range(4)] == [None] * 4
    assert 200 * MIB < watch.peak < 300 * MIB


def test_a_watch_says_who_is_over(start: Start) -> None:
    pid = start(FORKED)
    watch = MemoryWatch(pid, 100 * MIB)
    assert watch.poll() is None
    assert watch.pause == 0.1  # to make sure
    problem = watch.poll()
    assert problem is not None
    assert " MiB of 100 MiB (" in problem and "memory_per_worker" in problem
    assert "5 processes: python" in problem and f"(pid {pid}) " in problem


def test_a_mapped_file_counts(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * (100 * MIB))
    pid = start(
        f"file = open({str(file)!r}, 'rb')\n"
        "kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print(sum(kept[::4096]), flush=True)\n"
        "time.sleep(600)"
    )
    assert 100 * MIB < total(measure_memory(pid, 0)) < 130 * MIB


def test_process_that_vanished_counts_nothing(start: Start) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert measure_memory(child.pid, -1).proportional == {child.pid: 0}
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert measure_memory(zombie.pid, -1).proportional == {zombie.pid: 0}
    zombie.wait()


def test_processes_may_come_and_go(start: Start) -> None:
    pid = start("print(1, flush=True)\nwhile True: subprocess.run(['sh', '-c', 'true & true'])")
    watch = MemoryWatch(pid, 100 * MIB)
    seen: set[int] = set()
    looks, deadline = 0, time.monotonic() + HANG_SECONDS
    while looks < 200 or (len(seen) <= 5 and time.monotonic() < deadline):
        assert watch.poll() is None
        seen.update(tree(pid))
        looks += 1
    assert len(seen) > 5
    assert 0 < watch.peak < 100 * MIB


def test_process_that_may_not_be_inspected_counts_with_its_rss(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = start(HOLD)
    open_file = os.open

    def refuse(path: str, *args: Any, **options: Any) -> int:
        if str(path).endswith("smaps_rollup"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open_file(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    use = measure_memory(pid, 0)
    assert use.proportional == use.resident
    assert use.resident[pid] > 100 * MIB


def test_orphans_of_the_session_count() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHANED], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_child_that_runs_in_its_parents_memory_counts_once(start: Start) -> None:
    """As between vfork and exec: subprocess.run in a rank that uses over half of its memory."""
    pid = start(f"{VFORKED}\nkept = bytearray(b'x') * (100 << 20)\nlibc.clone(*arguments)")
    assert until(lambda: len(tree(pid)) == 2)
    use = measure_memory(pid, 0)
    assert min(use.resident.values()) > 100 * MIB
    assert sorted(use.proportional.values())[0] == 0
    assert total(use) < 130 * MIB


def test_kill_reaches_other_sessions(start: Start) -> None:
    pid = start(
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(1, flush=True)\ntime.sleep(600)"
    )
    pids = tree(pid)
    assert len(pids) == 2
    kill_tree(pid)
    assert until(lambda: all(map(gone, pids)))


G = 1024 * MIB


def use(**sizes: int) -> MemoryUse:
    """A look at processes p1, p2, ... with their MiB."""
    by_pid = {int(name[1:]): size * MIB for name, size in sizes.items()}
    return MemoryUse(by_pid, by_pid, {pid: f"name{pid}" for pid in by_pid})


def test_at_the_limit_is_not_over() -> None:
    assert excess(use(p1=1024), use(p1=1024), G) is None
    assert excess(use(p1=1025), use(p1=1025), G) is not None


def test_both_looks_must_show_it() -> None:
    assert excess(use(p1=900), use(p1=2000), G) is None
    assert excess(use(p1=2000), use(p1=900), G) is None
    only_resident = MemoryUse({1: 2 * G})
    assert excess(only_resident, use(p1=2000), G) is None
    assert excess(use(p1=2000), only_resident, G) is None


def test_a_child_that_has_just_come_does_not_count() -> None:
    before, now = use(p1=900, p2=900), use(p1=900, p3=900)
    assert surviving_processes(before, now) == MemoryUse({1: 900 * MIB}, {1: 900 * MIB}, now.names)
    assert excess(before, now, G) is None


@pytest.mark.parametrize(
    ("mib", "limit", "said"),
    [
        (1331, G, "1.3 GiB of 1.0 GiB"),
        (1025, G, "1,025 MiB of 1,024 MiB"),
        (301, 300 * MIB, "301 MiB of 300 MiB"),
        (301, 301 * MIB - 1, "301 MiB of 300 MiB"),
        (70_000, 60 * G, "68.4 GiB of 60.0 GiB"),
    ],
)
def test_units_in_which_they_differ(mib: int, limit: int, said: str) -> None:
    over = excess(use(p1=mib), use(p1=mib), limit)
    assert over is not None and over.startswith(f"{said} (the limit is memory_per_worker")


def test_the_largest_are_named() -> None:
    many = use(p1=1, p2=1300, p3=3, p4=4, p5=5, p6=6, p7=0)
    said = excess(many, many, G)
    assert said == (
        "1.3 GiB of 1.0 GiB (the limit is memory_per_worker: raise it); the largest of its"
        " 6 processes: name2 (pid 2) 1,300 MiB, name6 (pid 6) 6 MiB, name5 (pid 5) 5 MiB,"
        " name4 (pid 4) 4 MiB, name3 (pid 3) 3 MiB"
    )


async def end(
    channel: Channel, rank: int, outcome: dict[str, str], *, stopped: bool, time: float
) -> None:
    await channel.send("started", run_id="run-1", rank=rank, pid=7)
    await channel.send(
        "ended",
        run_id="run-1",
        rank=rank,
        exit_code=None,
        signal="SIGKILL",
        peak_memory=1,
        outcome=outcome,
        log_tail=[],
        time=time,
        stopped=stopped,
        value=None,
        oom_kills=0,
        gpu_events=[],
    )


OVER = {"status": "over memory", "error": "1.3 GiB of 1.0 GiB (memory_per_worker); …"}
RESET = {"status": "raised", "error": "RuntimeError: Connection reset by peer"}


def failure_of(*ends: tuple[dict[str, str], bool, float]) -> RankFailed:
    """What a launch makes of its ranks' ends (outcome, stopped, time), told in this order."""
    gpus = tuple(f"g{rank}" for rank in range(len(ends)))
    pending = list(enumerate(ends))

    async def answers(channel: Channel) -> None:
        # One agent plays all containers, and is told to run for each.
        while pending:
            rank, (outcome, stopped, time) = pending.pop(0)
            await end(channel, rank, outcome, stopped=stopped, time=time)

    with running_server() as server:
        failure = launch(server, answers, gpus=gpus).training.run().failure
    assert failure is not None
    return failure.error


def test_the_rank_that_is_over_is_the_failure_though_its_neighbour_is_told_of_first() -> None:
    failure = failure_of((RESET, False, 7.0), (OVER, False, 6.9), (RESET, False, 7.1))
    assert failure.rank == 1
    assert ": 1.3 GiB of 1.0 GiB (memory_per_worker); …" in str(failure)


def test_one_that_is_over_while_it_is_stopped_is_not_the_failure() -> None:
    assert failure_of((RESET, False, 7.0), (OVER, True, 6.0)).rank == 0
