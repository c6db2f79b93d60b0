"""The processes of a container: who starts whom, and who dies with whom."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.agent.daemon_client import DaemonClient, ProcessDaemonLost, connected
from hopsgpu.agent.fork_servers import (
    MAX_SERVERS,
    ForkServerProcess,
    find_server,
    server_to_replace,
)
from hopsgpu.agent.orphans import find_marked
from hopsgpu.linux import ancestor, comm, parent_of
from tests.bounds import HANG_SECONDS
from tests.unit import rank_functions as functions
from tests.unit.containers import (
    JVM,
    ROOT,
    Container,
    container,
    gone,
    until,
    without_spares,
)

# A Spark task that has started a rank and waits for its end.
TASK = """
import asyncio, json, sys
from pathlib import Path
from tests.unit import rank_functions
from tests.unit.containers import Container
from hopsgpu.agent.daemon_client import connected

async def main(directory, file):
    here = Container(Path(directory), 0)
    async with connected(here.directory / "hopsgpu") as daemon:
        Path(file + ".daemon").write_text(json.dumps([daemon.pid, daemon.token]))
        rank = await here.start(daemon, here.spec(), rank_functions.family, file)
        await daemon.wait_exit(rank.pid)

asyncio.run(main(*sys.argv[1:]))
"""

# They become another user once all is imported and the directory, which is ours, was entered.
NOBODY = 65534
ANOTHER = """
import os, socket, sys
os.chdir(sys.argv[1])
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
own = socket.socket(socket.AF_UNIX)
own.settimeout(900)
"""
STRANGER = (
    ANOTHER
    + """
try:
    own.connect("socket")
    print(own.recv(4096))
except PermissionError as error:
    print(type(error).__name__)
"""
)
IMPOSTOR = (
    ANOTHER
    + """
