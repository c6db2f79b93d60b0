"""Ranks that are forked are like fresh interpreters, only sooner; where that is unsafe they are."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.agent import fork_safety
from hopsgpu.agent.spare_child import SpareChild
from hopsgpu.linux import parent_of
from hopsgpu.rank.files import LOG, OUTCOME, VALUE, WORK
from tests.bounds import HANG_SECONDS
from tests.process.agent.test_agent import Gang, gang, reserve  # noqa: F401
from tests.unit import rank_functions as functions
from tests.unit.containers import ROOT, Container, container, gone, until

# Its thread would be missing in a forked rank.
THREADED = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Container]:
    with container(tmp_path / "container") as there:
        yield there


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A container with a fork server that has torch."""
    with container(tmp_path_factory.mktemp("warm") / "container") as there:
        yield there


def test_a_forked_rank_is_like_a_fresh_interpreter(here: Container) -> None:
    here.module("threaded", THREADED)

    async def seen(*modules: str) -> tuple[dict[str, str], str | None]:
        own = {"RANK": "0", "PYTHONPATH": f"/run/modules:{here.spec().environment['PYTHONPATH']}"}
        async with here.connect_daemon() as daemon:
            rank = await here.start(daemon, here.spec(*modules), functions.interpreter, own=own)
            value = await rank.value()
            # Each has directories of its own.
            temporary = value["environment"]["TMPDIR"]
            shown = {
                name: repr(seen).replace(str(rank.directory), "DIRECTORY").replace(temporary, "TMP")
                for name, seen in value.items()
            }
            return shown, rank.started.warning

    async def scenario() -> None:
        forked, warning = await seen()
        assert warning is None
        fresh, warning = await seen("threaded")
        assert warning is not None
        for name in fresh:
            assert forked[name] == fresh[name], name
        assert "'RANK': '0'" in forked["environment"]
        assert forked["path"].startswith("['DIRECTORY/work', '/run/modules', ")
        assert forked["stdin"] == "'/dev/null'"
        assert forked["outputs"] == f"['DIRECTORY/{LOG}', 'DIRECTORY/{LOG}']"
        assert forked["session"] == "True"

    asyncio.run(scenario())


