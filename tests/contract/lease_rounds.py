"""Executors that lease GPUs, and are killed; a program of its own, as a small process forks fast.

Real processes, real locks and the real keepers; the GPUs are addresses only. Executors, scripts
and keepers are killed; of a GPU's two keepers one at a time, as only both at once have its lock.
Each executor has its GPU's marker locked while it lives: the kernel drops that lock before anybody
can see the executor's end, so a marker that is locked already is a second owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from hopsgpu.gpu.node.lease_keeper import WatchedProcess, start_keepers
from hopsgpu.gpu.node.leases import Leases, lease_directory
from tests.conftest import gone, until
from tests.unit.discovery_standins.node import holders

# More rounds are played within this, in seconds, where a slow machine has not shown enough.
MOST_SECONDS = 180.0
EXECUTORS = 8
GPUS = [f"GPU-{n}" for n in range(3)]
# A round's executors are killed within this, in seconds; some of them while they ask.
ROUND = 0.06
ASK = 0.04
# How often a keeper is killed before the next executor is; and a script, within SCRIPT seconds.
KEEPERS_KILLED = 0.1
SCRIPTS_KILLED = 0.2
SCRIPT = 0.02


def script(directory: Path, executor: int, told: int) -> None:
    """What the discovery script does with its leases, and says to the executor."""
    with WatchedProcess(executor) as watched, Leases(directory) as leases:
        if os.getppid() != executor:
            return
        until_then = time.monotonic() + ASK
        while not any(leases.take(gpu) for gpu in random.sample(GPUS, len(GPUS))):
            if time.monotonic() > until_then:
                return
            time.sleep(0.002)  # another's end is nothing that anybody tells of
        with start_keepers(leases, watched) as stay:
            os.write(told, leases.addresses[0].encode())
            stay()


def executor(directory: Path, marks: Path, told: int) -> None:
    """The life of an executor: it asks for a GPU, and computes until it is killed.

    It tells "+" of a GPU that it has, "!" of one that another has too, "-" of a script that was
    killed.
    """
    me = os.getpid()
    reading, writing = os.pipe()
    asked = forked(lambda: script(directory, me, writing))
    os.close(writing)
    if random.random() < SCRIPTS_KILLED:
        time.sleep(random.uniform(0, SCRIPT))
        os.kill(asked, signal.SIGKILL)
    gpu = os.read(reading, 100).decode()
    _, status = os.waitpid(asked, 0)
    if os.WIFSIGNALED(status):
        os.write(told, b"-")
    if status or not gpu:
        return  # as Spark gives up an executor whose script failed
    mark = os.open(marks / gpu, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(told, b"+")
    except BlockingIOError:
        os.write(told, b"!")
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
        if gpu not in leases.addresses:
            leases.take(gpu)
    return len(leases.addresses) == len(GPUS)


def kill_a_keeper(directory: Path, chance: random.Random) -> bool:
    """Kills a GPU's keeper; says whether there was one.

    Returns once the other one is not alone: to kill both is to end the lease.
    """
    having = holders(directory)
    keepers = [pid for pid in sorted(having) if _is_keeper(pid)]
    if not keepers:
        return False
    pid = chance.choice(keepers)
    with contextlib.suppress(ProcessLookupError):  # its executor has ended
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: gone(pid), step=0.001)
    (gpu,) = having[pid]
    assert until(lambda: _none_or_both(directory, gpu), step=0.001)
    return True


def _is_keeper(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _none_or_both(directory: Path, gpu: str) -> bool:
    having = [pid for pid, gpus in holders(directory).items() if gpu in gpus]
    # With a script among them it is not known yet whether there will be keepers.
    return all(map(_is_keeper, having)) and len(having) != 1


@contextlib.contextmanager
def executors() -> Iterator[list[int]]:
    """Pids of executors, none of which lives on."""
    pids: list[int] = []
    try:
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def enough_of(rounds: int) -> int:
    """Owners, killed keepers and killed scripts; with fewer of them nothing would be shown."""
    return rounds // 4


def play(directory: Path, marks: Path, chance: random.Random, rounds: int) -> dict[str, int]:
    """So many rounds, and more of them where they have not shown enough.

    Returns:
        How many GPUs were had, and how many keepers and scripts killed.

    Raises:
        AssertionError: a GPU had two owners, or stayed leased.
    """
    marks.mkdir()
    owned, told = os.pipe()
    said_all: Counter[str] = Counter()
    keepers_killed = number = 0
    deadline = time.monotonic() + MOST_SECONDS

    def enough() -> bool:
        return min(said_all["+"], said_all["-"], keepers_killed) >= enough_of(rounds)

    with executors() as running:
        while number < rounds or (not enough() and time.monotonic() < deadline):
            # The later ones leave each executor more time.
            span = ROUND * (1 + number // rounds)
            number += 1
            begun = time.monotonic()
            ends_within = []
            for _ in range(EXECUTORS):
                running.append(forked(lambda: executor(directory, marks, told)))
                ends_within.append((begun + chance.uniform(0, span), running[-1]))
            for end, pid in sorted(ends_within):
                time.sleep(max(0.0, end - time.monotonic()))
                if chance.random() < KEEPERS_KILLED:
                    keepers_killed += kill_a_keeper(directory, chance)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                running.remove(pid)
            while select.select([owned], [], [], 0)[0]:
                said = os.read(owned, 4096)
                assert b"!" not in said, "a GPU had two owners"
                said_all += Counter(said.decode())
            with Leases(directory) as all_of_them:
                assert until(lambda: all_taken(all_of_them), step=0.002), "a GPU stayed leased"
    for descriptor in (owned, told):
        os.close(descriptor)
    return {"owners": said_all["+"], "scripts": said_all["-"], "keepers": keepers_killed}


def main(place: Path, seed: int, rounds: int) -> None:
    directory = lease_directory({"HOPSGPU_LEASE_DIR": str(place / "leases")})
    print(json.dumps(play(directory, place / "marks", random.Random(seed), rounds)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
