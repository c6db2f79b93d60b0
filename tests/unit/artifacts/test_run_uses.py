"""The GPU time of runs from their records, and of removed runs, on a local directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.artifacts import run_uses
from hopsgpu.artifacts.run_uses import (
    LARGEST_FILE,
    UsageFiles,
    keep_before_removal,
    read_uses,
    use_of,
)
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.core.gpu_use import GpuUse, UsePoint, use_between
from hopsgpu.core.run_record import LARGEST_RECORD, RunRecord, parse
from hopsgpu.core.usage_report import RunUse, sum_usage
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath
from tests.unit.records import put_run

RUN = "fit-20261122-120000-bbbbbb"
POINTS = [
    {"time": 1000.0, "held": 0.0, "training": 0.0, "publishing": 0.0, "waited": 0.0},
    {"time": 2000.0, "held": 50.0, "training": 40.0, "publishing": 1.0, "waited": 9.0},
]


def in_two_hours() -> float:
    """A removal takes files of held gangs only an hour after their last change.

    The time is that of the call: a session of tests may take hours.
    """
    return time.time() + 7200.0


@pytest.fixture
def root(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}")


def record(tmp_path: Path, state: str = "succeeded", **changes: Any) -> RunRecord:
    return parse((put_run(tmp_path, RUN, state, **changes) / "run.json").read_bytes())


def total(run: RunUse) -> GpuUse:
    return use_between(run.points, float("-inf"), float("inf"))


def test_a_record_has_points(tmp_path: Path) -> None:
    run = use_of(record(tmp_path, use=POINTS), time.time())
    assert total(run) == GpuUse(50.0, 40.0, 1.0, 9.0)
    assert (run.run_id, run.name, run.user, run.queue) == (RUN, "fit", "alice", "default")
    assert (run.state, run.began, run.ended) == ("succeeded", 1000.0, 2000.0)


@pytest.mark.parametrize(
    ("state", "updated", "known"),
    [("running", 0.0, "active"), ("running", -120.0, "lost"), ("cancelled", -9e6, "cancelled")],
)
def test_states(tmp_path: Path, state: str, updated: float, known: str) -> None:
    changes = {"updated": updated} if updated else {}
    assert use_of(record(tmp_path, state, **changes), time.time()).state == known


def test_unreadable_records_are_named_once(root: LakePath, tmp_path: Path) -> None:
    put_run(tmp_path, RUN)
    (tmp_path / "runs" / "odd").mkdir()
    torn = put_run(tmp_path, "fit-20261122-120000-cccccc")
    (torn / "run.json").write_text("{")
    found = read_uses([root, root], None, time.time())
    assert [run.run_id for run in found.runs] == [RUN, RUN]
    assert len(found.problems) == 2
    assert any(text.startswith("odd: ") for text in found.problems)
    assert any("fit-20261122-120000-cccccc/run.json " in text for text in found.problems)
    assert sum_usage(found.runs, "user", None, in_two_hours()).total.runs == 1


def test_a_root_that_is_not_there_has_no_runs(root: LakePath) -> None:
    assert read_uses([root / "none"], None, time.time()) == run_uses.RunUses((), ())


def test_a_root_that_may_not_be_read_is_named(
    root: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_run(tmp_path, RUN)
    listed = RunStore.ids

    def ids(self: RunStore, since: float | None = None) -> tuple[str, ...]:
        if "/bob/" in self.url:
            raise StoreError(f"refused: {self.url}", kind="permission")
        return listed(self, since)

    monkeypatch.setattr(RunStore, "ids", ids)
    found = read_uses([root, root / "bob"], None, time.time())
    assert [run.run_id for run in found.runs] == [RUN]
    assert found.problems == (f"refused: {root.url}/bob/runs",)


def test_runs_that_did_not_change_since_are_not_read(root: LakePath, tmp_path: Path) -> None:
    old = put_run(tmp_path, "fit-20261101-120000-aaaaaa")
    put_run(tmp_path, RUN)
    now = time.time()
    os.utime(old, (now - 7200, now - 7200))

    def ids(since: float) -> set[str]:
        return {run.run_id for run in read_uses([root], since, now).runs}

    # The clocks of driver and lake may differ by an hour.
    assert ids(now - 3700) == {"fit-20261101-120000-aaaaaa", RUN}
    assert ids(now - 3500) == {RUN}


def kept(root: LakePath) -> list[str]:
    return [one.run_id for one in UsageFiles(root).read(None) if isinstance(one, RunUse)]


def test_a_removed_run_is_kept(root: LakePath, tmp_path: Path) -> None:
    stored = record(tmp_path, use=POINTS)
    before = read_uses([root], None, in_two_hours()).runs
    keep_before_removal(root, [stored], None, in_two_hours())
    assert kept(root) == [RUN]
    # The run and its line both exist until the run is removed, and count once.
    both = read_uses([root], None, in_two_hours()).runs
    assert len(both) == 2 and sum_usage(both, "user", None, in_two_hours()).total.runs == 1
    RunStore(root.url).remove(RUN)
    assert read_uses([root], None, in_two_hours()).runs == before


def test_a_removal_that_was_killed_and_another_one_lose_nothing(
    root: LakePath, tmp_path: Path
) -> None:
    stored = record(tmp_path, use=POINTS)
    for _ in range(2):  # two at a time, or one after the other
        keep_before_removal(root, [stored], None, in_two_hours())
    # Killed when the record was gone, and the rest was not.
    (tmp_path / "runs" / RUN / "run.json").unlink()
    found = read_uses([root], None, in_two_hours())
    assert found.problems == ()
    usage = sum_usage(found.runs, "user", None, in_two_hours())
    assert (usage.total.runs, usage.total.gpu_hours_held) == (1, pytest.approx(50 / 3600))


def test_a_lost_run_stays_lost(root: LakePath, tmp_path: Path) -> None:
    keep_before_removal(root, [record(tmp_path, "running", updated=-9000.0)], None, time.time())
    RunStore(root.url).remove(RUN)
    assert [run.state for run in read_uses([root], None, in_two_hours()).runs] == ["lost"]


def test_a_file_that_the_lake_refuses_keeps_the_run(
    root: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LakePath, content: bytes) -> None:
        raise StoreError("the quota is exhausted", kind="quota")

    monkeypatch.setattr(LakePath, "replace", refuse)
    with pytest.raises(StoreError, match="quota"):
        keep_before_removal(root, [record(tmp_path)], None, in_two_hours())


def gang(name: str) -> RunUse:
    return RunUse(name, "gang", "bob", "", "held", (UsePoint(1.0), UsePoint(2.0, 5.0)))


def test_files_of_held_gangs_become_one(root: LakePath, tmp_path: Path) -> None:
    files = UsageFiles(root)
    for name in ("gang-1", "gang-2"):
        files.write_held(gang(name))
        files.write_held(gang(name))
    assert sorted(kept(root)) == ["gang-1", "gang-2"]
    keep_before_removal(root, [], None, time.time())
    assert len(list((tmp_path / "usage").iterdir())) == 2, "the gangs may still be held"
    keep_before_removal(root, [], None, in_two_hours())
    (one,) = (tmp_path / "usage").iterdir()
    assert one.name.startswith("removed-") and sorted(kept(root)) == ["gang-1", "gang-2"]


def test_a_gang_whose_file_was_taken_goes_on(root: LakePath, tmp_path: Path) -> None:
    """A launch may last for hours, in which the gang's file does not change."""
    UsageFiles(root).write_held(gang("gang-1"))
    keep_before_removal(root, [], None, in_two_hours())
    later = RunUse("gang-1", "gang", "bob", "", "held", (UsePoint(1.0), UsePoint(9.0, 3600.0)))
    UsageFiles(root).write_held(later)
    assert len(kept(root)) == 2
    usage = sum_usage(read_uses([root], None, in_two_hours()).runs, "user", None, in_two_hours())
    assert usage.total.gpu_hours_held == 1.0