@pytest.mark.parametrize("utf8", ["0", "1"])
def test_variables_are_in_utf8_whatever_the_ranks_locale_takes(here: Container, utf8: str) -> None:
    here.module("threaded", THREADED)
    # Python takes UTF-8 in place of ASCII unless it must not.
    locale = {"LC_ALL": "C", "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}

    def seen() -> tuple[str, bytes, bytes]:
        return sys.getfilesystemencoding(), os.environb[b"OWN"], os.environb[b"SHARED"]

    async def scenario() -> None:
        for modules in ((), ("threaded",)):  # forked, and fresh
            spec = here.spec(*modules, **locale, SHARED="größe")
            async with here.connect_daemon() as daemon:
                rank = await here.start(daemon, spec, seen, own={"OWN": "é漢 \udcff"})
                encoding, own, shared = await rank.value()
                assert (rank.started.warning is None) is (not modules)
            assert encoding == ("utf-8" if utf8 == "1" else "ascii")
            assert (own, shared) == ("é漢 ".encode() + b"\xff", "größe".encode())

    asyncio.run(scenario())


def test_nothing_leaks_from_one_run_into_the_next(here: Container) -> None:
    here.module("user_module", "seen = 0")

    async def scenario() -> None:
        first = await here.value(here.spec(), functions.traces)
        second = await here.value(here.spec(), functions.traces)
        assert first.pop("server") == second.pop("server")
        assert first.pop("drawn") != second.pop("drawn")
        assert first.pop("key") != second.pop("key")
        assert first == second
        assert second["variable"] is None and second["path"] == [] and second["module"] == 0
        assert second["cwd"] == "work"

    asyncio.run(scenario())


def test_ends_as_the_interpreter_does(here: Container) -> None:
    async def log_of(function: Callable[..., Any]) -> tuple[int, str]:
        async with here.connect_daemon() as daemon:
            rank = await here.start(daemon, here.spec(), function)
            return os.waitstatus_to_exitcode((await rank.end()).status), rank.log

    async def scenario() -> None:
        assert await log_of(functions.ends_in_order) == (0, "body\nthread\nexit function\n")
        assert await log_of(functions.exits_with_a_message) == (1, "what is wrong\n")
        code, log = await log_of(functions.crashes)
        assert code == -signal.SIGSEGV
        assert log.startswith("before\nFatal Python error: Segmentation fault")
        assert "in crashes" in log

    asyncio.run(scenario())


@pytest.mark.parametrize("modules", [(), ("threaded",)], ids=["forked", "fresh"])
def test_only_the_ranks_own_process_says_how_it_ended(
    here: Container, tmp_path: Path, modules: tuple[str, ...]
) -> None:
    here.module("threaded", THREADED)
    ways = {"returns": 0, "raises": 1, "exits": 7, "is unpicklable": 0, "ends at once": 9}

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            for number, (what, code) in enumerate(ways.items()):
                file = tmp_path / str(number) / "exit-function"
                file.parent.mkdir()
                rank = await here.start(
                    daemon, here.spec(*modules), functions.forks, what, str(file)
                )
                assert await rank.value() == f"{code} True"
                # The rank's own exit functions run.
                assert file.exists()
                outcome = json.loads((rank.directory / OUTCOME).read_text())
                assert outcome["status"] == "returned"
                assert ("ValueError: the child's" in rank.log) == (what == "raises")
            for what in ("returns", "raises"):
                rank = await here.start(
                    daemon, here.spec(*modules), functions.forks_and_is_killed, what
                )
                assert (await rank.end()).status == signal.SIGKILL
                assert not (rank.directory / OUTCOME).exists()
                assert not (rank.directory / VALUE).exists()

    asyncio.run(scenario())


def test_sigusr1_has_a_hanging_rank_write_where_it_is_and_go_on(
    here: Container, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            file = tmp_path / "go"
            rank = await here.start(daemon, here.spec(), functions.hangs_until, str(file))
            assert await asyncio.to_thread(until, lambda: "here" in rank.log)
            daemon.signal(rank.pid, signal.SIGUSR1, "process")
            assert await asyncio.to_thread(until, lambda: "in hangs_until" in rank.log)
            file.touch()
            assert await rank.value() == "went on"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (THREADED, "importing started threads ("),
        ("import os; os._exit(3)", "the fork server ended with 3"),
        ("import os; os.kill(os.getpid(), 11)", "the fork server ended with -11"),
        ("raise ImportError('no libfoo')", "the fork server ended with 1: ImportError: no libfoo"),
        ("while True: pass", "importing odd took more than 0.5 s"),
        (
            "import sys, types\n"
            "cuda = sys.modules['torch.cuda'] = types.ModuleType('torch.cuda')\n"
            "cuda.is_initialized = lambda: True\ncuda._is_in_bad_fork = lambda: False",
            "torch has initialised CUDA",
        ),
        (
            "import sys, types, os\nserver = os.getpid()\n"
            "cuda = sys.modules['torch.cuda'] = types.ModuleType('torch.cuda')\n"
            "cuda.is_initialized = lambda: False\n"
            "cuda._is_in_bad_fork = lambda: os.getpid() != server",
            "torch has queried the GPUs",
        ),
    ],
)
def test_rank_is_a_fresh_interpreter_if_forking_is_unsafe(
    here: Container, source: str, said: str
) -> None:
    here.module("odd", source)
    spec = here.spec("odd", seconds=0.5 if "while" in source else HANG_SECONDS)

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            reason = await daemon.warm(spec)
            assert reason is not None and reason.startswith(said)
            rank = await here.start(daemon, spec, os.getppid)
            assert rank.started.warning == reason
            assert await rank.value() == daemon.pid
            assert await daemon.store(spec, 2) is None
        assert await asyncio.to_thread(until, lambda: not here.left())

    asyncio.run(scenario())


def test_a_module_that_is_not_there_is_the_functions_to_miss(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            assert await daemon.warm(here.spec("not_installed")) is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("compiler", "version", "ahead"),
    [
        ("", "2.3.1", True),
        (THREADED, "2.3.1", False),
        ("", "2.15.0+cu130", True),
        ("raise AttributeError('sympy')", "2.15.0", False),
    ],
)
def test_torchs_compiler_is_imported_ahead_unless_it_would_make_forks_unsafe(
    here: Container, compiler: str, version: str, ahead: bool
) -> None:
    here.module("torch/__init__", "from torch import version\n")
    here.module("torch/version", f"__version__ = {version!r}\n")
    here.module("torch/_dynamo", compiler)
    spec = here.spec("torch", "torch._dynamo")

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            assert await daemon.warm(spec) is None
            rank = await here.start(daemon, spec, functions.loaded, "torch._dynamo")
            assert await rank.value() is ahead
            assert rank.started.warning is None

    asyncio.run(scenario())


