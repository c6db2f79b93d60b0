"""Runs on a local lake, read by processes other than their drivers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.artifacts.mirror import Mirror
from hopsgpu.artifacts.run_logs import LogReader, RankLog, log_sizes, parse_log_name
from hopsgpu.artifacts.runs import RunStore, StoredRun, prunable, start_time
from hopsgpu.core.run_record import parse
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.filesystem import FileStatus
from hopsgpu.storage.lake import LakePath
from tests.unit.records import put_run

OLD, MIDDLE, NEW = (f"fit-2026112{day}-120000-00000{day}" for day in (1, 2, 3))


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(f"file://{tmp_path}")


@pytest.mark.parametrize(
    ("state", "silent", "seen"),
    [
        ("running", 59.0, "running"),
        ("running", 61.0, "lost"),
        ("requested", 3600.0, "lost"),
        ("succeeded", 1e9, "succeeded"),
        ("failed", 61.0, "failed"),
    ],
)
def test_run_whose_driver_is_silent_is_lost(
    tmp_path: Path, state: str, silent: float, seen: str
) -> None:
    record = parse((put_run(tmp_path, NEW, state, updated=1000.0) / "run.json").read_bytes())
    assert record.state_at(1000.0 + silent) == seen
    assert record.is_running(1000.0 + silent) is (seen == "running")


def test_lost_run_took_until_it_was_heard_of_last(tmp_path: Path) -> None:
    written = put_run(tmp_path, NEW, "running", updated=1000.0, timeline={"requested": 900.0})
    record = parse((written / "run.json").read_bytes())
    assert (record.seconds_taken(1030.0), record.seconds_taken(5000.0)) == (130.0, 100.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 1},
        {"schema": 2},
        {"state": "dancing"},
        {"updated": "soon"},
        {"updated": None},
        {"ranks": [{"rank": "first"}]},
        {"ranks": 7},
        {"timeline": []},
        {"logs": {"logs/rank-0.log": "many"}},
        {"spec": 7},
        {"executor": None},
        {"run_id": 7},
        {"error": ["boom"]},
        {"updated": float("nan")},
        {"updated": "inf"},
        {"timeline": {"requested": float("nan")}},
        {"timeline": {"requested": "nan"}},
        {"gpu_seconds": {"held": float("inf")}},
        {"gpu_seconds": {"held": 10**400}},
    ],
)
def test_invalid_record_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(StoreError):
        parse((put_run(tmp_path, NEW, **changes) / "run.json").read_bytes())


def test_record_of_another_schema_is_refused(tmp_path: Path, store: RunStore) -> None:
    put_run(tmp_path, NEW, schema=1, state="released")
    with pytest.raises(StoreError, match="1.* 3") as refused:
        store.record(NEW)
    assert refused.value.kind == "schema"
    (run,) = store.read([NEW])
    assert (run.record, run.kind, run.state_at(0.0)) == (None, "schema", "unreadable")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"7", b"[" * 100_000])
def test_damaged_record_is_refused(content: bytes) -> None:
    with pytest.raises(StoreError, match="record") as refused:
        parse(content)
    assert refused.value.kind == "damaged"


def test_number_that_is_too_large_for_a_float_is_refused(tmp_path: Path) -> None:
    content = (put_run(tmp_path, NEW, updated=1000.0) / "run.json").read_bytes()
    with pytest.raises(StoreError, match="1e999"):
        parse(content.replace(b'"updated": 1000.0', b'"updated": 1e999'))


def test_runs_are_found_by_a_beginning_and_the_newest_first(
    tmp_path: Path, store: RunStore
) -> None:
    assert store.ids() == ()
    with pytest.raises(StoreError, match="there are no runs"):
        store.find("last")
    for run_id in (MIDDLE, NEW, OLD):
        put_run(tmp_path, run_id)
    (tmp_path / "runs" / "a file").write_text("")
    assert store.ids() == (NEW, MIDDLE, OLD)
    assert store.find("last") == NEW
    assert store.find(MIDDLE) == MIDDLE
    assert store.find("fit-20261121") == OLD
    put_run(tmp_path, f"{OLD}0")
    assert store.find(OLD) == OLD
    with pytest.raises(ConfigError, match="4 .*'fit-': .*, …"):
        store.find("fit-")
    with pytest.raises(StoreError, match="'other'"):
        store.find("other")


@pytest.mark.parametrize("given", ["..", "a/b", "../x", "", ".", "a..b", "x\n", "a#b", "-x", "a b"])
def test_invalid_run_id_is_refused(store: RunStore, given: str) -> None:
    for call in (store.find, store.directory, store.record, store.ask_to_cancel, store.remove):
        with pytest.raises(ConfigError, match="run id"):
            call(given)


def test_unreadable_record_hides_no_other(tmp_path: Path, store: RunStore) -> None:
    put_run(tmp_path, NEW)
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "odd name#").mkdir()
    for name in ("empty", "odd name#"):  # a foreign directory is as old as its last change
        os.utime(tmp_path / "runs" / name, (0.0, 0.0))
    (put_run(tmp_path, MIDDLE) / "run.json").write_bytes(b"{")
    copy = put_run(tmp_path, OLD)
    (copy / "run.json").write_bytes((tmp_path / "runs" / NEW / "run.json").read_bytes())
    found = {run.run_id: run for run in store.read(store.ids())}
    assert found.keys() == {NEW, MIDDLE, OLD, "empty", "odd name#"}
    assert found[NEW].record is not None and found[NEW].problem == ""
    assert {run.state_at(0.0) for run in found.values() if run.record is None} == {"unreadable"}
    assert found["empty"].kind == "absent"
    assert "run id" in found["odd name#"].problem
    assert found[MIDDLE].kind == "damaged"
    assert f"{store.url}/{MIDDLE}/run.json " in found[MIDDLE].problem
    assert "`hopsgpu logs ID`" in found[MIDDLE].problem
    for name, newest in (("odd name#", NEW), ("fit-20261124-120000-a#b", NEW)):
        (tmp_path / "runs" / name).mkdir(exist_ok=True)
        os.utime(tmp_path / "runs" / name, (0.0, 0.0))
        assert name in store.ids() and store.find("last") == newest
    assert NEW in found[OLD].problem


def test_foreign_directory_is_as_old_as_its_last_change() -> None:
    def entry(name: str) -> FileStatus:
        return FileStatus(name, 5000, "alice", 0o755, True)

    assert start_time(entry("fit-19700101-000130-abcdef")) == 90.0
    assert start_time(entry("other")) == 5.0
    assert start_time(entry("fit-99999999-999999-abcdef")) == 5.0


def stored(
    root: Path, run_id: str, state: str, silent: float, resume: str | None = None
) -> StoredRun:
    spec = {"workers": 2, "resume": resume}
    written = put_run(root, run_id, state, updated=10_000_000.0 - silent, spec=spec)
    return StoredRun(run_id, parse((written / "run.json").read_bytes()))


def test_only_runs_that_have_ended_are_pruned(tmp_path: Path) -> None:
    now, day = 10_000_000.0, 86_400.0
    runs = [
        stored(tmp_path, "newest", "failed", 10.0),
        stored(tmp_path, "going-on", "running", 30.0),
        stored(tmp_path, "suspended", "running", 3000.0),
        stored(tmp_path, "lost", "running", 2 * day),
        StoredRun("odd", None, "no record"),
        stored(tmp_path, "old", "succeeded", 3 * day),
    ]
    assert prunable(runs, None, 0, now) == ("newest", "lost", "old")
    assert prunable(runs, None, 1, now) == ("lost", "old")
    assert prunable(runs, 2.5 * day, 0, now) == ("old",)
    assert prunable(runs, 2 * day, 4, now) == ("old",)
    assert prunable(runs, 4 * day, 0, now) == ()
    assert prunable(runs, None, 6, now) == ()


def test_runs_that_an_active_run_resumes_are_not_pruned(tmp_path: Path) -> None:
    now = 10_000_000.0
    runs = [
        stored(tmp_path, "going-on", "running", 30.0, "middle"),
        stored(tmp_path, "suspended", "running", 3000.0, "other"),
        stored(tmp_path, "lost", "running", 4000.0, "of-lost"),
        stored(tmp_path, "done", "succeeded", 10.0, "of-done"),
        stored(tmp_path, "itself", "requested", 10.0, "itself"),
        stored(tmp_path, "of-done", "failed", 9000.0),
        stored(tmp_path, "of-lost", "failed", 9000.0),
        stored(tmp_path, "other", "failed", 9000.0, "gone"),
        stored(tmp_path, "middle", "failed", 9000.0, "first"),
        stored(tmp_path, "first", "failed", 9000.0),
    ]
    assert prunable(runs, None, 0, now) == ("lost", "done", "of-done", "of-lost")


def test_cancel_request_may_be_repeated(tmp_path: Path, store: RunStore) -> None:
    directory = put_run(tmp_path, NEW, "running")
    store.ask_to_cancel(NEW)
    store.ask_to_cancel(NEW)
    assert (directory / "cancel").exists()
    store.remove(NEW)
    assert not directory.exists()


def test_logs_are_known_by_their_names() -> None:
    assert parse_log_name("logs/rank-3.log") == RankLog(0, 3)
    assert parse_log_name("logs/attempt-2/rank-0.log") == RankLog(2, 0)
    for name in ("logs/metrics-3.jsonl", "rank-3.log", "logs/rank-x.log", "logs/a/rank-1.log"):
        assert parse_log_name(name) is None


def test_logs_are_read_as_they_grow(tmp_path: Path) -> None:
    directory = LakePath(f"file://{tmp_path}")
    assert log_sizes(directory) == {}
    (tmp_path / "logs" / "attempt-1").mkdir(parents=True)
    log = tmp_path / "logs" / "attempt-1" / "rank-0.log"
    (tmp_path / "logs" / "rank-10.log").write_bytes(b"0123456789")
    (tmp_path / "logs" / "rank-2.log").write_bytes(b"")
    (tmp_path / "logs" / "metrics-0.jsonl").write_bytes(b"{}\n")
    (tmp_path / "logs" / "elsewhere").mkdir()
    log.write_bytes(b"one\n")
    sizes = log_sizes(directory)
    assert list(sizes.items()) == [(RankLog(0, 2), 0), (RankLog(0, 10), 10), (RankLog(1, 0), 4)]
    reader = LogReader(directory, RankLog(1, 0))
    assert b"".join(reader.read(2)) == b"on"
    assert b"".join(reader.read(2)) == b""
    log.write_bytes(b"one\ntwo\n")
    assert b"".join(reader.read(8)) == b"e\ntwo\n"
    log.write_bytes(b"")
    assert b"".join(reader.read(9)) == b"" and reader.offset == 8


def test_large_log_is_read_in_parts(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "rank-0.log").open("wb") as file:
        file.truncate(5 * 2**20 + 1)
    parts = list(LogReader(LakePath(f"file://{tmp_path}"), RankLog(0, 0)).read(5 * 2**20 + 1))
    assert [len(part) for part in parts] == [2**20] * 5 + [1]


def test_mirror_follows_files_that_grow(tmp_path: Path) -> None:
    source, target = tmp_path / "lake", tmp_path / "copy"
    target.mkdir()
    mirror = Mirror(LakePath(f"file://{source}"), target)
    assert mirror.update() == 0
    (source / "train").mkdir(parents=True)
    events = source / "train" / "events.out.tfevents.1.node1"
    copy = target / "train" / events.name
    events.write_bytes(b"one")
    (source / "empty").write_bytes(b"")
    assert mirror.update() == 2
    assert copy.read_bytes() == b"one"
    first = copy.stat().st_ino
    with events.open("ab") as file:
        file.write(b" two")
    (source / "train" / "odd#name").write_bytes(b"")
    assert mirror.update() == 2
    assert copy.read_bytes() == b"one two"
    assert copy.stat().st_ino == first
    events.write_bytes(b"new")
    mirror.update()
    assert copy.read_bytes() == b"new"
    assert sorted(p.name for p in target.rglob("*")) == [
        "empty",
        events.name,
        "train",
    ]


def test_mirror_reads_other_files_anew(tmp_path: Path) -> None:
    source, target = tmp_path / "lake", tmp_path / "copy"
    source.mkdir()
    target.mkdir()
    names = source / "metadata.tsv"
    mirror = Mirror(LakePath(f"file://{source}"), target)
    for second, content in enumerate((b"cat\n", b"dog\n", b"horse\nass\n", b"ox\n")):
        names.write_bytes(content)
        os.utime(names, (second, second))
        (source / ".metadata.tsv.01234567.draft").write_bytes(content[:1])
        assert mirror.update() == 1
        assert (target / names.name).read_bytes() == content
    read = (target / names.name).stat().st_mtime_ns
    assert mirror.update() == 1
    assert (target / names.name).stat().st_mtime_ns == read
    assert [path.name for path in target.iterdir()] == [names.name]


def test_removed_score_takes_its_parts_along_and_nothing_that_is_not_its_own(
    tmp_path: Path,
) -> None:
    for name in ("parts", "other"):
        (tmp_path / "lake" / f".scored-{name}").mkdir(parents=True)
    store = RunStore(f"file://{tmp_path}")
    for run_id, left in ((OLD, f".scored-{OLD}"), (NEW, ".scored-other"), ("odd", "")):
        (tmp_path / "lake" / left).mkdir(exist_ok=True)
        put_run(tmp_path, run_id, score={"kept_in": f"file://{tmp_path}/lake/{left}"})
        store.remove(run_id)
        assert not (tmp_path / "runs" / run_id).exists()
    left = sorted(path.name for path in (tmp_path / "lake").iterdir())
    assert left == [".scored-other", ".scored-parts"]