def test_a_removal_that_was_killed_leaves_the_file_that_it_took(
    root: LakePath, tmp_path: Path
) -> None:
    files = UsageFiles(root)
    files.write_held(gang("gang-1"))
    gangs, taken = files.take_held(in_two_hours())
    assert [one.run_id for one in gangs] == kept(root) == ["gang-1"]
    assert [file.url.rpartition("/")[2] for file in taken] == list((root / "usage").names())
    keep_before_removal(root, [], None, in_two_hours())
    assert kept(root) == ["gang-1"]
    assert [name.partition("-")[0] for name in (root / "usage").names()] == ["removed"]


def test_a_file_that_another_removal_took_is_left_to_it(
    root: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = UsageFiles(root)
    files.write_held(gang("gang-1"))
    rename = LakePath.rename

    def late(self: LakePath, target: LakePath) -> bool:
        rename(self, self.parent / "taken-other.jsonl")
        return rename(self, target)

    monkeypatch.setattr(LakePath, "rename", late)
    assert files.take_held(in_two_hours()) == ([], [])
    assert kept(root) == ["gang-1"]


def test_a_file_that_another_user_alone_may_rename_is_left_and_counts(
    root: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sticky directory; the removal of the user's own runs continues."""
    UsageFiles(root).write_held(gang("gang-1"))

    def refuse(self: LakePath, target: LakePath) -> bool:
        raise StoreError("Permission denied by sticky bit", kind="permission")

    monkeypatch.setattr(LakePath, "rename", refuse)
    keep_before_removal(root, [record(tmp_path)], None, in_two_hours())
    assert sorted(kept(root)) == [RUN, "gang-1"]


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o1777])
def test_usage_has_the_mode_of_the_runs(root: LakePath, tmp_path: Path, mode: int) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(mode)
    UsageFiles(root).write_held(gang("gang-1"))
    assert (tmp_path / "usage").stat().st_mode & 0o7777 == mode
    (tmp_path / "usage").chmod(0o700)
    UsageFiles(root).write_held(gang("gang-1"))
    assert (tmp_path / "usage").stat().st_mode & 0o7777 == 0o700, "as its owner made it"