@pytest.mark.soak
def test_a_forked_rank_compiles(here: Container) -> None:
    spec = here.spec("torch", "torch._dynamo", OMP_NUM_THREADS="1")
    assert asyncio.run(here.value(spec, functions.compiles)) == (True, 6.0)


@pytest.mark.soak
def test_a_forked_ranks_compiler_has_the_ranks_directories(here: Container) -> None:
    spec = here.spec("torch", "torch._dynamo", OMP_NUM_THREADS="1")
    home = str(here.directory / "own-home")

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            rank = await here.start(
                daemon, spec, functions.compilers_directories, own={"HOME": home}
            )
            debug, cache, temporary, triton = await rank.value()
            assert debug == str(rank.directory / WORK / "torch_compile_debug")
            assert cache.startswith(f"{temporary}/")
            assert triton in (None, home)

    asyncio.run(scenario())


def test_a_rank_counts_its_own_gpus(here: Container) -> None:
    """Old versions of torch remember how many there were when they were first counted."""
    here.module("torch/__init__", "from torch import cuda\n")
    here.module(
        "torch/cuda",
        "import functools, os\nis_initialized = _is_in_bad_fork = lambda: False\n"
        "@functools.lru_cache(maxsize=1)\n"
        "def device_count(): return int(os.environ.get('GPUS', 8))\ndevice_count()\n",
    )

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            spec = here.spec("torch")
            assert await daemon.warm(spec) is None
            rank = await here.start(daemon, spec, functions.gpus_counted, own={"GPUS": "1"})
            assert await rank.value() == 1

    asyncio.run(scenario())


