"""A holder: what it says, what it warms meanwhile, and that it ends at once."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from hopsgpu.agent import daemon_start
from hopsgpu.agent.addresses import held_ports
from hopsgpu.agent.daemon_client import connected
from hopsgpu.agent.daemon_start import daemon_directory, start_in_background
from hopsgpu.agent.placeholder import run_placeholder
from hopsgpu.agent.rank_environment import server_spec
from hopsgpu.agent.warm_up import WarmUp
from hopsgpu.control.channel import new_secret
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.packaging.python_env.environment import RankPython
from tests.bounds import HANG_SECONDS
from tests.unit.containers import JVM, until

# Below the stand-in for the JVM, as Spark's tasks are.
TASK = """
import pickle, sys
from hopsgpu.agent.placeholder import run_placeholder
with open(sys.argv[1], "rb") as file:
    driver, warm = pickle.load(file)
warm.start_daemon(driver)
run_placeholder(driver, warm)
print("ended", flush=True)
"""


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with serve(new_secret(), "127.0.0.1") as there:
        yield there


class Holding:
    """A holder in a process of its own."""

    def __init__(self, server: ControlServer, warm: WarmUp, directory: Path) -> None:
        call = directory / "call"
        driver = DriverEndpoint("127.0.0.1", server.port, server._secret, None)
        call.write_bytes(pickle.dumps((driver, warm)))
        command = [sys.executable, "-c", JVM, sys.executable, "-c", TASK, str(call)]
        environment = {**os.environ, "PYTHONPATH": str(directory / "path")}
        self.jvm = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
        )
        event = server.next_event(HANG_SECONDS)
        assert event is not None and event.message is not None
        assert event.message.kind == "hello"

    def ended(self) -> bool:
        """Waits for its end."""
        assert self.jvm.stdout is not None
        return [self.jvm.stdout.readline() for _ in range(2)] == ["named\n", "ended\n"]


def user_module(directory: Path) -> WarmUp:
    """What warms a module that notes each of its imports."""
    (directory / "path").mkdir()
    (directory / "path" / "user_module.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('imported').open('a').write('once')\n"
    )
    return WarmUp(("user_module",), {"OMP_NUM_THREADS": "2"})


async def warmed(warm: WarmUp, directory: Path, jvm: int) -> None:
    """Wait, as the next task does, until the fork server may fork."""
    spec = server_spec(os.environ, warm.environment, warm.modules, RankPython())
    async with connected(directory / "hopsgpu", jvm) as daemon:
        assert await daemon.warm(spec) is None


def test_next_task_finds_the_warm_servers_of_a_placeholder(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = user_module(tmp_path)
    holding = Holding(server, warm, tmp_path)
    imported = tmp_path / "path" / "imported"
    try:
        assert until(imported.exists)
        server.disconnect_all()
        assert holding.ended()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
        asyncio.run(warmed(warm, tmp_path, holding.jvm.pid))
        assert imported.read_text() == "once"
    finally:
        holding.jvm.kill()
        holding.jvm.communicate()
    assert until(lambda: not list(tmp_path.glob("hopsgpu/process-daemon-*")))


def test_started_work_of_a_placeholder_continues_for_the_next_task(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = user_module(tmp_path)
    holding = Holding(server, warm, tmp_path)
    # It was the last of its gang, and ends before the daemon answers.
    server.disconnect_all()
    try:
        assert holding.ended()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
        asyncio.run(warmed(warm, tmp_path, holding.jvm.pid))
        assert (tmp_path / "path" / "imported").read_text() == "once"
    finally:
        holding.jvm.kill()
        holding.jvm.communicate()
    assert until(lambda: not list(tmp_path.glob("hopsgpu/process-daemon-*")))


def test_of_tasks_that_begin_at_the_same_time_one_starts_the_daemon(tmp_path: Path) -> None:
    jvm = os.getpid()
    directory = daemon_directory(tmp_path, jvm)
    start = start_in_background(directory, jvm, None, "info")
    assert start is not None
    assert start_in_background(directory, jvm, None, "info") is None

    async def scenario() -> None:
        # It waits for the start of the other one.
        async with connected(tmp_path, jvm) as daemon:
            await start.wait()
            assert start_in_background(directory, jvm, None, "info") is None
            async with connected(tmp_path, jvm) as other:
                assert other.pid == daemon.pid
            os.kill(daemon.pid, signal.SIGTERM)

    asyncio.run(scenario())
    assert until(lambda: not directory.exists())


def test_a_start_that_fails_says_why_and_leaves_others_the_start(tmp_path: Path) -> None:
    jvm = os.getpid()
    directory = daemon_directory(tmp_path, jvm)
    with mock.patch.object(daemon_start, "json", SimpleNamespace(dumps=lambda _: "no JSON")):
        start = start_in_background(directory, jvm, None, "info")
    assert start is not None

    async def scenario() -> None:
        with pytest.raises(ChildProcessError, match=r"(?s)exit code 1.*JSONDecodeError"):
            await start.wait()
        async with connected(tmp_path, jvm) as daemon:
            os.kill(daemon.pid, signal.SIGTERM)

    asyncio.run(scenario())
    assert until(lambda: not directory.exists())


def test_a_holder_ends_at_once_though_its_warming_hangs(
    server: ControlServer, tmp_path: Path
) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "hanging.py").write_text(
        "import pathlib, signal\npathlib.Path(__file__).with_name('began').touch()\nsignal.pause()"
    )
    holding = Holding(server, WarmUp(("hanging",)), tmp_path)
    try:
        assert until((tmp_path / "path" / "began").exists)
        server.disconnect_all()
        # Long before the import is given up.
        assert holding.ended()
    finally:
        holding.jvm.kill()
        holding.jvm.communicate()
    assert until(lambda: not list(tmp_path.glob("hopsgpu/process-daemon-*")))


def test_nobody_answers() -> None:
    with held_ports(1) as held, pytest.raises(OSError):
        run_placeholder(DriverEndpoint("127.0.0.1", held.ports[0], new_secret(), None), WarmUp())
