"""The ranks of a gang on a real cluster: environments, output, failures, retries, measures."""

from __future__ import annotations

import enum
import functools
import io
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.agent.addresses import interface_addresses
from hopsgpu.agent.fork_servers import MAX_SERVERS
from hopsgpu.attempts.rank_call import script_name
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.core.run_values import RunStatus
from hopsgpu.linux import parent_of
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.cluster.test_attempts import containers_of
from tests.conftest import gone, gpus_become, until
from tests.in_ranks import (
    LEFT_BEHIND,
    crash,
    fork_and,
    hang_in_an_all_reduce,
    kill_at,
    kill_when_noted,
    parse_arguments,
    print_at_length,
    use_processes,
)
from tests.processes import pids_in, processes_of

WORKERS = 2


@pytest.fixture(scope="module")
def gang(spark: SparkSession, manager: ClusterManager) -> Iterator[hopsgpu.Gang]:
    """Two ranks of one core, with torch imported ahead; their GPUs are back after all tests."""
    before = manager.gpus()[0]
    with hopsgpu.hold(workers=WORKERS, cores_per_worker=1, progress="off") as held:
        yield held
    assert gpus_become(manager, before), manager.gpus()


# Fresh processes, quickly.


@pytest.mark.one_machine
def test_launches_on_a_held_gang_are_quick_and_leave_nothing_to_the_next(
    gang: hopsgpu.Gang,
) -> None:
    # Within the test: a rank would import this module, and pytest and PySpark with it.
    def leave_traces() -> tuple[int, int, list[str]]:
        import random

        import numpy

        found = [name for name in os.environ if name.startswith("TRACE")]
        found += ["cwd"] if Path("trace").exists() else []
        found += ["module"] if hasattr(numpy, "trace_of_ours") else []
        os.environ["TRACE"] = "1"
        Path("trace").write_text("1")
        numpy.trace_of_ours = 1  # type: ignore[attr-defined]
        drawn = [str(numpy.random.random()), str(random.random())]
        return os.getpid(), os.getppid(), [*found, *drawn]

    gang.launch(leave_traces, progress="off")
    began = time.monotonic()
    results = [gang.launch(leave_traces, progress="off") for _ in range(10)]
    print(f"a launch takes {(time.monotonic() - began) / 10:.3f} s")
    assert [result.warnings for result in results] == [()] * 10
    values = [value for result in results for value in result.values]
    assert len({pid for pid, _, _ in values}) == 2 * 10
    # Forked from what was there: at first NumPy's, and torch's once that is imported.
    assert len({server for _, server, _ in values}) <= 2 * MAX_SERVERS
    assert {len(found) for _, _, found in values} == {2}
    assert len({number for _, _, found in values for number in found}) == 2 * 2 * 10


def test_a_gloo_all_reduce_on_a_held_gang(gang: hopsgpu.Gang) -> None:
    def all_reduce() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        number = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(number)
        dist.destroy_process_group()
        return float(number)

    for _ in range(3):
        assert gang.launch(all_reduce, progress="off").values == (3.0, 3.0)