own.bind("socket")
own.listen()
print("listens", flush=True)
print(own.accept()[0].recv(4096))
"""
)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Container]:
    with container(tmp_path / "container") as there:
        yield there


async def family(here: Container, daemon: DaemonClient) -> tuple[Any, dict[str, int]]:
    """A rank with descendants of all kinds, and their pids."""
    file = here.directory / f"pids-{here.ranks}"
    rank = await here.start(daemon, here.spec(), functions.family, str(file))
    pids = await asyncio.to_thread(read, file)
    wanted = set(pids.values())
    # At its exec a process has no environment for a moment.
    assert await asyncio.to_thread(until, lambda: set(here.marked()) == wanted)
    return rank, pids


def read(file: Path) -> Any:
    assert until(file.exists)
    return json.loads(file.read_text())


async def only_server_left(here: Container, pids: dict[str, int]) -> bool:
    return await asyncio.to_thread(until, lambda: here.marked() == [pids["server"]])


def test_a_daemon_is_nobodys_child_and_holds_nothing_of_its_starter(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            assert os.getsid(daemon.pid) not in (os.getsid(0), os.getpgid(0))
            assert parent_of(daemon.pid) != os.getpid()
            process = Path(f"/proc/{daemon.pid}")
            outputs = {str((process / "fd" / n).readlink()) for n in "012"}
            home = here.directory / "hopsgpu" / f"process-daemon-{here.jvm}"
            assert outputs == {"/dev/null", str(home / "log")}
            assert home.stat().st_mode & 0o777 == 0o700
            assert daemon.token not in (process / "environ").read_text()

    asyncio.run(scenario())


def test_tasks_that_come_at_once_start_one_daemon(here: Container) -> None:
    async def pid() -> int:
        async with here.connect_daemon() as daemon:
            return daemon.pid

    async def scenario() -> None:
        first = set(await asyncio.gather(*(pid() for _ in range(4))))
        assert len(first) == 1
        assert {await pid()} == first

    asyncio.run(scenario())


def test_a_container_with_a_long_path(tmp_path: Path) -> None:
    async def scenario(here: Container) -> None:
        assert await here.value(here.spec(), os.getcwd) == str(here.directory / "rank-1/work")

    with container(tmp_path / ("long" * 30) / "container") as here:
        asyncio.run(scenario(here))


AS_ANOTHER = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can act as another user")


@AS_ANOTHER
def test_only_own_processes_are_listened_to(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            home = here.directory / "hopsgpu" / f"process-daemon-{here.jvm}"
            assert await asyncio.to_thread(said_to, STRANGER, home) == "PermissionError"
            # As if somebody had opened the way.
            home.chmod(0o755)
            (home / "socket").chmod(0o777)
            assert await asyncio.to_thread(said_to, STRANGER, home) == "b''"
            assert '"token"' in await asyncio.to_thread(said_to, STRANGER, home, os.geteuid())
            assert await daemon.warm(here.spec()) is None

    asyncio.run(scenario())


def said_to(stranger: str, directory: Path, user: int = NOBODY) -> str:
    """What a process of another user has to say that talks to the socket of a directory."""
    command = [sys.executable, "-c", stranger, str(directory), str(user)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    return ran.stdout.strip()


@AS_ANOTHER
def test_daemon_of_another_user_is_refused(tmp_path: Path) -> None:
    home = tmp_path / f"process-daemon-{os.getpid()}"
    home.mkdir()
    shutil.chown(home, NOBODY)
    command = [sys.executable, "-c", IMPOSTOR, str(home), str(NOBODY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as impostor:
        assert impostor.stdout is not None and impostor.stdout.readline() == "listens\n"

        async def scenario() -> None:
            with pytest.raises(PermissionError, match="another user"):
                async with connected(tmp_path, os.getpid()):
                    raise AssertionError

        asyncio.run(scenario())
        assert impostor.stdout.read() == "b''\n"


def test_a_task_that_talks_nonsense_is_hung_up_on_and_others_are_not(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon, here.connect_daemon() as other:
            rank, pids = await family(here, other)
            mine = await here.start(daemon, here.spec(), functions.spin)
            daemon._writer.write(b'{"do": "spawn"}\n')
            assert (await mine.end()).status == signal.SIGKILL
            with pytest.raises(ConnectionError):
                await daemon.warm(here.spec())
            there = lambda: set(here.marked()) == set(pids.values())  # noqa: E731
            # A spare has its name a moment after it was forked.
            assert await asyncio.to_thread(until, there)
            os.kill(rank.pid, signal.SIGKILL)
            assert (await rank.end()).status == signal.SIGKILL

    asyncio.run(scenario())


def test_the_jvm_is_found_above_the_task(tmp_path: Path) -> None:
    code = "from hopsgpu.linux import ancestor; print(ancestor('java'))"
    command = [sys.executable, "-c", JVM, sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as jvm:
        assert jvm.stdout is not None
        jvm.stdout.readline()
        assert int(jvm.stdout.readline()) == jvm.pid
        assert comm(jvm.pid) == "java"
        jvm.kill()
    assert ancestor("no such command") is None


@pytest.mark.parametrize("victim", ["rank", "worker"])
def test_with_a_rank_all_of_its_processes_end(here: Container, victim: str) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            rank, pids = await family(here, daemon)
            os.kill(pids[victim], signal.SIGKILL)
            ended = await rank.end()
            # Without its worker the function returns.
            assert ended.status == (signal.SIGKILL if victim == "rank" else 0)
            assert await only_server_left(here, pids)

    asyncio.run(scenario())


def test_one_rank_ends_and_the_others_processes_stay(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            rank = await here.start(
                daemon, here.spec(), functions.family, str(here.directory / "a")
            )
            one = await asyncio.to_thread(read, here.directory / "a")
            _, other = await family_beside(here, daemon)
            daemon.signal(rank.pid, signal.SIGTERM, "group")
            assert (await rank.end()).status == signal.SIGTERM
            session = [one["child"], one["worker"]]
            assert await asyncio.to_thread(until, lambda: all(map(gone, session)))
            assert not any(map(gone, other.values()))

    asyncio.run(scenario())


async def family_beside(here: Container, daemon: DaemonClient) -> tuple[Any, dict[str, int]]:
    file = here.directory / "b"
    rank = await here.start(daemon, here.spec(), functions.family, str(file))
    return rank, await asyncio.to_thread(read, file)


def test_a_rank_is_killed_with_all_that_descends_from_it(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            rank, pids = await family(here, daemon)
            daemon.signal(rank.pid, signal.SIGKILL, "tree")
            assert (await rank.end()).status == signal.SIGKILL
            assert await only_server_left(here, pids)

    asyncio.run(scenario())


def test_with_a_fork_server_its_ranks_end_and_another_takes_its_place(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            rank, pids = await family(here, daemon)
            os.kill(pids["server"], signal.SIGKILL)
            assert (await rank.end()).status == signal.SIGKILL
            assert await asyncio.to_thread(until, lambda: not here.left())
            again = await here.start(daemon, here.spec(), os.getppid)
            assert again.started.warning is None
            assert await again.value() != pids["server"]

    asyncio.run(scenario())


def test_with_a_daemon_all_its_processes_end_and_another_takes_its_place(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            rank, _ = await family(here, daemon)
            os.kill(daemon.pid, signal.SIGKILL)
            assert (await rank.end()).status == signal.SIGKILL
            assert not here.left()
            with pytest.raises(ConnectionError):
                await daemon.warm(here.spec())
        assert await here.value(here.spec(), str.upper, "again") == "AGAIN"

    asyncio.run(scenario())


def test_a_task_finds_what_a_killed_daemon_has_left(here: Container) -> None:
    async def scenario() -> dict[str, int]:
        async with here.connect_daemon() as daemon:
            _, pids = await family(here, daemon)
            # As if this task had been killed with the daemon: it does not look.
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            os.kill(daemon.pid, signal.SIGKILL)
        return pids

    pids = asyncio.run(scenario())
    assert until(lambda: gone(pids["rank"]))
    assert not gone(pids["worker"]) and not gone(pids["daemon"])
    assert asyncio.run(here.value(here.spec(), str.upper, "again")) == "AGAIN"
    assert all(map(gone, pids.values()))


@pytest.mark.parametrize("victim", ["task", "jvm"])
def test_ranks_end_with_their_task_and_all_with_the_jvm(tmp_path: Path, victim: str) -> None:
    file = tmp_path / "pids"
    command = [sys.executable, "-c", TASK, str(tmp_path / "container"), str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", JVM, *command]
    jvm = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        pids = read(file)
        daemon, token = json.loads(Path(f"{file}.daemon").read_text())
        assert until(lambda: set(without_spares(find_marked(token))) == set(pids.values()))
        # Spark kills a task's process, too.
        (task,) = map(int, Path(f"/proc/{jvm.pid}/task/{jvm.pid}/children").read_text().split())
        if victim == "task":
            os.kill(task, signal.SIGKILL)
            assert until(lambda: without_spares(find_marked(token)) == [pids["server"]])
            assert not gone(daemon)
    finally:
        jvm.kill()
        jvm.wait()
    assert until(lambda: not find_marked(token) and gone(daemon))
    assert until(lambda: gone(task))


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "disconnected"])
def test_a_rank_that_its_task_no_longer_waits_for_is_not_started(
    here: Container, cancelled: bool
) -> None:
    here.module("slow", "from pathlib import Path\nwhile not Path(__file__ + '.go').exists(): pass")

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            start = here.start(daemon, here.spec("slow"), print, "never")
            starting = asyncio.create_task(start)
            async with asyncio.timeout(HANG_SECONDS):
                while not here.marked():
                    await asyncio.sleep(0.01)  # nobody tells
            if cancelled:
                starting.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else ProcessDaemonLost):
            await starting
        (here.directory / "path" / "slow.py.go").touch()
        # Behind it in the server's queue.
        assert await here.value(here.spec("slow"), str.upper, "next") == "NEXT"

    asyncio.run(scenario())
    assert not (here.directory / "rank-1" / "log").exists()


def test_a_few_fork_servers_are_kept(here: Container) -> None:
    async def scenario() -> None:
        servers = []
        async with here.connect_daemon() as daemon:
            for number in range(MAX_SERVERS + 1):
                await daemon.warm(here.spec(NUMBER=str(number)))
                if number == MAX_SERVERS - 1:
                    # The first is wanted again: the second goes.
                    assert await here.value(here.spec(NUMBER="0"), os.getppid) in here.marked()
            for number in (0, *range(2, MAX_SERVERS + 1)):
                rank = await here.start(daemon, here.spec(NUMBER=str(number)), os.getppid)
                servers.append(await rank.value())
        assert await asyncio.to_thread(until, lambda: set(here.marked()) == set(servers))

    asyncio.run(scenario())


def server(
    here: Container, *modules: str, used: float = 0.0, **variables: str
) -> ForkServerProcess:
    lines: Any = None
    spec = here.spec(*modules, **variables)
    return ForkServerProcess(spec, 1, lines, Path(), 0.0, used, frozenset(modules))


def test_who_serves_whom() -> None:
    here = Container(Path("/c"), 0)
    plain, torch = server(here), server(here, "torch", "numpy")
    assert find_server(here.spec("torch"), [plain, torch]) is torch
    assert find_server(here.spec(), [plain, torch]) is plain
    assert find_server(here.spec(), [torch]) is torch
    assert find_server(here.spec("tensorflow"), [plain, torch]) is None
    assert find_server(here.spec(OMP_NUM_THREADS="2"), [plain, torch]) is None


def test_the_idle_server_that_was_not_wanted_for_longest_goes() -> None:
    here = Container(Path("/c"), 0)
    many = [server(here, used=float(n), N=str(n)) for n in range(3)]
    assert server_to_replace(many, 4) is None
    assert server_to_replace(many, 3) is many[0]
    many[0].ranks.add(7)
    assert server_to_replace(many, 3) is many[1]
    for one in many:
        one.ranks.add(7)
    assert server_to_replace(many, 3) is None


def test_without_a_process_to_watch_there_is_no_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ProcessLookupError):
            async with connected(tmp_path, 2**22 + 1):
                raise AssertionError

    asyncio.run(scenario())