def test_a_rank_that_cannot_be_set_up_is_an_error(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            with pytest.raises(FileNotFoundError, match="rank-9"):
                await daemon.spawn(here.spec(), here.directory / "rank-9", {})
            (here.directory / "rank-9").mkdir()
            with pytest.raises(FileNotFoundError, match=f"rank-9/{WORK}"):
                await daemon.spawn(here.spec(), here.directory / "rank-9", {})
            # The server still serves.
            assert await here.value(here.spec(), str.upper, "next") == "NEXT"

    asyncio.run(scenario())


async def forked_ahead(here: Container, server: int | None = None) -> int:
    """The pid of the child that is to become the next rank, of a server or of the only one."""

    def spares() -> list[int]:
        return [pid for pid in here.spares() if server in (None, parent_of(pid))]

    assert await asyncio.to_thread(until, spares)
    (pid,) = spares()
    return pid


def test_the_next_rank_is_forked_ahead(here: Container) -> None:
    def seen() -> tuple[int, int, str]:
        return os.getpid(), os.getppid(), Path("/proc/self/comm").read_text()

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            assert await daemon.warm(here.spec()) is None
            assert not here.spares()
            first, *of_first = await (await here.start(daemon, here.spec(), seen)).value()
            for _ in range(2):
                ahead = await forked_ahead(here)
                assert ahead != first
                rank = await here.start(daemon, here.spec(), seen)
                assert rank.pid == ahead
                # A child of the same server, with its command.
                assert await rank.value() == (ahead, *of_first)

    asyncio.run(scenario())


def test_a_rank_that_was_forked_ahead_is_like_one_that_was_not(here: Container) -> None:
    def seen() -> tuple[dict[str, Any], float, bytes]:
        key = bytes(multiprocessing.current_process().authkey)
        print("said")
        return functions.interpreter(), random.random(), key

    async def scenario() -> None:
        shown, drawn, keys = [], set(), set()
        async with here.connect_daemon() as daemon:
            for number in range(3):
                ahead = await forked_ahead(here) if number else None
                path = f"/run/{number}:{here.spec().environment['PYTHONPATH']}"
                own = {"RANK": str(number), "PYTHONPATH": path}
                rank = await here.start(daemon, here.spec(), seen, own=own)
                assert ahead in (None, rank.pid)
                value, random_number, key = await rank.value()
                assert value["environment"].items() >= own.items()
                assert value["path"][:2] == [str(rank.directory / WORK), f"/run/{number}"]
                assert value["cwd"] == str(rank.directory / WORK)
                assert value["outputs"] == [str(rank.directory / LOG)] * 2
                assert value["session"] and rank.log == "said\n"
                del value["environment"]["RANK"]
                replaced = {str(rank.directory): "DIRECTORY", f"/run/{number}": "PATH"}
                replaced[value["environment"]["TMPDIR"]] = "TMP"
                text = repr(value)
                for old, new in replaced.items():
                    text = text.replace(old, new)
                shown.append(text)
                drawn.add(random_number)
                keys.add(key)
        # Its descriptors are among that.
        assert shown[1:] == shown[:1] * 2
        assert len(drawn) == len(keys) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_spare_that_is_killed_costs_nothing(
    here: Container, tmp_path: Path, is_reaped: bool
) -> None:
    file = tmp_path / "ran"

    def run() -> str:
        with file.open("a") as ran:
            ran.write("once")
        return "value"

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            server = await (await here.start(daemon, here.spec(), os.getppid)).value()
            ahead = await forked_ahead(here)
            os.kill(ahead, signal.SIGKILL)
            if is_reaped:
                process = Path(f"/proc/{ahead}")
                assert await asyncio.to_thread(until, lambda: not process.exists())
            rank = await here.start(daemon, here.spec(), run)
            assert (rank.started.warning, await rank.value()) == (None, "value")
            assert file.read_text() == "once"
            # The next one is forked ahead again.
            again = await forked_ahead(here)
            rank = await here.start(daemon, here.spec(), os.getppid)
            assert (rank.pid, await rank.value()) == (again, server)

    asyncio.run(scenario())


@pytest.mark.parametrize("hangs_up", [False, True])
def test_spare_that_does_not_read_its_request_is_killed(tmp_path: Path, hangs_up: bool) -> None:
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen([sys.executable, "-c", functions.FOREVER]) as process:
        if hangs_up:
            theirs.close()
        else:
            theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match="Broken pipe" if hangs_up else "spare process"):
            SpareChild(process.pid, ours).hand_over(tmp_path, {})
        assert process.wait(HANG_SECONDS) == -signal.SIGKILL
    assert ours.fileno() == -1


