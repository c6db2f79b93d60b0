"""An agent and its ranks, without Spark: real processes, a real channel."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.agent import agent
from hopsgpu.agent.attempt_slot import AttemptSlot
from hopsgpu.agent.model_upload import ModelFiles, load_model_files, load_parts
from hopsgpu.agent.orphans import find_marked
from hopsgpu.agent.rank_environment import (
    own_variables,
    package_path,
    rank_environment,
    server_spec,
)
from hopsgpu.agent.rank_group import RankGroup
from hopsgpu.attempts.rank_output import Outputs
from hopsgpu.control.channel import Channel, Message, new_secret
from hopsgpu.control.events import Event
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.control.subscriptions import Subscription
from hopsgpu.core import own_log
from hopsgpu.core.gang import GangExecutor, assign_ranks
from hopsgpu.core.output_limits import LOG_LIMIT
from hopsgpu.data.rank_shards import RankShards
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import read_source
from hopsgpu.display.base import NoDisplay
from hopsgpu.gpu.node.discovery_script import CONTAINER_GPUS
from hopsgpu.gpu.sampling import NOT_INSTALLED
from hopsgpu.linux import parent_of
from hopsgpu.packaging.modules import PackedModules, pack_modules
from hopsgpu.packaging.pickling import pickle_call
from hopsgpu.packaging.python_env.environment import RankPython
from hopsgpu.rank.trial import Trial
from hopsgpu.storage.hadoop_tokens import TOKEN_FILE_VARIABLE as TOKEN_FILE
from hopsgpu.storage.lake import LakePath
from hopsgpu.units import MIB
from tests.bounds import HANG_SECONDS
from tests.conftest import gone, until

# For an agent to end; below the 30 s after which it gives up a driver that it does not hear.


class Gang:
    """A server with one agent in a process of its own, as a container has it."""

    def __init__(self, server: ControlServer, process: subprocess.Popen[bytes], lake: Path) -> None:
        self.server = server
        self.process = process
        self.lake = lake
        self.seen: list[Message] = []
        self._subscriptions: dict[str, Subscription] = {}
        self._subscribed = contextlib.ExitStack()
        self._subscribe("r")
        self.hello = self.wait_for("hello")

    def _subscribe(self, run_id: str) -> None:
        if run_id not in self._subscriptions:
            subscribed = self.server.subscribe(run_id, [0])
            self._subscriptions[run_id] = self._subscribed.enter_context(subscribed)

    def _next_event(self) -> Event | None:
        """The next event, of whichever run."""
        for run in self._subscriptions.values():
            if (event := run.next_event(0.02)) is not None:
                return event
        return self.server.next_event(0.0)

    def wait_for(self, kind: str) -> Message:
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            event = self._next_event()
            if event is not None and event.message is not None:
                self.seen.append(event.message)
                if event.message.kind == kind:
                    return event.message
        raise AssertionError(f"no {kind!r} among {[m.kind for m in self.seen]}")

    def output(self) -> bytes:
        """What was sent of the ranks' output until now."""
        return b"".join(m.payload for m in self.seen if m.kind == "output")

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 1,
        memory: int | None = None,
        frameworks: tuple[str, ...] = (),
        gpus: tuple[str, ...] = (),
        attempt: int = 0,
        data: Sequence[bytes] = (),
        run_id: str = "r",
        slot: int = 0,
        trial: Trial | None = None,
        named: str | None = None,
        **variables: str,
    ) -> None:
        self._subscribe(run_id)
        call = pickle_call(function, args, {})
        modules = _modules()
        described = [
            {
                "environment": {
                    "RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "GROUP_WORLD_SIZE": "1",
                    **variables,
                },
                "context": {
                    "rank": rank,
                    "local_rank": rank,
                    "world_size": ranks,
                    "host": "here",
                    "gpus": list(gpus),
                    "role": "worker",
                    "run_id": run_id,
                    "attempt": attempt,
                    "checkpoint_dir": f"file://{self.lake}/runs/{run_id}/checkpoints",
                    "log_dir_url": f"file://{self.lake}/runs/{run_id}/tensorboard",
                    "resume_dir": None,
                    "trial": trial and trial.as_fields(),
                    "script": "jobs/train.py",
                },
                "data_bytes": len(data[rank]) if data else 0,
            }
            for rank in range(ranks)
        ]
        assert self.server.keep(0, modules.digest, modules.archive)
        sent = self.server.send(
            0,
            "run",
            call + b"".join(data),
            run_id=run_id,
            slot=slot,
            run_url=f"file://{self.lake}/runs/{run_id}",
            attempt=attempt,
            memory=memory,
            shared=variables,
            frameworks=frameworks,
            call_bytes=len(call),
            log_limit=LOG_LIMIT,
            modules=named or modules.digest,
            roots=modules.roots,
            ranks=described,
        )
        assert sent

    def stop(self, run_id: str = "r", *, dump_stacks: bool = False) -> None:
        fields = {"dump_stacks": dump_stacks, "drop_saves": False}
        self.server.send(0, "stop", run_id=run_id, **fields)


@functools.cache
def _modules() -> PackedModules:
    return pack_modules([Path(__file__).parents[2] / "scripts"])


AGENT = (
    "import pickle, sys; from hopsgpu.agent.agent import run_agent;"
    "run_agent(pickle.load(sys.stdin.buffer));"
)


@contextlib.contextmanager
def serve_agent(
    lake: Path, command: Sequence[str], log: str = own_log.INFO, **options: Any
) -> Iterator[Gang]:
    """Run a server, and the command of an agent, which reads its DriverEndpoint from stdin."""
    (lake / "runs" / "r" / "logs").mkdir(parents=True)
    with serve(new_secret(), "127.0.0.1") as server:
        driver = DriverEndpoint("127.0.0.1", server.port, server._secret, None, log=log)
        with subprocess.Popen(command, stdin=subprocess.PIPE, **options) as process:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(driver))
            process.stdin.close()
            try:
                yield Gang(server, process, lake)
            finally:
                process.kill()


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    (tmp_path / "container").mkdir()
    environment = {**os.environ, "CONTAINER_ID": "container_7", "NM_HOST": "nodeX"}
    environment |= {"RANK": "99", "TF_CONFIG": "stale", "CUDA_VISIBLE_DEVICES": "stale"}
    environment.pop(TOKEN_FILE, None)
    command = [sys.executable, "-c", AGENT]
    with serve_agent(tmp_path / "lake", command, cwd=tmp_path / "container", env=environment) as g:
        yield g


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
        "argv": sys.argv,
    }


