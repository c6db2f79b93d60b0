"""An agent and its ranks, without Spark: real processes, a real channel."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.modules import pack_modules
from hopsgpu.pickling import pickle_call
from hopsgpu.units import MIB
from hopsgpu.worker.agent import held_port, rank_environment
from hopsgpu.worker.channel import Message, new_secret
from hopsgpu.worker.peer import Driver
from hopsgpu.worker.server import ControlServer, serve

SECONDS = 20.0


class Gang:
    """A server with one agent in a process of its own, as a container has it."""

    def __init__(self, server: ControlServer, process: subprocess.Popen[bytes], lake: Path) -> None:
        self.server = server
        self.process = process
        self.lake = lake
        self.seen: list[Message] = []
        self.hello = self.wait_for("hello")

    def wait_for(self, kind: str) -> Message:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            event = self.server.next_event(0.2)
            if event is not None and event.message is not None:
                self.seen.append(event.message)
                if event.message.kind == kind:
                    return event.message
        raise AssertionError(f"no {kind!r} among {[m.kind for m in self.seen]}")

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 1,
        memory: int | None = None,
        **variables: str,
    ) -> None:
        call = pickle_call(function, args, {})
        modules = pack_modules([Path(__file__).parent])
        described = [
            {
                "environment": {"RANK": str(rank), **variables},
                "context": {
                    "rank": rank,
                    "local_rank": rank,
                    "world_size": ranks,
                    "host": "here",
                    "gpus": [],
                    "role": "worker",
                    "run_id": "r",
                    "attempt": 0,
                },
            }
            for rank in range(ranks)
        ]
        sent = self.server.send(
            0,
            "run",
            call + modules.archive,
            run_id="r",
            run_url=f"file://{self.lake}/runs/r",
            attempt=0,
            memory=memory,
            call_bytes=len(call),
            roots=modules.roots,
            ranks=described,
        )
        assert sent


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    (tmp_path / "container").mkdir()
    (tmp_path / "lake" / "runs" / "r" / "logs").mkdir(parents=True)
    with serve(new_secret(), "127.0.0.1") as server:
        driver = Driver("127.0.0.1", server.port, server._secret, None)
        environment = {**os.environ, "CONTAINER_ID": "container_7", "NM_HOST": "nodeX"}
        environment |= {"RANK": "99", "TF_CONFIG": "stale", "CUDA_VISIBLE_DEVICES": "stale"}
        code = (
            "import pickle, sys; from hopsgpu.worker.agent import run_agent;"
            "run_agent(pickle.load(sys.stdin.buffer))"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path / "container",
            env=environment,
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(driver))
        process.stdin.close()
        try:
            yield Gang(server, process, tmp_path / "lake")
        finally:
            process.kill()
            process.wait()


def report() -> dict[str, Any]:
    import hopsgpu

    context = hopsgpu.context()
    print("out")
    print("err", file=sys.stderr)
    return {
        "context": (context.rank, context.host, context.run_id, context.attempt),
        "environment": dict(os.environ),
        "cwd": str(Path.cwd()),
        "model_dir": context.model_dir.is_dir(),
        "group": os.getpgid(0) == os.getpid(),
    }


def test_hello_says_what_the_container_is(gang: Gang) -> None:
    said = dict(gang.hello.fields)
    assert said.pop("python").startswith("3.")
    assert said == {
        "job": "",
        "container": "container_7",
        "host": "nodeX",
        "address": "127.0.0.1",
        "gpus": [],
        "missing": [],
    }


def test_a_rank_runs_in_a_fresh_process_with_its_environment(gang: Gang) -> None:
    gang.run(report, CUDA_VISIBLE_DEVICES="GPU-1")
    started = gang.wait_for("started")
    ended = gang.wait_for("ended")
    kept = gang.wait_for("kept")
    assert ended["outcome"] == {"status": "returned"}
    assert (ended["exit_code"], ended["signal"], ended["stopped"]) == (0, None, False)
    value = pickle.loads(ended.payload)
    assert value["context"] == (0, "here", "r", 0)
    assert value["environment"]["RANK"] == "0"
    assert value["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert "TF_CONFIG" not in value["environment"]
    assert value["environment"]["HOME"].startswith(str(Path(value["cwd"]).parent))
    assert value["model_dir"] and value["group"]
    assert started["pid"] != gang.process.pid
    assert kept["problem"] is None
    assert (gang.lake / "runs/r/logs/rank-0.log").read_text() == "out\nerr\n"
    shown = b"".join(m.payload for m in gang.seen if m.kind == "output")
    assert shown == b"out\nerr\n"


def fails_in_user_code() -> None:
    def inner() -> None:
        raise LookupError("nothing here")

    inner()


def test_an_exception_comes_with_the_users_frames_only(gang: Gang) -> None:
    gang.run(fails_in_user_code)
    ended = gang.wait_for("ended")
    assert ended["outcome"]["status"] == "raised"
    assert ended["outcome"]["error"] == "LookupError: nothing here"
    trace = ended["outcome"]["traceback"]
    assert "in inner" in trace and "worker/rank.py" not in trace
    assert "LookupError: nothing here" in "\n".join(ended["log_tail"])


def raises_at_length() -> None:
    raise ValueError("x" * 2_000_000)


def test_a_huge_error_is_cut_and_the_agent_lives(gang: Gang) -> None:
    gang.run(raises_at_length)
    ended = gang.wait_for("ended")
    assert ended["outcome"]["error"].startswith("ValueError: xxx")
    assert "characters in all" in ended["outcome"]["error"]
    gang.run(os.getpid)
    assert pickle.loads(gang.wait_for("ended").payload) > 0


def test_too_large_a_value_is_not_sent(gang: Gang) -> None:
    gang.run(bytes, 101 * 2**20)
    ended = gang.wait_for("ended")
    assert ended["outcome"]["status"] == "too large"
    assert "at most 104857600" in ended["outcome"]["error"]
    assert ended.payload == b""


def test_a_rank_that_cannot_be_started_is_reported(gang: Gang) -> None:
    gang.run(os.getpid, HUGE="x" * 200_000)
    ended = gang.wait_for("ended")
    assert ended["outcome"]["status"] == "not started"
    assert "Argument list too long" in ended["outcome"]["error"]


def test_what_is_not_there_yet_says_so_and_is_no_attribute(gang: Gang) -> None:
    def look() -> tuple[bool, str]:
        import hopsgpu

        context = hopsgpu.context()
        try:
            context.data  # noqa: B018
        except hopsgpu.ConfigError as error:
            return hasattr(context, "data"), str(error)
        return True, ""

    gang.run(look)
    there, said = pickle.loads(gang.wait_for("ended").payload)
    assert (there, said) == (False, "context().data is not available yet")


def returns_a_lock() -> object:
    return threading.Lock()


@pytest.mark.parametrize(
    ("function", "args", "status", "exit_code"),
    [
        (sys.exit, (4,), "exited", 4),
        (sys.exit, (), "exited normally", 0),
        (os._exit, (5,), None, 5),
        (returns_a_lock, (), "unpicklable", 1),
    ],
)
def test_other_ends(
    gang: Gang, function: Callable[..., Any], args: tuple[Any, ...], status: str, exit_code: int
) -> None:
    gang.run(function, *args)
    ended = gang.wait_for("ended")
    assert ended["outcome"].get("status") == status
    assert ended["exit_code"] == exit_code
    if status == "unpicklable":
        assert "a lock that cannot be pickled" in ended["outcome"]["error"]


def prints_and_dies() -> None:
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_last_line_of_a_killed_rank_is_not_lost(gang: Gang) -> None:
    gang.run(prints_and_dies)
    ended = gang.wait_for("ended")
    assert (ended["exit_code"], ended["signal"]) == (None, "SIGKILL")
    assert ended["log_tail"] == ["last words"]
    gang.wait_for("kept")
    assert (gang.lake / "runs/r/logs/rank-0.log").read_text() == "last words\n"


def waits_with_a_child(pids: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pids).write_text(json.dumps([os.getpid(), child.pid]))
    print("waiting")
    child.wait()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped yet has."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)  # the end of a stranger's child is told to nobody
    return condition()


@pytest.fixture
def waiting(gang: Gang, tmp_path: Path) -> list[int]:
    file = tmp_path / "pids"
    gang.run(waits_with_a_child, str(file), memory=1024 * MIB)
    gang.wait_for("output")
    return list(json.loads(file.read_text()))


def test_stop_ends_the_rank_and_its_children(gang: Gang, waiting: list[int]) -> None:
    gang.server.send(0, "stop")
    ended = gang.wait_for("ended")
    assert (ended["signal"], ended["stopped"]) == ("SIGTERM", True)
    assert until(lambda: all(map(gone, waiting)))


def test_a_rank_that_ignores_sigterm_is_killed(gang: Gang) -> None:
    def stubborn() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("no", flush=True)
        threading.Event().wait()

    gang.run(stubborn)
    gang.wait_for("output")
    began = time.monotonic()
    gang.server.send(0, "stop")
    assert gang.wait_for("ended")["signal"] == "SIGKILL"
    assert 4 < time.monotonic() - began < 10


def test_an_agent_without_its_driver_ends_its_ranks_and_itself(
    gang: Gang, waiting: list[int]
) -> None:
    gang.server.end_all()
    assert gang.process.wait(SECONDS) == 0
    assert until(lambda: all(map(gone, waiting)))


def test_a_rank_dies_with_its_agent(gang: Gang, waiting: list[int]) -> None:
    gang.process.kill()
    assert until(lambda: gone(waiting[0]))
    os.kill(waiting[1], signal.SIGKILL)  # grandchildren are a later issue's keeper's


def uses(mib: int, seconds: float) -> int:
    """Allocates and keeps for a while; the pid."""
    kept = bytearray(b"x") * (mib * MIB)
    print("allocated")
    time.sleep(seconds)
    return os.getpid() if kept else 0


def uses_in_a_child(mib: int, pids: str) -> None:
    # A session of its own, as some launchers of helpers start them.
    code = f"import time; kept = bytearray(b'x') * ({mib} << 20); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    Path(pids).write_text(json.dumps([os.getpid(), child.pid]))
    child.wait()


def test_a_rank_over_its_memory_is_failed_with_numbers(gang: Gang) -> None:
    gang.run(uses, 400, 600, memory=200 * MIB)
    ended = gang.wait_for("ended")
    assert ended["outcome"]["status"] == "over memory"
    pid = next(m["pid"] for m in gang.seen if m.kind == "started")
    said = re.fullmatch(
        r"(\d+) MiB of 200 MiB \(memory_per_worker, which is what to raise\);"
        rf" its process: \S+ \(pid {pid}\) (\d+) MiB",
        ended["outcome"]["error"],
    )
    assert said is not None, ended["outcome"]
    assert 200 < int(said[1]) < 500
    assert (ended["signal"], ended["stopped"]) == ("SIGKILL", False)
    assert ended["peak_memory"] > 200 * MIB
    gang.run(os.getpid, memory=200 * MIB)
    assert pickle.loads(gang.wait_for("ended").payload) > 0


def test_what_a_ranks_child_uses_is_the_ranks(gang: Gang, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    gang.run(uses_in_a_child, 400, str(file), memory=200 * MIB)
    ended = gang.wait_for("ended")
    assert ended["outcome"]["status"] == "over memory"
    pids = json.loads(file.read_text())
    assert f"the largest of its 2 processes: python (pid {pids[1]})" in re.sub(
        r"python[\d.]+", "python", ended["outcome"]["error"]
    )
    assert until(lambda: all(map(gone, pids)))


def test_a_neighbour_of_a_rank_over_its_memory_stays(gang: Gang) -> None:
    def train() -> int:
        import hopsgpu

        return uses(*((400, 600) if hopsgpu.context().rank == 0 else (50, 3)))

    gang.run(train, ranks=2, memory=200 * MIB)
    ends = [gang.wait_for("ended"), gang.wait_for("ended")]
    assert [(end["rank"], end["outcome"]["status"]) for end in ends] == [
        (0, "over memory"),
        (1, "returned"),
    ]


def test_a_rank_below_its_memory_stays(gang: Gang) -> None:
    gang.run(uses, 100, 1.5, memory=200 * MIB)
    ended = gang.wait_for("ended")
    assert ended["outcome"] == {"status": "returned"}
    assert 100 * MIB < ended["peak_memory"] < 200 * MIB


def test_what_forked_children_share_counts_once(gang: Gang) -> None:
    def train() -> None:
        kept = bytearray(b"x") * (200 * MIB)
        children = []
        for _ in range(4):
            children.append(os.fork())
            if children[-1] == 0:
                own = bytearray(b"y") * (30 * MIB)
                time.sleep(1.5)
                os._exit(len(own) + len(kept) == 0)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4

    gang.run(train, memory=400 * MIB)
    ended = gang.wait_for("ended")
    assert ended["outcome"] == {"status": "returned"}
    # More than any one of them has: what is the children's own counts too.
    assert 310 * MIB < ended["peak_memory"] < 400 * MIB


def test_a_model_is_published_from_the_container(gang: Gang) -> None:
    def train() -> None:
        import hopsgpu

        (hopsgpu.context().model_dir / "w").write_text("weights")

    gang.run(train)
    gang.wait_for("kept")
    models = f"file://{gang.lake}/models"
    gang.server.send(0, "publish", rank=0, name="net", models_url=models, run_id="r")
    published = gang.wait_for("published")
    assert published["version"] == 1
    assert (gang.lake / "models/net/1/w").read_text() == "weights"
    gang.server.send(0, "end")
    assert gang.process.wait(SECONDS) == 0


def test_a_lake_that_refuses_is_told(gang: Gang) -> None:
    (gang.lake / "runs/r/logs").rmdir()
    gang.run(functools.partial(print, "x"))
    assert "cannot write" in gang.wait_for("kept")["problem"]


def test_a_reserved_port_is_held_until_the_rank_binds_it(gang: Gang) -> None:
    gang.server.send(0, "reserve", run_id="r")
    port = gang.wait_for("reserved")["port"]

    def bind() -> list[bool]:
        outcomes = []
        for reuse in (0, 1):
            with socket.socket() as mine:
                mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                try:
                    mine.bind(("", port))
                    outcomes.append(True)
                except OSError:
                    outcomes.append(False)
        return outcomes

    gang.run(bind)
    assert pickle.loads(gang.wait_for("ended").payload) == [False, True]


def test_the_reserved_port_is_kept_for_who_may_reuse_it() -> None:
    with held_port() as port:
        with socket.socket() as plain, pytest.raises(OSError):
            plain.bind(("", port))
        with socket.socket() as rank:
            rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rank.bind(("", port))
            rank.listen()
    with socket.socket() as free:
        free.bind(("", port))


def test_a_ranks_environment_is_pure() -> None:
    executor = {"PYTHONPATH": "/spark:/ours", "OMP_NUM_THREADS": "1", "KEEP": "1", "RANK": "7"}
    assert rank_environment(executor, {"RANK": "0", "OMP_NUM_THREADS": "4"}, ["/ours"]) == {
        "PYTHONPATH": "/ours:/spark",
        "OMP_NUM_THREADS": "4",
        "KEEP": "1",
        "RANK": "0",
    }


def test_nobody_answers() -> None:
    from hopsgpu.worker.holder import run_holder

    with held_port() as port, pytest.raises(OSError):
        run_holder(Driver("127.0.0.1", port, new_secret(), None))


def test_the_secret_is_not_shown() -> None:
    driver = Driver("127.0.0.1", 1, b"hush-hush", None)
    assert "hush" not in repr(driver)
