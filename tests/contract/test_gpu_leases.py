"""Leases of GPUs under kill -9 at any moment: never two owners, never a leak.

Real processes, real locks and the real keeper; the GPUs are addresses only. Each executor has
its GPU's marker locked while it lives: the kernel drops that lock before anybody can see the
executor's end, so a marker that is locked already is a second owner.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hopsgpu.discovery.keeper import Watched, keeping
from hopsgpu.discovery.leases import Leases, lease_directory
from tests.conftest import until

ROUNDS = 200
EXECUTORS = 8
GPUS = [f"GPU-{n}" for n in range(3)]
# A round's executors are killed within this, in seconds; some of them while they ask.
ROUND = 0.06
ASK = 0.04


def script(directory: Path, executor: int, told: int) -> None:
    """What the discovery script does with its leases, and says to the executor."""
    with Watched(executor) as watched, Leases(directory) as leases:
        if os.getppid() != executor:
            return
        until_then = time.monotonic() + ASK
        while not any(leases.take(gpu) for gpu in random.sample(GPUS, len(GPUS))):
            if time.monotonic() > until_then:
                return
            time.sleep(0.002)  # another's end is nothing that anybody tells of
        with keeping(leases, watched) as stay:
            os.write(told, leases.held[0].encode())
            stay()


def executor(directory: Path, marks: Path, violations: int) -> None:
    """The life of an executor: it asks for a GPU, and computes until it is killed."""
    me = os.getpid()
    reading, writing = os.pipe()
    asked = forked(lambda: script(directory, me, writing))
    os.close(writing)
    gpu = os.read(reading, 100).decode()
    os.waitpid(asked, 0)
    if not gpu:
        return
    mark = os.open(marks / gpu, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(violations, b"+")
    except BlockingIOError:
        os.write(violations, b"!")
    signal.pause()


def forked(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)  # also where who was to be told is dead
    return pid


def all_taken(leases: Leases) -> bool:
    for gpu in GPUS:
        if gpu not in leases.held:
            leases.take(gpu)
    return len(leases.held) == len(GPUS)


@pytest.fixture
def running() -> Iterator[list[int]]:
    """Pids of executors, none of which outlives the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_never_two_owners_never_a_leak(tmp_path: Path, running: list[int]) -> None:
    seed = int(os.environ.get("HOPSGPU_TEST_SEED", time.time()))
    print(f"HOPSGPU_TEST_SEED={seed}")
    chance = random.Random(seed)
    directory = lease_directory({"HOPSGPU_LEASE_DIR": str(tmp_path / "leases")})
    marks = tmp_path / "marks"
    marks.mkdir()
    owned, violations = os.pipe()
    owners = 0
    for _ in range(ROUNDS):
        begun = time.monotonic()
        ends = []
        for _ in range(EXECUTORS):
            running.append(forked(lambda: executor(directory, marks, violations)))
            ends.append((begun + chance.uniform(0, ROUND), running[-1]))
        for end, pid in sorted(ends):
            time.sleep(max(0.0, end - time.monotonic()))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            running.remove(pid)
        while select.select([owned], [], [], 0)[0]:
            said = os.read(owned, 4096)
            assert b"!" not in said, f"a GPU had two owners; seed {seed}"
            owners += len(said)
        with Leases(directory) as all_of_them:
            assert until(lambda: all_taken(all_of_them), 10, 0.002), (
                f"a GPU stayed leased; seed {seed}"
            )
    for descriptor in (owned, violations):
        os.close(descriptor)
    # Otherwise the executors were killed too early for anything to be shown.
    print(f"{owners} owners in {ROUNDS} rounds")
    assert owners >= ROUNDS