def test_hello_says_what_the_container_is(gang: Gang) -> None:
    said = dict(gang.hello.fields)
    assert abs(said.pop("time") - time.time()) < 60
    assert said.pop("python").startswith("3.")
    assert said == {
        "job": "",
        "container": "container_7",
        "host": "nodeX",
        "address": "127.0.0.1",
        "devices": [],
        "missing": [],
    }


def test_a_rank_runs_in_a_fresh_process_with_its_environment(gang: Gang) -> None:
    gang.run(report, CUDA_VISIBLE_DEVICES="GPU-1")
    before = time.time()
    started = gang.wait_for("started")
    entered = gang.wait_for("entered")
    ended = gang.wait_for("ended")
    # A kernel's clock for files may be a tick behind.
    assert before - 60 < entered["time"] <= ended["time"] + 0.01
    assert ended["outcome"] == {"status": "returned"}
    assert (ended["exit_code"], ended["signal"], ended["stopped"]) == (0, None, False)
    value = pickle.loads(ended.payload)
    assert value["context"] == (0, "here", "r", 0)
    assert value["environment"]["RANK"] == "0"
    assert value["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert "TF_CONFIG" not in value["environment"]
    assert value["environment"]["HOME"].startswith(str(Path(value["cwd"]).parent))
    assert value["argv"] == ["jobs/train.py"]
    assert value["model_dir"] and value["group"]
    assert started["pid"] != gang.process.pid
    assert gang.output() == b"out\nerr\n"
    assert not [m["text"] for m in gang.seen if m.kind == "warning"]


class Slow:
    """Takes its time to be unpickled, as a module to be imported."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return wait_until_there, (self.file,)


def wait_until_there(file: str) -> str:
    while not Path(file).exists():
        time.sleep(0.01)
    return file


def waits_then_runs(slow: str, file: str) -> float:
    began = time.time()
    wait_until_there(file)
    return began


def test_a_rank_runs_once_its_function_does_and_not_while_it_imports(
    gang: Gang, tmp_path: Path
) -> None:
    imported, done = tmp_path / "imported", tmp_path / "done"
    gang.run(functools.partial(waits_then_runs, Slow(str(imported)), str(done)))
    gang.wait_for("started")
    # What else it says meanwhile comes first, for the channel keeps the order.
    assert not [m for m in gang.seen if m.kind == "entered"]
    imported.touch()
    entered = gang.wait_for("entered")
    assert not [m for m in gang.seen if m.kind == "ended"], "it is told while the function runs"
    done.touch()
    began = pickle.loads(gang.wait_for("ended").payload)
    assert began - 0.5 < entered["time"] < began + 0.5


def no_module() -> Any:
    raise ImportError("no such module")


class Broken:
    def __reduce__(self) -> tuple[Any, ...]:
        return no_module, ()


def test_a_rank_that_fails_to_import_never_runs(gang: Gang) -> None:
    gang.run(functools.partial(print, Broken()))
    assert "no such module" in gang.wait_for("ended")["outcome"]["error"]
    assert not [m for m in gang.seen if m.kind == "entered"]


def leave_gpus(container: Path, gpus: dict[str, Any]) -> None:
    """Write what was given out at once, as the discovery script does: the agent may be reading."""
    new = container / f"{CONTAINER_GPUS}.new"
    new.write_text(json.dumps(gpus))
    new.replace(container / CONTAINER_GPUS)


def uses_cpu() -> str | None:
    return os.environ.get("ACCELERATE_USE_CPU")


@pytest.mark.parametrize(
    ("gpus", "name", "given", "told"),
    [
        ((), "", {}, "true"),
        (("GPU-1",), "Simulated GPU", {}, "true"),
        (("GPU-1",), "NVIDIA A100", {}, None),
        ((), "", {"ACCELERATE_USE_CPU": "false"}, "false"),
    ],
)
def test_accelerate_is_told_of_ranks_without_a_real_gpu(
    gang: Gang,
    tmp_path: Path,
    gpus: tuple[str, ...],
    name: str,
    given: dict[str, str],
    told: str | None,
) -> None:
    """It goes by what the discovery script gave out, and by the user's own value first."""
    gpu = {"name": name, "driver": "", "state": "healthy", "reason": "", "parent": ""}
    found = {"gpus": [{**gpu, "address": address} for address in gpus], "isolated": False}
    leave_gpus(tmp_path / "container", found)
    gang.run(uses_cpu, gpus=gpus, **given)
    assert pickle.loads(gang.wait_for("ended").payload) == told


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
    assert "in inner" in trace and "rank/entry.py" not in trace
    assert "LookupError: nothing here" in "\n".join(ended["log_tail"])


def raises_at_length() -> None:
    raise ValueError("x" * 2_000_000)


def unpacked_in(container: Path) -> list[tuple[int, int]]:
    """What tells the directories of modules of a container apart."""
    found = [path.stat() for path in (container / "hopsgpu").glob("modules-*")]
    return [(there.st_ino, there.st_ctime_ns) for there in found]


def test_modules_are_unpacked_before_ranks_want_them_and_once(gang: Gang, tmp_path: Path) -> None:
    container = tmp_path / "container"
    modules, other = _modules(), pack_modules([])
    reserve(gang)
    assert gang.server.keep(0, modules.digest, modules.archive)
    assert until(lambda: any(container.glob("hopsgpu/modules-*/0")))
    gang.run(os.getpid)
    gang.wait_for("ended")
    before = unpacked_in(container)
    assert len(before) == 1
    # What comes later waits for the ranks that are to have it: those before may go on.
    gang.server.keep(0, other.digest, other.archive)
    reserve(gang)
    assert unpacked_in(container) == before
    gang.server.disconnect_all()
    assert gang.process.wait(HANG_SECONDS) == 0
    assert not unpacked_in(container)


def test_a_run_whose_modules_were_not_sent_ends_the_agent(gang: Gang) -> None:
    gang.run(os.getpid)
    gang.wait_for("ended")
    gang.run(os.getpid, attempt=1, named="others")
    assert gang.process.wait(HANG_SECONDS) != 0


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


def returns_a_lock() -> object:
    return threading.Lock()


def test_each_rank_has_its_own_data_until_its_end(gang: Gang, tmp_path: Path) -> None:
    def read() -> tuple[list[int], bool, bool, int]:
        import hopsgpu

        data = hopsgpu.context().data
        if data is None:
            return [], False, False, 0
        seen = [int(n) for batch in data["train"].batches(2, epochs=2) for n in batch["n"]]
        kept = Path(os.environ["HOPSGPU_CONTEXT"]).with_name("data")
        same = hopsgpu.context().data is data
        return seen, same, any(kept.rglob("*")), len(data)

    parquet.write_table(pa.table({"n": range(6)}), tmp_path / "n.parquet")
    shards = plan_shards(read_source(LakePath(f"file://{tmp_path}/n.parquet")), 2)
    dealt = [RankShards({"train": s, "test": s}, is_single=False).dump() for s in shards]
    gang.run(read, ranks=3, data=[*dealt, b""])
    values = {
        e["rank"]: pickle.loads(e.payload) for e in (gang.wait_for("ended") for _ in range(3))
    }
    assert sorted(values[0][0] + values[1][0]) == sorted([*range(6)] * 2)
    assert values[0][1:] == values[1][1:] == (True, True, 2)
    assert values[2] == ([], False, False, 0)
    ranks = tmp_path / "container" / "hopsgpu" / "r-0"
    assert until(lambda: not list(ranks.glob("rank-*/data")))
    assert list(ranks.glob("rank-*/home"))


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


def needs_arguments() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", required=True)
    parser.parse_args()


def test_a_usage_error_is_the_scripts(gang: Gang) -> None:
    gang.run(needs_arguments)
    ended = gang.wait_for("ended")
    assert (ended["outcome"]["status"], ended["exit_code"]) == ("exited", 2)
    usage, error = ended["log_tail"]
    assert usage.startswith("usage: train.py ") and error.endswith(": --lr")


def test_message_of_an_exit_is_reported(gang: Gang) -> None:
    gang.run(sys.exit, "no data\nin /x")
    ended = gang.wait_for("ended")
    assert (ended["outcome"]["error"], ended["exit_code"]) == ("no data\nin /x", 1)


def keeps_a_file() -> str:
    directory = Path(os.environ["TMPDIR"])
    (directory / "file").write_text("kept")
    return str(directory)


def test_what_a_rank_has_left_in_tmpdir_is_reached_until_its_directory_is_removed(
    gang: Gang, tmp_path: Path
) -> None:
    gang.run(keeps_a_file)
    directory = Path(pickle.loads(gang.wait_for("ended").payload))
    own = tmp_path / "container" / "hopsgpu" / "r-0" / "rank-0" / "tmp"
    assert directory.samefile(own) and (directory / "file").read_text() == "kept"
    gang.run(keeps_a_file)
    second = Path(pickle.loads(gang.wait_for("ended").payload))
    assert second != directory and not os.path.lexists(directory.parent)
    for _ in range(2):
        gang.run(keeps_a_file, trial=Trial(0, {}))
        third = Path(pickle.loads(gang.wait_for("ended").payload))
        assert until(lambda link=second.parent: not os.path.lexists(link))
        second = third
    gang.server.disconnect_all()
    gang.process.wait(HANG_SECONDS)
    assert until(lambda: not third.parent.parent.exists())


def fails_and_stays() -> None:
    # Not a daemon: the interpreter waits for it before it ends.
    threading.Thread(target=threading.Event().wait).start()
    raise LookupError("and yet it does not end")


def test_a_rank_that_has_failed_and_does_not_end_is_ended(gang: Gang) -> None:
    gang.run(fails_and_stays)
    ended = gang.wait_for("ended")
    assert ended["outcome"]["error"].startswith("LookupError: ")
    assert (ended["signal"], ended["stopped"]) == ("SIGKILL", False)


def prints_and_dies() -> None:
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_last_line_of_a_killed_rank_is_not_lost(gang: Gang) -> None:
    gang.run(prints_and_dies)
    ended = gang.wait_for("ended")
    assert (ended["exit_code"], ended["signal"]) == (None, "SIGKILL")
    assert ended["log_tail"] == ["last words"]
    assert gang.output() == b"last words\n"


def waits_with_a_child(pids: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pids).write_text(json.dumps([os.getpid(), child.pid]))
    print("waiting")
    child.wait()


@pytest.fixture
def waiting(gang: Gang, tmp_path: Path) -> list[int]:
    file = tmp_path / "pids"
    gang.run(waits_with_a_child, str(file), memory=1024 * MIB)
    gang.wait_for("output")
    return list(json.loads(file.read_text()))


def test_stop_ends_the_rank_and_its_children(gang: Gang, waiting: list[int]) -> None:
    gang.stop()
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
    gang.stop()
    assert gang.wait_for("ended")["signal"] == "SIGKILL"
    assert 4 < time.monotonic() - began < HANG_SECONDS


def test_an_agent_without_its_driver_ends_its_ranks_and_itself(
    gang: Gang, waiting: list[int]
) -> None:
    gang.server.disconnect_all()
    assert gang.process.wait(HANG_SECONDS) == 0
    assert until(lambda: all(map(gone, waiting)))


def test_a_rank_and_its_children_die_with_its_agent(gang: Gang, waiting: list[int]) -> None:
    gang.process.kill()
    assert until(lambda: all(map(gone, waiting)))


def test_a_daemon_that_is_killed_takes_its_ranks_along_and_another_comes(
    gang: Gang, waiting: list[int], tmp_path: Path
) -> None:
    (token,) = (tmp_path / "container").glob("hopsgpu/process-daemon-*/token")
    (daemon,) = {parent_of(parent_of(waiting[0]))}
    os.kill(daemon, signal.SIGKILL)
    ended = gang.wait_for("ended")
    assert (ended["signal"], ended["stopped"]) == ("SIGKILL", False)
    assert all(map(gone, waiting)) and not find_marked(token.read_text())
    gang.run(os.getpid)
    assert pickle.loads(gang.wait_for("ended").payload) > 0


def aborts(how: str) -> None:
    import ctypes

    print(f"about to {how}")
    # More of what crowds out the reason.
    for _ in range(3):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if how == "throw":
        ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
    elif how == "free twice":
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        taken = ctypes.c_void_p(libc.malloc(64))
        libc.free(taken)
        libc.free(taken)
    else:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply_async(aborts, ("throw",))
            until(lambda: "terminate called" in Path("../log").read_text())
            raise RuntimeError("a worker has died")


def test_a_native_abort_shows_its_reason_and_no_frames_of_hopsgpu(gang: Gang) -> None:
    for how, why in (
        ("throw", "terminate called without an active exception"),
        ("free twice", "free(): double free detected in tcache 2"),
    ):
        gang.run(aborts, how)
        ended = gang.wait_for("ended")
        assert ended["signal"] == "SIGABRT"
        assert ended["log_tail"][:4] == [
            f"about to {how}",
            why,
            "Fatal Python error: Aborted",
            "Current thread (most recent call first):",
        ]
        (frame,) = ended["log_tail"][4:]
        assert re.fullmatch(r'  File ".*test_agent.py", line \d+ in aborts', frame)
        # Nor has the log, but for threads of the user's.
        log = gang.output().decode()
        assert why in log and "in aborts" in log and "Thread 0x" in log
        assert "hopsgpu/rank/" not in log and "runpy" not in log


def test_debug_keeps_hopsgpus_frames_in_ranks(gang: Gang) -> None:
    gang.run(aborts, "throw", HOPSGPU_LOG="debug")
    tail = "\n".join(gang.wait_for("ended")["log_tail"])
    for told in (tail, gang.output().decode()):
        assert "in aborts" in told and "rank/entry.py" in told
    gang.run(fails_in_user_code, HOPSGPU_LOG="debug")
    assert "rank/entry.py" in gang.wait_for("ended")["outcome"]["traceback"]


def test_the_crash_of_what_a_rank_had_started_is_told_beside_its_exception(gang: Gang) -> None:
    gang.run(aborts, "fork")
    outcome = gang.wait_for("ended")["outcome"]
    assert outcome["error"] == "RuntimeError: a worker has died"
    said = outcome["besides"].splitlines()
    assert said[:5] == [
        "a process that it had started crashed:",
        "about to fork",
        "about to throw",
        "terminate called without an active exception",
        "Fatal Python error: Aborted",
    ]
    assert "in aborts" in said[6] and "hopsgpu/rank/" not in outcome["besides"]


def waits_in_a_named_function() -> None:
    print("waiting")
    threading.Event().wait()


def test_stacks_are_in_the_log_of_a_rank_that_is_stopped_for_hanging(gang: Gang) -> None:
    gang.run(waits_in_a_named_function)
    gang.wait_for("output")
    gang.stop(dump_stacks=True)
    ended = gang.wait_for("ended")
    assert ended["signal"] == "SIGTERM"
    waiting, begin, *stack = ended["log_tail"]
    assert (waiting, begin) == ("waiting", "Current thread (most recent call first):")
    assert "in waits_in_a_named_function" in stack[-1]
    assert "hopsgpu/rank/" not in gang.output().decode()


def test_a_rank_is_forked_from_what_its_container_has_imported(gang: Gang) -> None:
    def look() -> tuple[bool, int]:
        return "wave" in sys.modules, os.getppid()

    values = []
    for _ in range(2):
        gang.run(look, frameworks=("wave",))
        values.append(pickle.loads(gang.wait_for("ended").payload))
    assert not [m["text"] for m in gang.seen if m.kind == "warning"]
    assert values[0][0] and values[0] == values[1]


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose import never ends, on the executors' path; before `gang`."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "hanging.py").write_text(
        "import pathlib, signal\n"
        "pathlib.Path(__file__).with_name('began').touch()\n"
        "signal.pause()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)
    return "hanging"


def test_a_rank_that_is_stopped_before_it_has_started(
    hanging: str, gang: Gang, tmp_path: Path
) -> None:
    gang.run(os.getpid, frameworks=(hanging,))
    assert until((tmp_path / "path" / "began").exists)
    gang.stop()
    ended = gang.wait_for("ended")
    assert (ended["outcome"]["status"], ended["stopped"]) == ("not started", True)
    gang.server.disconnect_all()
    assert gang.process.wait(HANG_SECONDS) == 0


@pytest.mark.parametrize("reserved", [False, True])
def test_an_agent_without_its_driver_does_not_wait_for_an_import(
    hanging: str, gang: Gang, tmp_path: Path, reserved: bool
) -> None:
    if reserved:
        # What the ranks will want is imported from here on.
        reserve(gang, frameworks=(hanging,))
    else:
        gang.run(os.getpid, frameworks=(hanging,))
    assert until((tmp_path / "path" / "began").exists)
    gang.server.disconnect_all()
    assert gang.process.wait(HANG_SECONDS) == 0


def uses(mib: int, seconds: float) -> int:
    """Allocates and keeps for a while; the pid."""
    kept = bytearray(b"x") * (mib * MIB)
    print("allocated")
    time.sleep(seconds)
    return os.getpid() if kept else 0


def uses_in_a_child(mib: int, pids: str) -> None:
    # A session of its own, as some launchers of helpers start them.
    code = f"input(); kept = bytearray(b'x') * ({mib} << 20); import time; time.sleep(600)"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
    )
    Path(pids).write_text(json.dumps([os.getpid(), child.pid]))
    # Both are killed as soon as it has allocated.
    child.communicate(b"\n")


