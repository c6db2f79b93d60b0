"""The runs of several roots, looked at again and again, on local directories."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hopsgpu.artifacts.run_uses import UsageFiles
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_use import UsePoint
from hopsgpu.core.usage_report import RunUse
from hopsgpu.errors import HopsGpuError
from hopsgpu.monitoring.runs_reader import RunsReader, RunsView
from hopsgpu.storage.lake import LakePath
from tests.unit.records import RecordedRun

FIRST, SECOND = "fit-20261120-230000-aaaaaa", "fit-20261121-100000-bbbbbb"
PATHS = ("root", "root.default")


class Watched:
    """A reader of some roots, by clocks that a test sets."""

    def __init__(self, *roots: LakePath) -> None:
        self.roots: Sequence[LakePath] = roots
        self.unknown: Sequence[str] = ()
        self.now, self.wall = 1000.0, time.time()
        self.reader = RunsReader(
            lambda: (self.roots, self.unknown), lambda: self.now, lambda: self.wall
        )

    def look(self) -> RunsView:
        self.now += 1.0
        time.sleep(0.005)  # the file system's clock goes in steps
        return self.reader.look(PATHS)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


@pytest.fixture
def root(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/alice")


def kinds(view: RunsView, user: str = "alice") -> dict[str, float]:
    found = view.totals.gpu_seconds.items()
    return {key[2]: round(v, 3) for key, v in found if key[:2] == (user, "root.default") and v}


def starts(root: LakePath, run_id: str, began: float, **more: str) -> RecordedRun:
    run = RecordedRun(root, run_id, began, **more)  # type: ignore[arg-type]
    run.trains(began + 10.0, began + 20.0)
    return run


def ends(run: RecordedRun) -> None:
    at = run.now
    run.ends(at + 30.0, at + 35.0, at + 36.0, GangState.SUCCEEDED)


def test_a_run_is_followed_from_its_start_to_its_end(root: LakePath) -> None:
    watched = Watched(root)
    assert watched.look().live == ()
    run = starts(root, FIRST, watched.wall - 20.0)
    (live,) = watched.look().live
    assert (live.digest.run_id, live.queue, live.state) == (FIRST, "root.default", "running")
    ends(run)
    view = watched.look()
    assert view.live == ()
    assert kinds(view) == {"training": 60.0, "publishing": 10.0, "idle": 22.0}
    assert view.totals.ends["root.default", "succeeded"] == 1.0
    assert (root / "runs" / FIRST).remove() is None
    assert kinds(watched.look()) == kinds(view)


def test_only_what_happens_from_the_first_look_on_counts(root: LakePath) -> None:
    ends(starts(root, FIRST, time.time() - 200.0))
    run = starts(root, SECOND, time.time() - 20.0)
    watched = Watched(root)
    assert kinds(watched.look()) == {}
    ends(run)
    assert kinds(watched.look()) == {"training": 60.0, "publishing": 10.0, "idle": 2.0}


def test_old_runs_that_come_back_do_not_count(root: LakePath) -> None:
    watched = Watched(root)
    watched.look()
    ends(starts(root, FIRST, time.time() - 7200.0))
    view = watched.look()
    assert kinds(view) == {} and not any(view.totals.ends.values())


def test_a_run_whose_driver_is_gone_is_lost_and_counts_after_an_hour(root: LakePath) -> None:
    watched = Watched(root)
    watched.look()
    run = starts(root, FIRST, watched.wall - 20.0)
    assert [live.state for live in watched.look().live] == ["running"]
    watched.passes(61.0)
    view = watched.look()
    assert [live.state for live in view.live] == ["lost"]
    assert view.totals.ends["root.default", "lost"] == 0.0
    watched.passes(3600.0)
    view = watched.look()
    assert view.live == () and view.totals.ends["root.default", "lost"] == 1.0
    # It was suspended.
    run.now = watched.wall
    run.put("running")
    assert [live.state for live in watched.look().live] == ["running"]
    ends(run)
    watched.passes(36.0)
    assert watched.look().totals.ends["root.default", "succeeded"] == 0.0


def test_a_run_that_is_lost_at_the_first_look_is_not_one_of_the_lost(root: LakePath) -> None:
    starts(root, FIRST, time.time() - 7200.0)
    watched = Watched(root)
    for _ in range(2):
        view = watched.look()
        assert view.live == () and not any(view.totals.ends.values())


def test_the_newest_checkpoint_is_looked_for_once_a_minute(root: LakePath) -> None:
    watched = Watched(root)
    starts(root, FIRST, watched.wall - 20.0)
    assert watched.look().live[0].saved is None
    step = root / "runs" / FIRST / "checkpoints" / "70"
    step.make()
    (root / "runs" / FIRST / "checkpoints" / "_ranks").make()
    assert watched.look().live[0].saved is None
    watched.now += 61.0
    assert watched.look().live[0].saved == pytest.approx(time.time(), abs=60.0)


def test_a_held_gang_counts_between_its_launches(root: LakePath) -> None:
    def held(seconds: float) -> None:
        points = UsePoint(1000.0), UsePoint(2000.0, held=seconds)
        gang = RunUse("gang-1", "gang", "alice", "default", "held", points)
        UsageFiles(root).write_held(gang)

    (root / "runs").make()
    held(100.0)
    watched = Watched(root)
    assert kinds(watched.look()) == {}
    held(140.0)
    assert kinds(watched.look()) == {"idle": 40.0}
    assert kinds(watched.look()) == {"idle": 40.0}
    (root / "usage" / "held-gang-2.jsonl").write(b"{}\n")
    (root / "usage" / "held-gang-1.jsonl").remove()
    assert kinds(watched.look()) == {"idle": 40.0}


def test_a_refused_root_hides_its_runs_and_no_others(tmp_path: Path, root: LakePath) -> None:
    bob = LakePath(f"file://{tmp_path}/bob")
    watched = Watched(root, bob)
    starts(root, FIRST, watched.wall - 20.0)
    run = starts(bob, SECOND, watched.wall - 20.0, user="bob")
    assert {live.digest.user for live in watched.look().live} == {"alice", "bob"}
    assert (bob / "runs").rename(bob / "away")
    (bob / "runs").write(b"no directory")
    view = watched.look()
    assert {live.digest.user for live in view.live} == {"alice"}
    assert view.unreadable_roots == 1 and "bob/runs" in view.problems[0]
    (bob / "runs").remove()
    assert (bob / "away").rename(bob / "runs")
    ends(run)
    view = watched.look()
    assert view.unreadable_roots == 0
    assert kinds(view, "bob")["training"] == 60.0


def test_if_all_roots_are_refused_there_is_no_answer(tmp_path: Path, root: LakePath) -> None:
    bob = LakePath(f"file://{tmp_path}/bob")
    bob.make()
    (bob / "runs").write(b"no directory")
    # This one does not exist.
    watched = Watched(root, bob)
    with pytest.raises(HopsGpuError, match="no run can be read: .*bob/runs"):
        watched.look()
    RecordedRun(root, FIRST, watched.wall)
    assert [live.digest.run_id for live in watched.look().live] == [FIRST]


def test_roots_that_cannot_be_listed_keep_what_is_known(tmp_path: Path, root: LakePath) -> None:
    bob = LakePath(f"file://{tmp_path}/bob")
    watched = Watched(root, bob)
    starts(root, FIRST, watched.wall - 20.0)
    run = starts(bob, SECOND, watched.wall - 20.0, user="bob")
    watched.look()
    watched.roots, watched.unknown = [root], ["the directories of other users: no"]
    watched.now += 301.0
    ends(run)
    view = watched.look()
    assert kinds(view, "bob")["training"] == 60.0
    assert view.problems == ("the directories of other users: no",)


def test_a_root_that_is_gone_is_forgotten_and_its_sums_stay(tmp_path: Path, root: LakePath) -> None:
    bob = LakePath(f"file://{tmp_path}/bob")
    watched = Watched(root, bob)
    watched.look()
    ends(starts(bob, SECOND, watched.wall - 50.0, user="bob"))
    assert kinds(watched.look(), "bob")["training"] == 60.0
    for roots in ([root], [root, bob]):
        watched.roots = roots
        watched.now += 301.0
        assert kinds(watched.look(), "bob")["training"] == 60.0


def test_a_record_of_odd_numbers_is_counted_as_unreadable(root: LakePath) -> None:
    watched = Watched(root)
    starts(root, FIRST, watched.wall - 20.0)
    file = root / "runs" / FIRST / "run.json"
    file.replace(file.read().replace(b'"held": ', b'"held": 1e300'))
    view = watched.look()
    assert (view.live, view.unreadable_records) == ((), 1)
