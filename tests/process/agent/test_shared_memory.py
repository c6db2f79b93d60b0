"""What ranks leave in /dev/shm is removed, however they end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.util import spawnv_passfds
from pathlib import Path
from uuid import uuid4

import pytest

from hopsgpu.agent.shared_memory import await_cleaners, cleaners
from tests.bounds import HANG_SECONDS
from tests.unit.containers import Container, container, until

SHARED = Path("/dev/shm")
# As multiprocessing starts it; the second process holds the pipe, so it does not end.
TRACKER = "from multiprocessing.resource_tracker import main;main(0)"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Container]:
    with container(tmp_path / "container") as there:
        yield there


def share(name: str, end: str) -> str:
    """Makes shared memory of a name, which nobody unlinks, and ends."""
    import signal
    import sys
    import time
    from multiprocessing.shared_memory import SharedMemory

    sys.modules["__main__"].shared = SharedMemory(name, create=True, size=4096)  # type: ignore[attr-defined]
    match end:
        case "returns":
            return name
        case "raises":
            raise ValueError(name)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return name


@pytest.mark.parametrize(
    "end",
    [
        "returns",
        pytest.param("raises", marks=pytest.mark.soak),
        "is killed",
        *(pytest.param(e, marks=pytest.mark.soak) for e in ("tree", "group", "server", "daemon")),
        "jvm",
    ],
)
def test_files_of_a_rank_in_shared_memory_are_removed(here: Container, end: str) -> None:
    name = f"hopsgpu-test-{uuid4().hex}"

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            rank = await here.start(daemon, here.spec(), share, name, end)
            if end in ("tree", "group", "server", "daemon", "jvm"):
                assert await asyncio.to_thread(until, (SHARED / name).exists), rank.log
            server = await here.value(here.spec(), os.getppid)
            match end:
                case "tree" | "group":
                    number = signal.SIGKILL if end == "tree" else signal.SIGTERM
                    daemon.signal(rank.pid, number, end)
                case "server" | "daemon" | "jvm":
                    victim = {"server": server, "daemon": daemon.pid, "jvm": here.jvm}[end]
                    os.kill(victim, signal.SIGKILL)
            if end != "jvm":
                await rank.end()
            gone = await asyncio.to_thread(until, lambda: not (SHARED / name).exists())
            assert gone, rank.log
        if end == "daemon":
            # Another takes its place, and its directory.
            await here.value(here.spec(), os.getppid)

    try:
        asyncio.run(scenario())
    finally:
        (SHARED / name).unlink(missing_ok=True)


def test_a_cleaner_is_recognised_during_its_exec() -> None:
    """Its parent may exit then: the command line is empty until the new program starts."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", TRACKER]
    trackers = []
    try:
        for _ in range(100):
            trackers.append(spawnv_passfds(os.fsencode(sys.executable), command, [reading]))
            assert cleaners(trackers[-1:]) == set(trackers[-1:])
    finally:
        for tracker in trackers:
            os.kill(tracker, signal.SIGKILL)
            os.waitpid(tracker, 0)
        os.close(reading)
        os.close(writing)


def test_cleaners_are_recognised_by_their_command_lines() -> None:
    reading, writing = os.pipe()
    with (
        subprocess.Popen([sys.executable, "-c", TRACKER], stdin=reading) as tracker,
        subprocess.Popen(["sleep", "600"], stdin=reading) as other,
    ):
        os.close(reading)
        try:
            assert until(lambda: tracker.pid in cleaners([tracker.pid]))
            assert cleaners([tracker.pid, other.pid, 2**22 + 1]) == {tracker.pid}
            await_cleaners([tracker.pid], 0.05)
            assert tracker.poll() is None, "the wait is bounded"
            os.close(writing)
            await_cleaners([tracker.pid], HANG_SECONDS)
            assert tracker.wait() == 0
        finally:
            tracker.kill()
            other.kill()
