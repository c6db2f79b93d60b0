"""Run records and logs on every lake, while they are written."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import threading
import time
from pathlib import Path

from click.testing import CliRunner

from hopsgpu.artifacts.mirror import Mirror
from hopsgpu.artifacts.run_logs import LogReader, RankLog, log_sizes
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.attempts.rank_output import Outputs
from hopsgpu.cli.main import main
from hopsgpu.core.gang import GangExecutor, assign_ranks
from hopsgpu.display.base import NoDisplay
from hopsgpu.runs.run_details import write
from hopsgpu.storage.lake import LakePath
from tests.unit.records import record_of

RUN = "fit-20261122-120000-bbbbbb"
MIB = 2**20


def test_a_record_is_read_whole_while_it_is_replaced(lake: LakePath, tmp_path: Path) -> None:
    store = RunStore(lake.url)
    directory = store.directory(RUN)
    directory.make()
    contents = [record_of(RUN, state, time.time()) for state in ("running", "publishing")]
    write(directory, contents[0])
    ended = threading.Event()

    def replace() -> None:
        try:
            for number in range(20):
                write(directory, contents[number % 2])
        finally:
            ended.set()

    seen = {store.record(RUN).state}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        writer = pool.submit(replace)
        while not ended.is_set():
            seen.add(store.record(RUN).state)
        writer.result()
    assert seen <= {"running", "publishing"}
    assert directory.names() == ("run.json",)


def test_runs_are_listed_cancelled_and_pruned(lake: LakePath, tmp_path: Path) -> None:
    store = RunStore(lake.url)
    assert store.ids() == ()
    directory = store.directory(RUN)
    directory.make()
    write(directory, record_of(RUN, "running", time.time()))
    (lake / "runs" / "empty").make()
    assert set(store.ids()) == {RUN, "empty"}
    states = {run.run_id: run.state_at(time.time()) for run in store.read(store.ids())}
    assert states == {RUN: "running", "empty": "unreadable"}
    wish = LakePath(directory.url, should_fail_fast=True) / "cancel"
    assert not wish.exists()
    store.ask_to_cancel(RUN)
    store.ask_to_cancel(RUN)
    assert wish.exists()
    write(directory, record_of(RUN, "cancelled", time.time()))
    done = CliRunner().invoke(main, ["runs", "prune", "--root", lake.url, "--keep", "0"])
    assert done.stdout == f"{RUN}\n" and store.ids() == ("empty",)


def test_a_log_is_read_as_it_grows(lake: LakePath, tmp_path: Path) -> None:
    directory = RunStore(lake.url).directory(RUN)
    logs = directory / "logs"
    logs.make()
    container = GangExecutor(0, "container_0", "node1", "10.0.0.1", ())
    reader, read = LogReader(directory, RankLog(0, 0)), b""
    with Outputs(assign_ranks([container], 1), NoDisplay()) as outputs:
        expected = b""
        for number in range(5):
            chunk = b"%d\n" % number * 1000
            outputs.add(0, chunk)
            outputs.add_record(0, b"{}\n")
            for _, work in outputs.pending_appends(logs):
                work()
            expected += chunk
            assert log_sizes(directory) == {RankLog(0, 0): len(expected)}
            read += b"".join(reader.read(len(expected)))
            assert read == expected
        outputs.add(0, b"the end")
        for _, work in outputs.take_over().uploads(logs):
            work()
    shown = CliRunner().invoke(main, ["logs", "--root", lake.url, RUN, "--rank", "0"])
    assert shown.stdout_bytes == expected + b"the end"
    assert (logs / "metrics-0.jsonl").read() == b"{}\n" * 5


def test_a_large_log_comes_whole(lake: LakePath) -> None:
    logs = RunStore(lake.url).directory(RUN) / "logs"
    logs.make()
    container = GangExecutor(0, "container_0", "node1", "10.0.0.1", ())
    with Outputs(assign_ranks([container], 1), NoDisplay()) as outputs:
        for number in range(20):
            outputs.add(0, bytes([number]) * MIB)
            if number == 10:
                for _, work in outputs.pending_appends(logs):
                    work()
        for _, work in outputs.take_over().uploads(logs):
            work()
    reader = LogReader(RunStore(lake.url).directory(RUN), RankLog(0, 0))
    for number, part in enumerate(reader.read(20 * MIB)):
        assert part == bytes([number]) * MIB
    assert reader.offset == 20 * MIB


def test_tensorboards_files_are_copied_as_they_grow(lake: LakePath, tmp_path: Path) -> None:
    source = lake / "tensorboard"
    mirror = Mirror(source, tmp_path)
    assert mirror.update() == 0
    (source / "train").make()
    events = source / "train" / "events.out.tfevents.1"
    events.write(b"one")
    assert mirror.update() == 1
    events.append(b" two", 3)
    assert mirror.update() == 1
    assert (tmp_path / "train" / "events.out.tfevents.1").read_bytes() == b"one two"


def test_what_the_lake_holds_is_json(lake: LakePath, tmp_path: Path) -> None:
    directory = RunStore(lake.url).directory(RUN)
    directory.make()
    write(directory, record_of(RUN, "succeeded", time.time()))
    call = functools.partial(CliRunner().invoke, main)
    shown = call(["runs", "--root", lake.url, "show", "last", "--json"])
    assert json.loads(shown.output)["url"] == directory.url
    (listed,) = json.loads(call(["runs", "--root", lake.url, "--json"]).output)
    assert (listed["run_id"], listed["state"]) == (RUN, "succeeded")