@pytest.mark.one_machine
def test_the_interface_that_is_set_is_the_one_of_gloo_and_of_the_rendezvous(
    gang: hopsgpu.Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce() -> tuple[str, str, float]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        number = torch.ones(1)
        dist.all_reduce(number)
        dist.destroy_process_group()
        return os.environ["GLOO_SOCKET_IFNAME"], os.environ["MASTER_ADDR"], float(number)

    there = {name: addresses for name, addresses in interface_addresses().items() if addresses}
    other = next((name for name in there if name != "lo"), "lo")
    for wanted in (other, "lo"):
        monkeypatch.setenv("HOPSGPU_INTERFACE", wanted)
        for name, address, total in gang.launch(all_reduce, progress="off").values:
            assert (name, total) == (wanted, 2.0)
            assert address in there[wanted] or (wanted == "lo" and address.startswith("127."))
    monkeypatch.setenv("HOPSGPU_INTERFACE", "ib7")
    with pytest.raises(
        hopsgpu.ConfigError, match="interface='ib7' is not on this node; available: "
    ):
        gang.launch(all_reduce, progress="off")


# Ordinary code.

CONTEXTS = ("fork", "spawn", "forkserver")


def test_data_loaders_managers_pools_and_caches_work_in_a_container(gang: hopsgpu.Gang) -> None:
    found = gang.launch(use_processes, args=CONTEXTS, run_timeout="5m", progress="off").value
    argv = [script_name()]
    assert found == {
        **{f"DataLoader, {context}": [2016.0, 2016.0] for context in CONTEXTS},
        **{f"Pool, {context}": [0, 2, 4] for context in CONTEXTS},
        **{f"argv, {context}": argv for context in CONTEXTS},
        **{f"Manager, {context}": [1, 2] for context in CONTEXTS},
        "sharing, file_descriptor": 1000.0,
        "sharing, file_system": 1000.0,
        "argv": argv,
        "unwritable": [],
    }


def test_a_rank_without_its_arguments_says_so_first(gang: hopsgpu.Gang) -> None:
    with pytest.raises(hopsgpu.RankFailed) as failed:
        gang.launch(parse_arguments, progress="off")
    # None where pytest runs in processes of xdist, as in a notebook: then argparse leaves it out.
    script = Path(script_name()).name
    said = f"{script}: error: the following arguments are required: --lr"
    first, _, *log = str(failed.value).splitlines()
    assert first.endswith(f" called sys.exit: exit code 2: {said}")
    assert log[:2] == [f"  usage: {' '.join([*script.split(), '[-h] --lr LR'])}", f"  {said}"]


def test_a_forked_child_does_not_say_how_its_rank_ended(gang: hopsgpu.Gang) -> None:
    for child in ("returns", "raises", "exits"):
        result = gang.launch(fork_and, args=(child, "returns"), progress="off")
        assert result.values == ("the rank's",) * WORKERS
        with pytest.raises(hopsgpu.RankFailed, match="rank 0 .* was ended by SIGKILL"):
            gang.launch(fork_and, args=(child, "is killed"), progress="off")


class Adder:
    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __call__(self, value: int) -> int:
        return self.amount + value

    def method(self, value: int) -> int:
        return self.amount * value


def test_callables_of_every_kind(gang: hopsgpu.Gang) -> None:
    captured = 20
    # One launch: each rank's value is what every one of them gives.
    callables: list[Callable[[int], int]] = [
        abs,
        lambda value: value + 1,
        lambda value: value + captured,
        Adder(300),
        Adder(300).method,
        functools.partial(max, 9),
    ]

    def call_all(given: list[Callable[[int], int]]) -> list[int]:
        return [function(4) for function in given]

    assert gang.launch(call_all, (callables,), progress="off").value == [4, 5, 24, 304, 1200, 9]
    assert gang.launch(Adder(1), (1,), progress="off").value == 2
    assert gang.launch(lambda: captured, progress="off").value == 20


# What users of other launchers report of ordinary code; tests/reports.md has the list.


class _Kind(enum.Enum):
    """By name; those of a script, as below, go by value."""

    DENSE = 1


def test_what_a_rank_has_of_its_own_and_of_the_driver(
    gang: hopsgpu.Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Layer(enum.Enum):
        DENSE = ("dense", 2)
        LINEAR = ("dense", 2)
        CONV = ("conv", 4)

        def __init__(self, label: str, rank: int) -> None:
            self.label, self.rank = label, rank

    class Access(enum.Flag):
        READ = 1
        WRITE = 2
        BOTH = 3

    def look(layer: Layer) -> tuple[list[float], dict[str, str | None], object]:
        import torch

        names = ("OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT", "JAX_ENABLE_X64")
        same = layer is Layer.LINEAR, layer.rank, Access.BOTH is Access.READ | Access.WRITE
        drawn = [torch.rand(1).item(), torch.rand(1).item()]
        return (
            drawn,
            {name: os.environ.get(name) for name in names},
            (same, Layer.CONV, _Kind.DENSE),
        )

    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    values = [
        value
        for _ in range(2)
        for value in gang.launch(look, (Layer.DENSE,), progress="off").values
    ]
    assert len({number for drawn, _, _ in values for number in drawn}) == 2 * 2 * 2
    for _, environment, found in values:
        assert environment == dict.fromkeys(environment, "1")
        assert found == ((True, 2, True), Layer.CONV, _Kind.DENSE)


@pytest.mark.one_machine
def test_variables_that_the_function_sets_count(gang: hopsgpu.Gang) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def as_in_tutorials() -> tuple[int, float]:
        os.environ["OMP_NUM_THREADS"] = "2"
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(port)
        import torch
        from torch import distributed

        distributed.init_process_group("gloo")
        total = torch.ones(1)
        distributed.all_reduce(total)
        distributed.destroy_process_group()
        return torch.get_num_threads(), total.item()

    result = gang.launch(as_in_tutorials, progress="off", run_timeout="2m")
    assert result.values == ((2, 2.0), (2, 2.0))
    (warning,) = result.warnings
    assert warning.startswith("train_fn sets MASTER_ADDR and MASTER_PORT, which hopsgpu has set")


def test_what_cannot_be_had_in_a_rank_is_said(gang: hopsgpu.Gang) -> None:
    def ask() -> str:
        return input("go on? ")

    def nest() -> object:
        return hopsgpu.session("inner")

    with pytest.raises(hopsgpu.RankFailed, match="EOFError(.|\n)*a rank has no terminal"):
        gang.launch(ask, progress="off")
    with pytest.raises(hopsgpu.RankFailed, match="a rank cannot start a Spark session"):
        gang.launch(nest, progress="off")


# Output.


def kept(gang: hopsgpu.Gang, result: hopsgpu.GangResult) -> LakePath:
    """The directory of a launch, once its record and logs are there, which is soon after it."""
    gang._background.flush(HANG_SECONDS)
    return LakePath(f"{hopsgpu.plan(os.getpid).paths['root']}/runs/{result.run_id}")


def test_output_comes_whole_and_in_order_and_is_kept_on_the_lake(
    gang: hopsgpu.Gang, capsys: pytest.CaptureFixture[str]
) -> None:
    result = gang.launch(print_at_length, args=(1,), progress="lines", name="talks")
    shown = capsys.readouterr().out.splitlines()
    for rank in range(WORKERS):
        own = [line for line in shown if line.startswith(f"[rank {rank} node")]
        texts = [line.partition("] ")[2] for line in own]
        assert texts[:2] == ["from C", "not UTF-8: \\xff"]
        assert any("a warning" in text for text in texts[2:5])
        assert "WARNING:root:a log line" in texts[2:5]
        assert texts.count("x" * 1023) == 1024
        assert "".join(t.strip("…") for t in texts).endswith("y" * 200_000)
        complaints = "".join(f"{text}\n" for text in texts[2 : texts.index("x" * 1023)])
        log = kept(gang, result) / "logs" / f"rank-{rank}.log"
        assert log.read(2**24) == b"".join(
            (
                b"from C\nnot UTF-8: \xff\n",
                complaints.encode(),
                (b"x" * 1023 + b"\n") * 1024,
                b"y" * 200_000 + b"\n",
            )
        )
    assert result.warnings == ()


def test_model_is_published_as_versions_and_the_run_has_its_record(
    gang: hopsgpu.Gang, tmp_path: Path
) -> None:
    def train(weights: bytes) -> None:
        context = hopsgpu.context()
        (context.model_dir / "layers").mkdir()
        (context.model_dir / "layers" / "w.bin").write_bytes(weights)
        print("written by", context.rank)

    first = gang.launch(train, (b"one",), model="net", progress="off")
    nothing = gang.launch(os.getpid, model="empty", progress="off")
    second = gang.launch(train, (b"two",), model="net", progress="off")
    assert first.model is not None and second.model is not None
    assert (first.model.version, second.model.version) == (1, 2)
    assert second.model.url.endswith("/models/net/2")
    assert (first.model.download(tmp_path) / "layers" / "w.bin").read_bytes() == b"one"
    with second.model.open("layers/w.bin") as file:
        assert file.read() == b"two"
    assert first.timeline.published is not None
    run = kept(gang, second)
    assert (run / "logs" / "rank-1.log").read() == b"written by 1\n"
    record = json.loads((run / "run.json").read())
    assert (record["attempt"], record["state"]) == (0, "succeeded")
    assert record["model"] == second.model.url
    assert [rank["exit_code"] for rank in record["ranks"]] == [0, 0]
    assert nothing.model is None
    assert "left nothing" in nothing.warnings[0]


class Delays(io.StringIO):
    """A screen that notes for how long each line was under way that says when it was printed."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def write(self, text: str) -> int:
        now = time.time()
        self.seconds += [now - float(line.partition("] ")[2]) for line in text.splitlines()]
        return len(text)


def test_a_line_is_seen_within_a_second(
    gang: hopsgpu.Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell_the_time() -> None:
        for _ in range(20):
            print(time.time())
            threading.Event().wait(0.1)

    # A machine that stands still for a second is no reason: once of three times it goes on.
    for _ in range(3):
        screen = Delays()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            gang.launch(tell_the_time, progress="lines")
        assert len(screen.seconds) == 20 * WORKERS
        middle, longest = statistics.median(screen.seconds), max(screen.seconds)
        print(f"lines were under way for {middle:.3f} s, {longest:.3f} s at the most")
        if middle < 1 and longest < 3:
            return
    pytest.fail("lines take too long")


def memory(of: str) -> int:
    """Bytes of this process: resident now (VmRSS), or at the most (VmHWM)."""
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(of))
    return int(line.split()[1]) * 1024


def test_a_rank_that_prints_200_mb_waits_for_nobody(gang: hopsgpu.Gang) -> None:
    # Has the kernel forget what was the most, proc(5).
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    result = gang.launch(print_at_length, args=(200,), progress="off", name="much")
    assert max(result.values) < 60
    print(f"200 MB printed within {max(result.values):.1f} s by each of {WORKERS} ranks")
    directory = kept(gang, result)
    grown = (memory("VmHWM") - before) / 2**20
    print(f"the driver's memory has grown by {grown:.0f} MiB at the most")
    assert grown < 100
    for rank in range(WORKERS):
        with (directory / "logs" / f"rank-{rank}.log").open() as log:
            first = log.read(4096).index(b"x" * 1023)
            log.seek(first + 200 * 2**20 - 1024)
            assert log.read() == b"x" * 1023 + b"\n" + b"y" * 200_000 + b"\n"


# Values.


def test_values_of_100_mb_come_back_and_larger_ones_are_refused(gang: hopsgpu.Gang) -> None:
    size = 100 * 2**20 - 4096
    values = gang.launch(lambda: b"v" * size, progress="off").values
    assert [len(value) for value in values] == [size] * WORKERS
    with pytest.raises(hopsgpu.RankFailed, match="bytes pickled; at most .* in model_dir"):
        gang.launch(lambda: b"v" * (101 * 2**20), progress="off")


def test_a_value_that_cannot_be_pickled_names_its_rank(gang: hopsgpu.Gang) -> None:
    def lock() -> object:
        return threading.Lock() if hopsgpu.context().rank == 1 else 1

    with pytest.raises(hopsgpu.RankFailed, match="rank 1 .* cannot be pickled") as failed:
        gang.launch(lock, progress="off")
    assert failed.value.rank == 1


# Failures.


@pytest.mark.parametrize(
    ("how", "words", "end"),
    [
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV: native code crashed", "SIGSEGV"),
        (
            "import ctypes; ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()",
            "SIGABRT: terminate called without an active exc.* Fatal Python error: Aborted\n"
            r"  Current thread \(most recent call first\):\n.* in crash\n",
            "SIGABRT",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "was ended by SIGKILL, which hopsgpu did",
            "SIGKILL",
        ),
        ("raise MemoryError('no more')", "raised MemoryError.*raise memory_per_worker", 1),
        ("raise RuntimeError('CUDA out of memory. Tried')", "memory of GPU .* is full", 1),
        (
            "raise RuntimeError('The NVIDIA driver on your system is too old (found 11040)')",
            "the NVIDIA driver or GPU of node. does not support the CUDA",
            1,
        ),
        ("import os; os._exit(9)", "exit code 9 and without a value or an exception", 9),
        ("import sys; sys.exit('enough')", "called sys.exit: exit code 1", 1),
        ("import sys; sys.exit(3)", "called sys.exit: exit code 3", 3),
    ],
)
def test_each_way_to_fail_has_its_words_and_the_others_are_stopped(
    gang: hopsgpu.Gang, how: str, words: str, end: int | str
) -> None:
    began = time.monotonic()
    with pytest.raises(hopsgpu.RankFailed, match=f"(?s){words}") as failed:
        gang.launch(crash, args=(how,), progress="off")
    assert time.monotonic() - began < 45
    error = failed.value
    assert (error.rank, error.exit_code or error.signal) == (1, end)
    assert end == "SIGSEGV" or error.log_tail[0] == f"about to {how}"
    other, first = error.result.ranks
    assert (other.stopped, first.stopped) == (True, False)
    log = LakePath(error.log_url or "").read().decode()
    assert log.startswith(f"about to {how}\n")
    assert "hopsgpu/rank/" not in str(error) and "hopsgpu/rank/" not in log
    if "SIGSEGV" in words:
        assert "Fatal Python error: Segmentation fault" in log and "in crash" in log


def test_ranks_that_hang_end_at_run_timeout_with_all_they_started_and_the_log_has_their_stacks(
    gang: hopsgpu.Gang, cluster_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(hopsgpu.RankFailed, match=r"run_timeout=20 s.*\(0, 1\)") as failed:
        gang.launch(hang_in_an_all_reduce, args=(str(tmp_path),), run_timeout="20s", progress="off")
    directory = (failed.value.log_url or "").rpartition("/")[0]
    for rank, where in enumerate(("threading.py", "all_reduce")):
        log = LakePath(f"{directory}/rank-{rank}.log").read().decode()
        assert where in log and "in hang_in_an_all_reduce" in log
    assert len([*tmp_path.iterdir()]) == 3 * WORKERS
    # Containers may count processes themselves, so the noted IDs may be those of others here.
    assert until(lambda: not processes_of(cluster_dir, LEFT_BEHIND.encode()))


# Retries.


def test_a_rank_that_is_killed_is_tried_again_on_the_same_executors(
    gang: hopsgpu.Gang, tmp_path: Path
) -> None:
    result = gang.launch(
        kill_when_noted, args=(str(tmp_path), 2, "rank"), retries=2, progress="off"
    )
    assert [attempt for attempt, _ in result.values] == [2, 2]
    first, second, third = (containers_of(tmp_path, attempt) for attempt in range(3))
    assert len(set(first)) == 2 and first == second == third
    assert len(result.warnings) == 2
    assert "attempt 0 failed (rank): rank 1 on node" in result.warnings[0]
    with pytest.raises(hopsgpu.RankFailed, match="SIGKILL"):
        gang.launch(kill_at, args=(3, "rank"), retries=2, progress="off")


def test_the_next_attempt_goes_on_from_the_checkpoint(gang: hopsgpu.Gang) -> None:
    def train(steps: int) -> list[int]:
        context = hopsgpu.context()
        found = context.latest_checkpoint()
        done = [] if found is None else json.loads(found.read_text())
        for step in range(len(done), steps):
            done.append(context.attempt)
            if context.rank == 0:
                Path("done.json").write_text(json.dumps(done))
                context.save_checkpoint("done.json", step)
                if step == 1 and context.attempt == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        return done

    result = gang.launch(train, args=(4,), retries=1, progress="off")
    assert result.value == [0, 0, 1, 1]


def test_an_error_of_the_code_is_not_tried_again(
    gang: hopsgpu.Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug() -> None:
        print("attempt", hopsgpu.context().attempt)
        raise KeyError("columm")

    with pytest.raises(hopsgpu.RankFailed, match="KeyError") as failed:
        gang.launch(bug, retries=3, progress="off")
    assert failed.value.result.warnings == ()
    monkeypatch.setenv("HOPSGPU_RETRY", "all")
    with pytest.raises(hopsgpu.RankFailed, match="KeyError") as failed:
        gang.launch(bug, retries=1, progress="off")
    assert "attempt 0 failed (code)" in failed.value.result.warnings[0]
    assert b"attempt 1\n" in LakePath(failed.value.log_url or "").read()


# Measures.


def test_reports_reach_the_status_the_result_and_the_record(
    gang: hopsgpu.Gang, tmp_path: Path
) -> None:
    shown: list[float] = []

    def show(status: RunStatus) -> None:
        shown.extend(metrics["loss"] for metrics in status.metrics[:1] if "loss" in metrics)
        if shown:
            (tmp_path / "shown").touch()

    def train(shown: Path) -> None:
        context = hopsgpu.context()
        for step in range(5):
            context.report(step, loss=1.0 / (step + 1), rank=context.rank)
            while not shown.exists():
                threading.Event().wait(0.05)  # nobody tells

    result = gang.launch(
        train, args=(tmp_path / "shown",), progress=show, name="reports", run_timeout="120s"
    )
    assert [metrics["loss"] for metrics in result.metrics] == [0.2, 0.2]
    assert [metrics["rank"] for metrics in result.metrics] == [0, 1]
    assert shown[0] == 1
    directory = kept(gang, result)
    record = json.loads((directory / "run.json").read())
    assert [metrics["loss"] for metrics in record["metrics"]] == [0.2, 0.2]
    for rank in range(WORKERS):
        lines = map(json.loads, (directory / "logs" / f"metrics-{rank}.jsonl").read().splitlines())
        told = [(line["step"], line["metrics"]) for line in lines if "metrics" in line]
        assert told == [(step, {"loss": 1.0 / (step + 1), "rank": rank}) for step in range(5)]


# Elsewhere nobody counts the memory of ranks, so that Spark's daemon need not adopt them.
@pytest.mark.yarn
def test_sparks_python_daemon_that_is_killed_takes_nobody_along(
    gang: hopsgpu.Gang, tmp_path: Path
) -> None:
    def go_on() -> tuple[int, int]:
        (tmp_path / str(hopsgpu.context().rank)).write_text(str(os.getpid()))
        while not (tmp_path / "go").exists():
            threading.Event().wait(0.05)  # nobody tells
        return os.getpid(), os.getppid()

    with ThreadPoolExecutor(1) as threads:
        launched = threads.submit(gang.launch, go_on, progress="off")
        try:
            pids = pids_in(tmp_path, WORKERS)
            # rank, fork server, process daemon, and who has adopted it
            daemon = parent_of(parent_of(parent_of(pids[1])))
            assert b"hopsgpu.spark.daemon" in Path(f"/proc/{daemon}/cmdline").read_bytes()
            os.kill(daemon, signal.SIGKILL)
            assert until(lambda: gone(daemon))
        finally:
            (tmp_path / "go").touch()
    result = launched.result()
    assert [pid for pid, _ in result.values] == pids
    servers = gang.launch(os.getppid, progress="off").values
    assert list(servers) == [server for _, server in result.values]