def test_a_spare_ends_with_its_server(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            server = await (await here.start(daemon, here.spec(), os.getppid)).value()
            ahead = await forked_ahead(here)
            assert os.getsid(ahead) == os.getpgid(ahead) == ahead
            os.kill(server, signal.SIGKILL)
            assert await asyncio.to_thread(until, lambda: gone(ahead))
            assert await asyncio.to_thread(until, lambda: not here.left())

    asyncio.run(scenario())


def test_a_spare_that_cannot_be_set_up_is_the_same_error(here: Container) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            said = []
            for number in (8, 9):
                before = here.spares()
                # Its working directory is missing.
                rank = here.directory / f"rank-{number}"
                rank.mkdir()
                with pytest.raises(FileNotFoundError, match=f"rank-{number}/{WORK}") as told:
                    await daemon.spawn(here.spec(), rank, {})
                said.append((told.value.errno, str(told.value).replace(str(rank), "")))
                assert await asyncio.to_thread(until, lambda b=before: all(map(gone, b)))
                await forked_ahead(here)
            assert len(before) == 1 and said[0] == said[1]
            # The server still serves.
            assert await here.value(here.spec(), str.upper, "next") == "NEXT"

    asyncio.run(scenario())


# Has the fork server stop itself once it has forked, before it tells of it.
FREEZES = """
import os, signal
from hopsgpu.agent import json_lines

send = json_lines.JsonLineSocket.send

def stop_and_send(self, **fields):
    if "pid" in fields:
        os.kill(os.getpid(), signal.SIGSTOP)
    return send(self, **fields)

json_lines.JsonLineSocket.send = stop_and_send
"""

# A daemon that waits for a moment where others wait for 15 s.
IMPATIENT = """
import sys
from pathlib import Path
from hopsgpu.agent import fork_server_pool, process_daemon
fork_server_pool._ANSWER_SECONDS = 5.0
process_daemon.main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
"""
SILENT = "the fork server did not answer within 5 s"


@pytest.fixture
def impatient(here: Container) -> Container:
    """A container whose daemon waits for its fork servers for 5 s."""
    home = here.directory / "hopsgpu" / f"process-daemon-{here.jvm}"
    home.mkdir(parents=True)
    warm = here.directory / "warm"
    warm.write_text("null")
    with warm.open("rb") as spec, (here.directory / "lock").open("w") as lock:
        jvm = os.pidfd_open(here.jvm)
        passed = [jvm, lock.fileno(), spec.fileno()]
        command = [sys.executable, "-c", IMPATIENT, str(home), *map(str, passed)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        null = subprocess.DEVNULL
        subprocess.run(command, pass_fds=passed, env=environment, stdout=null, check=True)
        os.close(jvm)
    return here


def test_a_server_that_is_frozen_is_done_without(impatient: Container) -> None:
    here = impatient
    # A module of that name is all that a server needs to be asked for a store.
    here.module("torch", "")
    spec = here.spec("torch")

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            server = await (await here.start(daemon, spec, os.getppid)).value()
            os.kill(server, signal.SIGSTOP)
            asked = (here.start(daemon, spec, str.upper, "ok"), daemon.store(spec, 2))
            rank, store = await asyncio.wait_for(asyncio.gather(*asked), HANG_SECONDS)
            assert (rank.started.warning, await rank.value()) == (SILENT, "OK")
            assert store is None
            assert [text.endswith(f" itself: {SILENT}") for text in daemon.warnings] == [True]
            assert await asyncio.to_thread(until, lambda: gone(server), HANG_SECONDS)
            # Another takes its place: a server that froze is no reason to do without for good.
            next_rank = await here.start(daemon, spec, os.getppid)
            assert next_rank.started.warning is None
            assert await next_rank.value() not in (server, daemon.pid)

    asyncio.run(scenario())


@pytest.mark.parametrize("ends", [False, True])
def test_fork_of_a_frozen_server_does_not_run_twice(
    impatient: Container, tmp_path: Path, ends: bool
) -> None:
    here, file = impatient, tmp_path / "ran"
    here.module("freezes", FREEZES)

    def run() -> str:
        with file.open("a") as ran:
            ran.write("once")
        if not ends:
            signal.pause()
        return "value"

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            rank = await asyncio.wait_for(
                here.start(daemon, here.spec("freezes"), run), HANG_SECONDS
            )
            assert rank.started.warning == SILENT
            assert os.waitstatus_to_exitcode((await rank.end()).status) == 1
            outcome = json.loads((rank.directory / OUTCOME).read_text())
            if ends:
                # It had come to its end before, and what it left counts.
                assert outcome["status"] == "returned"
                assert pickle.loads((rank.directory / VALUE).read_bytes()) == "value"
            else:
                assert outcome["status"] == "not started"
                assert "with its fork server" in outcome["error"]
            assert file.read_text() == "once"
            assert await asyncio.to_thread(until, lambda: not here.left())

    asyncio.run(scenario())


def test_without_torch_there_is_no_store_and_no_second_server(here: Container) -> None:
    here.module("sitecustomize", "import sys; sys.modules['torch'] = None")

    async def scenario() -> None:
        spec = here.spec("torch")
        async with here.connect_daemon() as daemon:
            assert await daemon.warm(spec) is None
            servers = here.marked()
            assert await daemon.store(spec, 2) is None
            assert daemon.warnings == []
            rank = await here.start(daemon, spec, os.getppid)
            assert rank.started.warning is None
            assert [await rank.value()] == servers
            # A spare has its name a moment after it was forked.
            assert await asyncio.to_thread(until, lambda: here.marked() == servers)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "ModuleNotFoundError: No module named 'torch.distributed'"),
        (
            "import socket\ndef refuse(*a, **k): raise OSError(24, 'Too many open files')\n"
            "socket.create_server = refuse",
            "Too many open files",
        ),
    ],
)
def test_a_store_that_cannot_be_made_is_rank_0s(here: Container, source: str, said: str) -> None:
    here.module("torch", source)

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            assert await daemon.store(here.spec("torch"), 2) is None
            (warning,) = daemon.warnings
            assert f"TCPStore itself: {said}" in warning
            # The server still serves.
            rank = await here.start(daemon, here.spec("torch"), str.upper, "next")
            assert (rank.started.warning, await rank.value()) == (None, "NEXT")

    asyncio.run(scenario())