def test_a_rank_over_its_memory_is_failed_with_numbers(gang: Gang) -> None:
    gang.run(uses, 400, 600, memory=200 * MIB)
    ended = gang.wait_for("ended")
    assert ended["outcome"]["status"] == "over memory"
    pid = next(m["pid"] for m in gang.seen if m.kind == "started")
    said = re.fullmatch(
        r"(\d+) MiB of 200 MiB \(the limit is memory_per_worker: raise it\);"
        rf" its process: \S+ \(pid {pid}\) (\d+) MiB",
        ended["outcome"]["error"],
    )
    assert said is not None, ended["outcome"]
    assert 200 < int(said[1]) < 500
    assert (ended["signal"], ended["stopped"]) == ("SIGKILL", False)
    assert ended["peak_memory"] > 200 * MIB
    gang.run(os.getpid, memory=200 * MIB)
    assert pickle.loads(gang.wait_for("ended").payload) > 0


def test_memory_of_child_processes_counts_for_the_rank(gang: Gang, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    gang.run(uses_in_a_child, 400, str(file), memory=200 * MIB)
    ended = gang.wait_for("ended")
    assert ended["outcome"]["status"] == "over memory"
    pids = json.loads(file.read_text())
    assert re.search(rf" 2 processes: python\S* \(pid {pids[1]}\)", ended["outcome"]["error"])
    assert until(lambda: all(map(gone, pids)))


def test_a_neighbour_of_a_rank_over_its_memory_stays(gang: Gang, tmp_path: Path) -> None:
    def train(go: str) -> int:
        import hopsgpu

        if hopsgpu.context().rank == 0:
            return uses(400, 600)
        kept = bytearray(b"x") * (50 * MIB)
        while not Path(go).exists():
            time.sleep(0.05)  # nobody tells
        return len(kept)

    gang.run(train, str(tmp_path / "go"), ranks=2, memory=200 * MIB)
    first = gang.wait_for("ended")
    assert (first["rank"], first["outcome"]["status"]) == (0, "over memory")
    (tmp_path / "go").touch()
    second = gang.wait_for("ended")
    assert (second["rank"], second["outcome"]["status"]) == (1, "returned")


def test_a_rank_below_its_memory_stays(gang: Gang) -> None:
    # The process has 100 MiB before it allocates.
    gang.run(uses, 60, 1.5, memory=200 * MIB)
    ended = gang.wait_for("ended")
    assert ended["outcome"] == {"status": "returned"}
    assert 60 * MIB < ended["peak_memory"] < 200 * MIB


def test_shared_memory_of_forked_children_counts_once(gang: Gang) -> None:
    def train() -> None:
        kept = bytearray(b"x") * (200 * MIB)
        told, go = os.pipe(), os.pipe()
        children = []
        for _ in range(4):
            children.append(os.fork())
            if children[-1] == 0:
                own = bytearray(b"y") * (30 * MIB)
                os.close(go[1])
                os.write(told[1], b"!")
                os.read(go[0], 1)
                os._exit(len(own) + len(kept) == 0)
        for _ in children:
            os.read(told[0], 1)
        # All of them have it until somebody has looked.
        time.sleep(5)
        os.close(go[1])
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4

    gang.run(train, memory=400 * MIB)
    ended = gang.wait_for("ended")
    assert ended["outcome"] == {"status": "returned"}
    # More than any one of them has: what is the children's own counts too.
    assert 310 * MIB < ended["peak_memory"] < 400 * MIB


def test_models_are_uploaded_from_the_container(gang: Gang) -> None:
    def train() -> None:
        import hopsgpu

        rank = hopsgpu.context().rank
        if rank:
            (hopsgpu.context().model_dir / "layers").mkdir()
            (hopsgpu.context().model_dir / "layers" / f"w{rank}").write_text("weights")

    gang.run(train, ranks=3)
    for _ in range(3):
        gang.wait_for("ended")
    gang.server.send(0, "left", ranks=[0, 1, 2], run_id="r")
    left = load_model_files(gang.wait_for("left").payload)
    assert left == {0: ModelFiles(0, 0), 1: ModelFiles(1, 7), 2: ModelFiles(1, 7)}
    staging = f"file://{gang.lake}/models/net/_staging/id"
    gang.server.send(0, "publish", ranks=[1, 2], staging_url=staging, run_id="r")
    parts = load_parts(gang.wait_for("uploaded").payload)
    assert {rank: list(part) for rank, part in parts.items()} == {
        1: ["layers/w1"],
        2: ["layers/w2"],
    }
    for rank, part in parts.items():
        (file,) = (gang.lake / "models/net/_staging/id").rglob(f"w{rank}")
        assert file.read_text() == "weights"
        assert next(iter(part.values())).bytes == 7
    gang.server.disconnect_all()
    assert gang.process.wait(HANG_SECONDS) == 0


def test_refused_upload_is_reported(gang: Gang) -> None:
    def train() -> None:
        import hopsgpu

        (hopsgpu.context().model_dir / "w").write_text("weights")

    gang.run(train)
    gang.wait_for("ended")
    (gang.lake / "models").write_text("in the way")
    staging = f"file://{gang.lake}/models/net/_staging/id"
    gang.server.send(0, "publish", ranks=[0], staging_url=staging, run_id="r")
    assert "models/net" in gang.wait_for("publish-failed")["reason"]


def test_invalid_name_of_a_rank_is_reported_before_any_upload(gang: Gang) -> None:
    def train() -> None:
        import hopsgpu

        rank = hopsgpu.context().rank
        (hopsgpu.context().model_dir / ("w", "w:1")[rank]).write_text("weights")

    gang.run(train, ranks=2)
    for _ in range(2):
        gang.wait_for("ended")
    gang.server.send(0, "left", ranks=[0, 1], run_id="r")
    left = load_model_files(gang.wait_for("left").payload)
    assert left[0] == ModelFiles(1, 7)
    assert "'w:1'" in left[1].problem


def test_model_files_of_replaced_ranks_cannot_be_published(gang: Gang) -> None:
    for run_id in ("before", "r"):
        gang.run(print, run_id=run_id)
        gang.wait_for("ended")
    for kind in ("left", "publish"):
        gang.server.send(0, kind, ranks=[0], staging_url="file:///nowhere", run_id="before")
        assert "before" in gang.wait_for("publish-failed")["reason"]
    gang.server.send(0, "left", ranks=[0], run_id="r")
    assert gang.wait_for("left").payload


def test_stop_right_after_publish_ends_the_upload() -> None:
    stopped: list[bool] = []

    def upload(_: object, __: str, stop: threading.Event) -> dict[int, Any]:
        stopped.append(stop.wait(HANG_SECONDS))
        return {}

    class Silent:
        async def notify(self, *_: object, **__: object) -> None:
            """The driver is not connected."""

    class Ended:
        run_id = "r"

        async def stop(self, *, should_dump_stacks: bool, should_drop_saves: bool) -> None:
            """There is no rank any more."""

    async def act() -> None:
        async with asyncio.TaskGroup() as tasks:
            its = agent.Agent(cast("Channel", Silent()), tasks, upload=upload)
            its._slots[0] = AttemptSlot(rank_group=cast("RankGroup", Ended()))
            publish = {"run_id": "r", "ranks": [], "staging_url": "file:///nowhere"}
            await its._handle_message(Message("publish", publish, b""))
            await its._handle_message(
                Message("stop", {"run_id": "r", "dump_stacks": False, "drop_saves": False}, b"")
            )

    asyncio.run(act())
    assert stopped == [True]


def saves_and_dies(step: int) -> None:
    import hopsgpu

    context = hopsgpu.context()
    Path("state").mkdir(exist_ok=True)
    Path("state", "weights").write_text(f"step {step}")
    (context.log_dir / "events.out.tfevents.1").write_text("event")
    context.save_checkpoint("state", step, metric=0.5)
    Path("state", "weights").write_text("rewritten")
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_rank_saved_and_logged_is_there_though_it_was_killed_once_it_has_saved(
    gang: Gang,
) -> None:
    def latest() -> tuple[str, str]:
        import hopsgpu

        found, best = hopsgpu.context().latest_checkpoint(), hopsgpu.context().best_checkpoint()
        assert found is not None and best is not None
        return found.name, (best / "weights").read_text()

    gang.run(saves_and_dies, 3)
    assert gang.wait_for("ended")["signal"] == "SIGKILL"
    (saved,) = [m for m in gang.seen if m.kind == "saved"]
    assert (saved["rank"], saved["step"], saved["complete"]) == (0, 3, True)
    assert saved["agreed"] is None
    step = gang.lake / "runs/r/checkpoints/3"
    assert (step / "rank-0.0.0/state/weights").read_text() == "step 3"
    log = gang.lake / "runs/r/tensorboard/rank-0/events.out.tfevents.1"
    assert log.read_text() == "event"
    gang.run(latest, attempt=1)
    assert pickle.loads(gang.wait_for("ended").payload) == ("state", "step 3")
    assert not [m["text"] for m in gang.seen if m.kind == "warning"]


def test_what_each_rank_has_saved_is_told_and_with_which_the_step_is_complete(gang: Gang) -> None:
    def train(directory: str) -> None:
        import hopsgpu

        context = hopsgpu.context()
        Path("state").write_text(str(context.rank))
        for step in (1, 2):
            while not Path(directory, f"{step}-{context.rank}").exists():
                time.sleep(0.01)  # nobody tells
            context.save_checkpoint("state", step)

    gang.run(train, str(gang.lake), ranks=2)
    told = []
    for step, rank in ((1, 0), (1, 1), (2, 1), (2, 0)):
        (gang.lake / f"{step}-{rank}").touch()
        saved = gang.wait_for("saved")
        assert (saved["rank"], saved["step"], saved["attempt"]) == (rank, step, 0)
        told.append(saved["complete"])
    # When rank 0 has saved the first step, nobody knows yet that rank 1 saves too.
    assert told == [True, True, False, True]


def test_refused_checkpoint_is_a_warning_and_raised_by_the_next_save(gang: Gang) -> None:
    def train(told: str) -> str:
        import hopsgpu

        Path("state").write_text("s")
        context = hopsgpu.context()
        context.save_checkpoint("state", 1)
        while not Path(told).exists():
            time.sleep(0.01)  # nobody tells
        try:
            context.save_checkpoint("state", 2)
        except hopsgpu.StoreError as error:
            context.save_checkpoint("state", 3)
            return str(error)
        return ""

    (gang.lake / "runs/r/checkpoints").write_text("in the way")
    go = gang.lake / "go"
    gang.run(train, str(go))
    warning = gang.wait_for("warning")["text"]
    assert warning.startswith("rank 0's checkpoint at step 1 ")
    (gang.lake / "runs/r/checkpoints").unlink()
    go.touch()
    assert pickle.loads(gang.wait_for("ended").payload).startswith(warning)
    assert (gang.lake / "runs/r/checkpoints/3/rank-0.0.0/state").read_text() == "s"


def test_large_values_go_by_the_lake_with_a_digest(gang: Gang) -> None:
    gang.run(functools.partial(bytes, 2**21))
    ended = gang.wait_for("ended")
    assert ended.payload == b""
    file = gang.lake / "runs/r" / ended["value"]["name"]
    assert hashlib.sha256(file.read_bytes()).hexdigest() == ended["value"]["digest"]
    assert pickle.loads(file.read_bytes()) == bytes(2**21)


def test_refused_value_is_reported(gang: Gang) -> None:
    (gang.lake / "runs/r/values").write_text("in the way")
    gang.run(functools.partial(bytes, 2**21))
    outcome = gang.wait_for("ended")["outcome"]
    assert outcome["status"] == "value lost" and "runs/r/values" in outcome["error"]


def reserve(gang: Gang, **asked: Any) -> Message:
    fields = {"ports": 2, "store": 0, "shared": {}, "frameworks": (), "interface": None}
    fields |= {"run_id": "r", "slot": 0, "others": ["127.0.0.1"]}
    run = gang.lake / "runs" / "r"
    run.mkdir(parents=True, exist_ok=True)  # as the driver has made it
    fields["run_url"] = run.as_uri()
    gang.server.send(0, "reserve", **fields | asked)
    return gang.wait_for("reserved")


def test_a_container_that_cannot_write_to_the_lake_says_so_before_ranks_start(gang: Gang) -> None:
    # Not even root can create a file there.
    reserved = reserve(gang, run_url="file:///sys/kernel")
    assert reserved["configured"] and "cannot write to the lake" in reserved["problem"]
    # Any other error is left to ranks that store something.
    (gang.lake / "file").write_text("in the way")
    assert reserve(gang, run_url=f"file://{gang.lake}/file/run")["ports"]
    # It is tried again for the next launch, and nothing is left of a trial.
    assert reserve(gang)["ports"]
    assert not list((gang.lake / "runs" / "r").glob(".write-check-*"))


def test_reserved_ports_are_held_until_the_rank_binds_them(gang: Gang) -> None:
    reserved = reserve(gang)
    assert (reserved["address"], reserved["interface"]) == ("127.0.0.1", "lo")
    assert reserved["store"] is None and len(set(reserved["ports"])) == 2

    def bind(ports: list[int]) -> list[bool]:
        outcomes = []
        for port in ports:
            for reuse in (0, 1):
                with socket.socket() as mine:
                    mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                    try:
                        mine.bind(("", port))
                        outcomes.append(True)
                    except OSError:
                        outcomes.append(False)
        return outcomes

    gang.run(bind, reserved["ports"])
    assert pickle.loads(gang.wait_for("ended").payload) == [False, True] * 2


def test_a_node_without_the_wanted_interface_says_what_there_is(gang: Gang) -> None:
    problem = reserve(gang, interface="ib7")["problem"]
    assert "spark.hopsgpu.interface='ib7' " in problem and "available: " in problem


def test_the_agent_serves_a_store_that_ends_with_the_attempt(gang: Gang) -> None:
    def join(port: int) -> str:
        import importlib

        distributed = importlib.import_module("torch.distributed")
        store = distributed.TCPStore("127.0.0.1", port, 1, is_master=False)
        store.set("who", os.environ["RANK"])
        return str(store.get("who"), "ascii")

    port = reserve(gang, store=1, frameworks=("torch",))["store"]
    gang.run(join, port, frameworks=("torch",))
    assert pickle.loads(gang.wait_for("ended").payload) == "0"
    again = reserve(gang, store=1, frameworks=("torch",))["store"]
    assert again != port
    assert until(lambda: is_refused(port)) and not is_refused(again)


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_what_a_rank_reports_comes_folded_and_whole(gang: Gang) -> None:
    def train() -> None:
        import hopsgpu

        for step in range(3):
            hopsgpu.context().report(step, loss=1.0 - step)

    gang.run(train)
    gang.wait_for("ended")
    record = b"".join(m.payload for m in gang.seen if m.kind == "record")
    assert [json.loads(line)["step"] for line in record.splitlines()] == [0, 1, 2]
    folded = [json.loads(m.payload) for m in gang.seen if m.kind == "reports"]
    assert (folded[-1]["step"], folded[-1]["metrics"]) == (2, {"loss": -1.0})


NVML = """
from types import SimpleNamespace

NVML_TEMPERATURE_GPU = 0
class NVMLError(Exception): value = 999
class NVMLError_NotSupported(NVMLError): value = 3
class NVMLError_FunctionNotFound(NVMLError): value = 13
class NVMLError_ArgumentVersionMismatch(NVMLError): value = 25
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetHandleByUUID = {"GPU-7": "handle"}.__getitem__
nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=75, memory=1)
nvmlMemory_v2 = 2
nvmlDeviceGetMemoryInfo = lambda handle, version: SimpleNamespace(total=80 << 30, used=2 << 30)
nvmlDeviceGetPowerUsage = lambda handle: 301_500
nvmlDeviceGetTemperature = lambda handle, sensor: 61

# XID 79 once the file `xid` is beside this one.
import pathlib
nvmlEventTypeXidCriticalError = 8
nvmlEventSetCreate = lambda: "events"
nvmlEventSetFree = lambda events: None
nvmlDeviceGetUUID = lambda handle: "GPU-7"
nvmlDeviceRegisterEvents = lambda handle, kinds, events: None
def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    raise NVMLError("not a MIG device")
def nvmlEventSetWait_v2(events, milliseconds):
    file = pathlib.Path(__file__).with_name("xid")
    if not file.exists():
        raise NVMLError("timeout")
    file.unlink()
    return SimpleNamespace(device="handle", eventData=79)
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVML that knows GPU-7, on the path of the agent's process; before `gang`."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)


def test_what_nvml_tells_comes_to_the_status_and_the_record(
    nvml: None, gang: Gang, tmp_path: Path
) -> None:
    def train(go: str) -> None:
        import hopsgpu

        hopsgpu.context().report(3, loss=0.5)
        while not Path(go).exists():
            time.sleep(0.01)  # nobody tells

    gang.run(train, str(tmp_path / "go"), gpus=("GPU-7",))
    world = assign_ranks([GangExecutor(0, "container_7", "nodeX", "127.0.0.1", ("GPU-7",))], 1)
    told = {"utilisation": 0.75, "memory_used": 2 << 30, "memory_total": 80 << 30}
    told |= {"power": 301.5, "temperature": 61}
    with Outputs(world, NoDisplay()) as outputs:
        while "gpu.0.power" not in outputs.metrics()[0] or "loss" not in outputs.metrics()[0]:
            outputs.add_reports(0, gang.wait_for("reports").payload)
        (tmp_path / "go").touch()
        assert gang.wait_for("ended")["exit_code"] == 0
        seen = {f"gpu.0.{name}": value for name, value in told.items()}
        seen |= {"gpu.0.memory_peak": 2 << 30, "step": 3, "loss": 0.5}
        assert outputs.metrics() == (seen,)
        assert outputs.utilisation(0) == 0.75
        for message in gang.seen:
            if message.kind == "record":
                outputs.add_record(0, message.payload)
        for _, upload in outputs.take_over().uploads(LakePath(f"file://{gang.lake}/logs")):
            upload()
    lines = (gang.lake / "logs" / "metrics-0.jsonl").read_text().splitlines()
    samples = [line for line in map(json.loads, lines) if "gpu" in line]
    assert samples and all(sample["gpu"] == {"uuid": "GPU-7", **told} for sample in samples)
    assert all(abs(sample["time"] - time.time()) < 60 for sample in samples)
    assert len(lines) == len(samples) + 1


def test_a_rank_that_waits_for_data_and_saves_is_told_of(gang: Gang, tmp_path: Path) -> None:
    def train(rows: str) -> int:
        import shutil

        import hopsgpu

        context = hopsgpu.context()
        data = context.data
        assert not isinstance(data, dict) and data is not None
        batches = data.batches(2)
        first = next(batches)
        assert len(first["n"]) == 2
        # What the user's own code does meanwhile is not told.
        time.sleep(0.5)
        for _ in range(3):
            shutil.copyfile(rows, "state")
            context.save_checkpoint("state", 1)
        return len(list(batches))

    parquet.write_table(pa.table({"n": range(6)}), tmp_path / "n.parquet")
    (shard,) = plan_shards(read_source(LakePath(f"file://{tmp_path}/n.parquet")), 1)
    dealt = RankShards({"data": shard}, is_single=True).dump()
    gang.run(train, str(tmp_path / "n.parquet"), data=[dealt])
    ended = gang.wait_for("ended")
    assert pickle.loads(ended.payload) == 2
    told = [m for m in gang.seen if m.kind == "blocked"]
    last = told[-1]
    # The first rows are not there at once, and the third save waits for the first.
    assert last["rank"] == 0 and last["data"] > 0.0 and last["checkpoints"] > 0.0
    assert [m["data"] for m in told] == sorted(m["data"] for m in told)
    assert gang.seen.index(last) < gang.seen.index(ended), "before the end"


def test_a_rank_that_does_neither_is_not_told_of(gang: Gang) -> None:
    gang.run(os.getpid)
    gang.wait_for("ended")
    assert not [m for m in gang.seen if m.kind == "blocked"]


def test_a_ranks_environment_is_pure() -> None:
    executor = {"PYTHONPATH": "/spark:/ours", "OMP_NUM_THREADS": "1", "KEEP": "1", "RANK": "7"}
    assert rank_environment(executor, {"RANK": "0", "OMP_NUM_THREADS": "4"}, ["/ours"]) == {
        "PYTHONPATH": "/ours:/spark",
        "OMP_NUM_THREADS": "4",
        "KEEP": "1",
        "RANK": "0",
    }


def test_directories_of_caches_that_cannot_be_used_are_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    none, new = str(tmp_path / "file" / "cache"), str(tmp_path / "new" / "cache")
    good = {
        "XDG_CACHE_HOME": new,
        "MPLCONFIGDIR": str(tmp_path / "there"),
        "TRITON_CACHE_DIR": "relative",
        "HF_HOME": new,
        "OTHER_CACHE": none,
    }
    assert rank_environment(good, {}, []) == {**good, "PYTHONPATH": ""}
    bad = {"XDG_CACHE_HOME": none, "TORCHINDUCTOR_CACHE_DIR": none, "HF_HOME": none}
    assert rank_environment(bad, {}, []) == {"PYTHONPATH": ""}
    # What the user has given stays.
    assert rank_environment(bad, {"HF_HOME": none}, []) == {"HF_HOME": none, "PYTHONPATH": ""}
    if os.geteuid() != 0:
        (tmp_path / "there").chmod(0o500)
        read = {"HF_HOME": str(tmp_path / "there")}
        refused = {"XDG_CACHE_HOME": str(tmp_path / "there")}
        assert rank_environment({**read, **refused}, {}, []) == {**read, "PYTHONPATH": ""}


def test_tasks_of_one_executor_share_fork_servers() -> None:
    executor = {"PATH": "/bin", "LD_LIBRARY_PATH": "/cuda", "OMP_NUM_THREADS": "1"}
    executor |= {"RANK": "99", "PYTHONPATH": "/spark"}
    holder = executor | {"SPARK_BUFFER_SIZE": "1", "PYTHON_WORKER_FACTORY_PORT": "1", "HOME": "/a"}
    agent = executor | {"PYSPARK_TASK": "2", "HOME": "/b", "HOPSGPU_PROCESS_DAEMON": "token"}
    shared = {"OMP_NUM_THREADS": "4"}
    spec = server_spec(holder, shared, ["torch"], RankPython("python"))
    assert spec == server_spec(agent, shared, ["torch"], RankPython("python"))
    assert spec.environment == {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/cuda",
        "OMP_NUM_THREADS": "4",
        "PYTHONPATH": os.pathsep.join((package_path(), "/spark")),
    }
    assert spec != server_spec(agent, {"OMP_NUM_THREADS": "2"}, ["torch"], RankPython("python"))
    rank = rank_environment(agent, {**shared, "RANK": "0"}, [package_path()])
    own = own_variables(rank, spec)
    assert own == {"PYSPARK_TASK": "2", "HOME": "/b", "RANK": "0"}
    assert {**spec.environment, **own} == rank


def test_the_secret_is_not_shown() -> None:
    driver = DriverEndpoint("127.0.0.1", 1, b"hush-hush", None)
    assert "hush" not in repr(driver)


def test_a_rank_whose_gpu_falls_off_the_bus_is_ended_with_that_reason(
    nvml: None, gang: Gang, tmp_path: Path
) -> None:
    gang.run(time.sleep, 600, gpus=("GPU-7",))
    gang.wait_for("record")
    (tmp_path / "path" / "xid").touch()
    ended = gang.wait_for("ended")
    assert ended["outcome"]["status"] == "gpu failed" and not ended["stopped"]
    (event,) = ended["gpu_events"]
    assert (event["gpu"], event["state"]) == ("GPU-7", "bad")
    assert event["reason"].startswith("XID 79, GPU has fallen off the bus")


def crashes_with(xid: str) -> None:
    Path(xid).touch()
    while Path(xid).exists():
        time.sleep(0.01)  # the driver tells of it before the rank does
    os.abort()


def test_a_rank_that_crashes_of_its_gpu_is_not_said_to_have_been_ended(
    nvml: None, gang: Gang, tmp_path: Path
) -> None:
    gang.run(crashes_with, str(tmp_path / "path" / "xid"), gpus=("GPU-7",))
    ended = gang.wait_for("ended")
    assert (ended["signal"], ended["outcome"]) == ("SIGABRT", {})
    assert [event["gpu"] for event in ended["gpu_events"]] == ["GPU-7"]


@pytest.fixture
def no_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without nvidia-ml-py, and a container with a simulated GPU; before `gang`."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "pynvml.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)


def test_gpus_that_nobody_watches_are_warned_of_once(
    no_nvml: None, gang: Gang, tmp_path: Path
) -> None:
    simulated = {"address": "GPU-sim", "name": "Simulated A100", "driver": "550"}
    given = {
        "gpus": [{**simulated, "state": "healthy", "reason": "", "parent": ""}],
        "isolated": False,
    }
    leave_gpus(tmp_path / "container", given)
    gang.run(os.getpid, gpus=("GPU-sim",))
    gang.wait_for("ended")
    assert not [m for m in gang.seen if m.kind == "warning"]
    gang.run(os.getpid, ranks=2, gpus=("GPU-7",), attempt=1)
    for _ in range(2):
        gang.wait_for("ended")
    (warning,) = (m["text"] for m in gang.seen if m.kind == "warning")
    assert warning.startswith("XID events ") and NOT_INSTALLED in warning


TOKENS = b"HDTS\0\0\0"
OTHER_TOKENS = b"HDTS\0\0\1\5alias\3key"


def sees_tokens_change() -> tuple[str, bytes, bytes]:
    file = Path(os.environ[TOKEN_FILE])
    first = file.read_bytes()
    print("read", flush=True)
    deadline = time.monotonic() + HANG_SECONDS
    while file.read_bytes() == first and time.monotonic() < deadline:
        time.sleep(0.05)
    return str(file), first, file.read_bytes()


def test_a_rank_that_runs_finds_fresh_tokens_in_the_same_file(gang: Gang) -> None:
    gang.server.send(0, "tokens", TOKENS, run_id="r")
    assert gang.wait_for("kept-tokens")["digest"] == hashlib.sha256(TOKENS).hexdigest()
    gang.run(sees_tokens_change)
    gang.wait_for("output")
    gang.server.send(0, "tokens", OTHER_TOKENS, run_id="r")
    path, first, then = pickle.loads(gang.wait_for("ended").payload)
    assert (first, then) == (TOKENS, OTHER_TOKENS)
    assert Path(path).parts[-3:] == ("container", "hopsgpu", "tokens")
    assert [m["text"] for m in gang.seen if m.kind == "warning"] == []


def test_tokens_that_cannot_be_kept_are_a_warning_and_the_agent_lives(gang: Gang) -> None:
    gang.server.send(0, "tokens", b"nonsense", run_id="r")
    assert re.search("tokens .*container_7", gang.wait_for("warning")["text"])
    gang.run(os.getpid)
    assert pickle.loads(gang.wait_for("ended").payload) > 0
    assert not [m for m in gang.seen if m.kind == "kept-tokens"]


def _leave_results(paths: list[str]) -> None:
    for name in paths:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("wandb/offline-run-20260101_000000-abc/run-abc.wandb", "dir=hopsgpu.context().log_dir"),
        ("mlflow.db", "mlflow.set_tracking_uri() in the function"),
        ("mlruns/0/meta.yaml", "mlflow.set_tracking_uri() in the function"),
        ("runs/Jan01_host/events.out.tfevents.1.host.1.0", "to the SummaryWriter"),
        ("lightning_logs/version_0/hparams.yaml", "default_root_dir="),
    ],
)
def test_results_removed_with_the_working_directory_are_a_warning(
    gang: Gang, path: str, said: str
) -> None:
    gang.run(_leave_results, [path, "notes.txt", "wandb/latest-run", "runs/notes.txt"])
    gang.wait_for("ended")
    (warning,) = [one["text"] for one in gang.seen if one.kind == "warning"]
    assert warning.startswith("rank 0 left ") and "which is removed" in warning
    assert said in warning


def test_other_files_of_the_working_directory_are_the_users(gang: Gang) -> None:
    gang.run(_leave_results, ["notes.txt", "wandb/debug.log", "runs/a/b.txt", "mlruns.txt"])
    gang.wait_for("ended")
    assert not [one for one in gang.seen if one.kind == "warning"]