def test_lines_that_a_removal_moves_meanwhile_are_found(
    root: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = UsageFiles(root)
    files.write_held(gang("gang-1"))
    entries, done = UsageFiles._entries, []

    def moved_after(self: UsageFiles) -> Any:
        listed = entries(self)
        if not done:
            done.append(True)
            keep_before_removal(root, [], None, in_two_hours())
        return listed

    monkeypatch.setattr(UsageFiles, "_entries", moved_after)
    found = read_uses([root], None, in_two_hours())
    assert [run.run_id for run in found.runs] == ["gang-1"] and found.problems == ()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1", "1e999", "true", '"1"'])
def test_a_line_has_finite_numbers(root: LakePath, tmp_path: Path, number: str) -> None:
    UsageFiles(root).keep([gang("gang-1")], 1.8e9)
    (file,) = (tmp_path / "usage").iterdir()
    file.write_text(file.read_text().replace('"held": 5.0', f'"held": {number}'))
    found = read_uses([root], None, in_two_hours())
    assert found.runs == () and "line 1: " in found.problems[0]


def test_a_line_that_is_torn_is_named_and_the_others_count(root: LakePath, tmp_path: Path) -> None:
    UsageFiles(root).keep([gang("gang-1"), gang("gang-2")], 1.8e9)
    (file,) = (tmp_path / "usage").iterdir()
    assert file.name.startswith("removed-20270115-080000-")
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][:40], '{"schema": 2, "state": "held"}']))
    (tmp_path / "usage" / f".{file.name}.12345678.draft").write_text("{")
    found = read_uses([root], None, in_two_hours())
    assert [run.run_id for run in found.runs] == ["gang-1"]
    (problem,) = found.problems
    assert file.name in problem and "line 2: " in problem
    assert "(and 1 more line)" in problem


def test_a_record_that_is_too_large_is_named_and_not_read(root: LakePath, tmp_path: Path) -> None:
    put_run(tmp_path, RUN)
    large = put_run(tmp_path, "fit-20261122-120000-cccccc") / "run.json"
    os.truncate(large, LARGEST_RECORD + 1)
    found = read_uses([root], None, time.time())
    assert [run.run_id for run in found.runs] == [RUN]
    (problem,) = found.problems
    assert problem.startswith("fit-20261122-120000-cccccc: ")
    assert str(large) in problem and str(LARGEST_RECORD) in problem


def test_a_file_of_removed_runs_that_is_too_large_is_named_and_not_read(
    root: LakePath, tmp_path: Path
) -> None:
    files = UsageFiles(root)
    files.keep([gang("gang-1")], 1.8e9)
    large = tmp_path / "usage" / "held-gang-2.jsonl"
    large.write_bytes(b"{")
    os.truncate(large, LARGEST_FILE + 1)
    found = read_uses([root], None, in_two_hours())
    assert [run.run_id for run in found.runs] == ["gang-1"]
    assert [str(large) in problem for problem in found.problems] == [True]
    # The file is not merged and removed.
    assert files.take_held(in_two_hours())[1] == []


def test_large_removal_writes_several_files(root: LakePath, tmp_path: Path) -> None:
    gangs = [gang(f"gang-{number}") for number in range(20)]
    UsageFiles(root).keep(gangs, 1.8e9, max_bytes=1000)
    sizes = [file.stat().st_size for file in (tmp_path / "usage").iterdir()]
    assert len(sizes) > 1 and max(sizes) <= 1000
    assert sorted(kept(root)) == sorted(one.run_id for one in gangs)


def test_files_from_before_the_period_are_not_read(root: LakePath, tmp_path: Path) -> None:
    UsageFiles(root).keep([gang("gang-1")], 1.8e9)
    (file,) = (tmp_path / "usage").iterdir()
    os.utime(file, (5000, 5000))
    assert list(UsageFiles(root).read(5001.0)) == []
    assert len(list(UsageFiles(root).read(4999.0))) == 1