@pytest.fixture
def hollow_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that serves no store, on the executors' path; before `gang`."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)


@pytest.mark.usefixtures("hollow_torch")
def test_failed_store_is_a_warning(
    gang: Gang,  # noqa: F811
) -> None:
    assert reserve(gang, store=1, frameworks=("torch",))["store"] is None
    for _ in range(2):
        gang.run(os.getpid, frameworks=("torch",))
        gang.wait_for("ended")
    (warning,) = (m["text"] for m in gang.seen if m.kind == "warning")
    assert "TCPStore itself: ModuleNotFoundError" in warning


def test_two_forked_ranks_reduce_over_the_containers_store(warm: Container) -> None:
    async def scenario() -> None:
        spec = warm.spec("torch", OMP_NUM_THREADS="1")
        async with warm.connect_daemon() as daemon:
            assert await daemon.warm(spec) is None
            for _ in range(2):
                began = time.monotonic()
                store = await daemon.store(spec, 2)
                assert store is not None
                shared = {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "WORLD_SIZE": "2",
                    "GLOO_SOCKET_IFNAME": "lo",
                }
                ranks = [
                    await warm.start(
                        daemon, spec, functions.all_reduced, own={**shared, "RANK": str(rank)}
                    )
                    for rank in range(2)
                ]
                # Neither listens at the store's port.
                assert [await rank.value() for rank in ranks] == [(3.0, False)] * 2
                print(f"all-reduce of 2 forked ranks: {time.monotonic() - began:.2f} s")
                daemon.signal(store.pid, signal.SIGKILL, "tree")
                await daemon.wait_exit(store.pid)
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", store.port))

    asyncio.run(scenario())


def test_a_store_ends_with_the_connection(warm: Container) -> None:
    async def scenario() -> int:
        async with warm.connect_daemon() as daemon:
            store = await daemon.store(warm.spec("torch", OMP_NUM_THREADS="1"), 2)
            assert store is not None and not gone(store.pid)
            assert await daemon.store(warm.spec(), 2) is None  # no torch there
            return store.pid

    pid = asyncio.run(scenario())
    assert until(lambda: gone(pid))


def test_a_store_that_goes_on_keeps_nothing_of_an_ended_rank(
    warm: Container, tmp_path: Path
) -> None:
    async def scenario() -> None:
        spec = warm.spec("torch", OMP_NUM_THREADS="1")
        family = tmp_path / "family"
        async with warm.connect_daemon() as daemon:
            store = await daemon.store(spec, 1)
            rank = await warm.start(daemon, spec, functions.family, str(family))
            assert await asyncio.to_thread(until, family.exists)
            daemon.signal(rank.pid, signal.SIGTERM, "group")
            await rank.end()
            pids = json.loads(family.read_text())
            left = [pids[name] for name in ("daemon", "forked", "child", "worker")]
            assert await asyncio.to_thread(until, lambda: all(map(gone, left)))
            assert store is not None and not gone(store.pid)

    asyncio.run(scenario())


def test_a_spare_holds_nothing_of_a_store_nor_of_its_server(warm: Container) -> None:
    async def scenario() -> None:
        spec = warm.spec("torch", OMP_NUM_THREADS="1")
        async with warm.connect_daemon() as daemon:
            store = await daemon.store(spec, 1)
            assert store is not None
            server = await (await warm.start(daemon, spec, os.getppid)).value()
            # Forked while the store served: an earlier one has become the rank.
            ahead = await forked_ahead(warm, server)
            files = Path(f"/proc/{ahead}/fd")
            few = lambda: len([*files.iterdir()]) == 4  # noqa: E731
            assert await asyncio.to_thread(until, few)
            held = {str(path.readlink()).split(":")[0] for path in files.iterdir()}
            log = str(Path(f"/proc/{server}/fd/1").readlink())
            assert held == {"/dev/null", log, "socket"}
            daemon.signal(store.pid, signal.SIGKILL, "tree")
            await daemon.wait_exit(store.pid)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", store.port))
            assert not gone(ahead)

    asyncio.run(scenario())


def test_a_server_serves_whoever_wants_what_it_has_imported(warm: Container) -> None:
    async def scenario() -> None:
        servers = [
            await warm.value(warm.spec(*modules, OMP_NUM_THREADS="1"), os.getppid)
            for modules in (("torch",), ("numpy",), ())
        ]
        assert len(set(servers)) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_forked_rank_loads_data_with_workers(warm: Container, context: str) -> None:
    spec = warm.spec("torch", OMP_NUM_THREADS="1")
    value = asyncio.run(warm.value(spec, functions.loads, context))
    assert value == ([index**2 for index in range(8)], 2)


def test_workers_that_are_busy_end_with_their_rank(warm: Container, tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = warm.spec("torch", OMP_NUM_THREADS="1")
        async with warm.connect_daemon() as daemon:
            rank = await warm.start(daemon, spec, functions.loads_for_ever, str(tmp_path / "busy"))
            busy = lambda: sorted(tmp_path.glob("busy.*"))  # noqa: E731
            assert await asyncio.to_thread(until, lambda: len(busy()) == 2)
            os.kill(rank.pid, signal.SIGKILL)
            assert (await rank.end()).status == signal.SIGKILL
            pids = [int(file.suffix[1:]) for file in busy()]
            assert await asyncio.to_thread(until, lambda: all(map(gone, pids)))

    asyncio.run(scenario())


def test_ranks_of_one_server_draw_different_numbers(warm: Container) -> None:
    async def scenario() -> None:
        spec = warm.spec("torch", OMP_NUM_THREADS="1")
        first, second = [await warm.value(spec, functions.numbers) for _ in range(2)]
        assert first[:2] == second[:2] and first[0] == 1  # threads, server
        for generator in (2, 3, 4):
            assert first[generator] != second[generator]

    asyncio.run(scenario())


def test_ranks_that_were_forked_ahead_draw_different_numbers(warm: Container) -> None:
    async def scenario() -> None:
        spec = warm.spec("torch", OMP_NUM_THREADS="1")
        server = await warm.value(spec, os.getppid)
        values = []
        for _ in range(2):
            await forked_ahead(warm, server)
            values.append(await warm.value(spec, functions.numbers))
        first, second = values
        assert first[:2] == second[:2]
        for generator in (2, 3, 4):
            assert first[generator] != second[generator]

    asyncio.run(scenario())


def test_threads_are_as_many_as_the_environment_says(warm: Container) -> None:
    async def scenario() -> None:
        spec = warm.spec("torch", OMP_NUM_THREADS="2")
        assert (await warm.value(spec, functions.numbers))[0] == 2

    asyncio.run(scenario())


def test_a_forked_rank_has_the_framework_and_a_fresh_one_imports_it(warm: Container) -> None:
    async def scenario() -> None:
        warm.module("threaded", THREADED)
        spec, unsafe = warm.spec("torch", OMP_NUM_THREADS="1"), warm.spec("threaded")
        async with warm.connect_daemon() as daemon:
            assert await daemon.warm(unsafe) is not None
            for kind, wanted in (("forked", spec), ("fresh", unsafe)):
                rank = await warm.start(daemon, wanted, functions.first_line, time.time())
                there, seconds = await rank.value()
                assert there == (kind == "forked") == (rank.started.warning is None)
                print(f"{kind}: {seconds:.3f} s to the function's first line with torch")

    asyncio.run(scenario())


def test_threads_that_a_fork_loses_are_named() -> None:
    assert fork_safety.stray_threads(["jemalloc_bg_thd"]) is None
    problem = fork_safety.stray_threads(["pool", "jemalloc_bg_thd", "grpc"])
    assert problem is not None and problem.endswith("(grpc, pool)")


def test_initialised_cuda_is_named() -> None:
    untouched = {"torch.cuda": SimpleNamespace(is_initialized=lambda: False)}
    assert fork_safety.cuda_use({}, [], is_driver_initialised=False) is None
    assert fork_safety.cuda_use(untouched, [], is_driver_initialised=False) is None
    assert (
        fork_safety.cuda_use(untouched, [], is_driver_initialised=True)
        == "importing initialised the CUDA driver"
    )
    opened = fork_safety.cuda_use({}, ["/dev/nvidia0", "/dev/nvidia0"], is_driver_initialised=False)
    assert opened == "importing opened /dev/nvidia0"
