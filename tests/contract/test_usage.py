"""GPU hours from records that the project's own recorder wrote, on every lake."""

from __future__ import annotations

import datetime
import json
import time

import pytest
from click.testing import CliRunner

import hopsgpu
from hopsgpu.artifacts.run_uses import UsageFiles, keep_before_removal
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cli.main import main
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_use import UsePoint
from hopsgpu.core.usage_report import RunUse
from hopsgpu.storage.lake import LakePath
from tests.unit.records import RecordedRun

HOUR, MINUTE = 3600.0, 60.0
OVERNIGHT, FAILED = "fit-20261120-230000-aaaaaa", "fit-20261121-100000-bbbbbb"
NEVER = "fit-20261121-120000-cccccc"


def at(day: int, hour: int, minute: int = 0) -> float:
    return datetime.datetime(2026, 11, day, hour, minute, tzinfo=datetime.UTC).timestamp()


def put_runs(lake: LakePath) -> None:
    """Writes a run over midnight, one that failed, and one that never had its GPUs."""
    # 2 GPUs: waits 30 minutes, holds them from 23:30 to 1:50, trains from 23:40 to 1:40.
    run = RecordedRun(lake, OVERNIGHT, at(20, 23))
    run.trains(at(20, 23, 30), at(20, 23, 40))
    for hour, minute in ((23, 50), (0, 10), (1, 0)):
        run.now = at(20 if hour == 23 else 21, hour, minute)
        run.put("running")
    run.ends(at(21, 1, 40), at(21, 1, 45), at(21, 1, 50), GangState.SUCCEEDED)
    # 1 GPU: waits 6 minutes, holds it for an hour, fails.
    run = RecordedRun(lake, FAILED, at(21, 10), executors=1, user="bob", queue="root.ml")
    run.trains(at(21, 10, 6), at(21, 10, 6))
    run.ends(at(21, 11, 6), at(21, 11, 6), at(21, 11, 6), GangState.FAILED)
    # 4 GPUs: waits for 15 minutes, in vain.
    run = RecordedRun(lake, NEVER, at(21, 12), executors=4, user="bob", queue="root.ml")
    run.goes(at(21, 12), GangState.WAITING)
    run.goes(at(21, 12, 15), GangState.RELEASING)
    run.goes(at(21, 12, 15), GangState.FAILED)


def hours(usage: hopsgpu.types.Usage, name: str) -> dict[str, tuple[float, ...]]:
    """Held, training, publishing, idle and waited of each row."""
    return {
        str(getattr(row, name)): tuple(
            round(value, 3)
            for value in (
                row.gpu_hours_held,
                row.gpu_hours_training,
                row.gpu_hours_publishing,
                row.gpu_hours_idle,
                row.gpu_hours_waited,
            )
        )
        for row in usage
    }


def test_hours_are_those_of_the_runs(lake: LakePath) -> None:
    put_runs(lake)
    usage = hopsgpu.usage("user", "2026-11-01", root=lake.url)
    assert hours(usage, "user") == {
        "alice": (4.667, 4.0, 0.167, 0.5, 1.0),
        "bob": (1.0, 1.0, 0.0, 0.0, 1.1),
    }
    assert [row.failed_share for row in usage] == [0.0, 1.0]
    assert usage.total.failed_share == pytest.approx(1.0 / (14 / 3 + 1))
    assert (usage.total.runs, usage.total.runs_failed) == (3, 2)
    assert (usage.problems, usage.notes) == ((), ())
    assert hours(hopsgpu.usage("queue", "all", root=[lake.url]), "queue") == {
        "default": (4.667, 4.0, 0.167, 0.5, 1.0),
        "root.ml": (1.0, 1.0, 0.0, 0.0, 1.1),
    }


def test_each_day_has_its_hours(lake: LakePath) -> None:
    put_runs(lake)
    assert hours(hopsgpu.usage("day", "all", root=lake.url), "day") == {
        "2026-11-20": (1.0, 0.667, 0.0, 0.333, 1.0),
        "2026-11-21": (4.667, 4.333, 0.167, 0.167, 1.1),
    }


def test_a_period_cuts_runs(lake: LakePath) -> None:
    put_runs(lake)
    usage = hopsgpu.usage("run", "2026-11-21T01:10", until="2026-11-21T10:36", root=lake.url)
    assert hours(usage, "run") == {
        OVERNIGHT: (1.333, 1.0, 0.167, 0.167, 0.0),
        FAILED: (0.5, 0.5, 0.0, 0.0, 0.1),
    }


def test_a_directory_changes_with_its_record(lake: LakePath) -> None:
    """By which runs from before a period are known."""
    run = RecordedRun(lake, FAILED, at(21, 10))
    (first,) = (lake / "runs").entries()
    time.sleep(0.05)
    run.put("requested")
    (second,) = (lake / "runs").entries()
    assert second.modified > first.modified
    store = RunStore(lake.url)
    assert store.ids(second.modified / 1000) == (FAILED,)
    assert store.ids(second.modified / 1000 + 1) == ()


def test_files_of_held_gangs_become_one(lake: LakePath) -> None:
    for name in ("gang-1", "gang-2"):
        points = UsePoint(1e9), UsePoint(1e9 + HOUR, HOUR)
        UsageFiles(lake).write_held(RunUse(name, "gang", "carol", "", "held", points))
    later = time.time() + 2 * HOUR
    for _ in range(2):
        keep_before_removal(lake, [], None, later)
        (name,) = (lake / "usage").names()
        assert name.startswith("removed-")
        assert hopsgpu.usage("user", "all", root=lake.url).total.gpu_hours_held == 2.0


def test_a_removed_run_counts_as_before(lake: LakePath) -> None:
    put_runs(lake)
    UsageFiles(lake).write_held(
        RunUse("gang-1", "gang", "carol", "default", "held",
               (UsePoint(at(22, 1)), UsePoint(at(22, 2), 2 * HOUR)))
    )  # fmt: skip
    call = CliRunner().invoke
    command = ["usage", "--by", "day", "--since", "all", "--root", lake.url]
    before = call(main, [*command, "--csv"])
    assert before.stdout.splitlines()[0].startswith("day,gpu_hours_held,gpu_hours_training,")
    dry = call(main, ["runs", "prune", "--root", lake.url, "--keep", "0", "--dry-run"])
    assert len(dry.stdout.split()) == 3
    assert [name for name in (lake / "usage").names() if name.startswith("removed")] == []
    done = call(main, ["runs", "prune", "--root", lake.url, "--keep", "1"])
    assert done.stdout.split() == [FAILED, OVERNIGHT], done.output
    assert RunStore(lake.url).ids() == (NEVER,)
    assert call(main, [*command, "--csv"]).stdout == before.stdout
    call(main, ["runs", "prune", "--root", lake.url, "--keep", "0"])
    assert RunStore(lake.url).ids() == ()
    after = call(main, [*command, "--csv"])
    assert (after.stdout, after.stderr) == (before.stdout, "")
    found = json.loads(call(main, [*command, "--json"]).stdout)
    assert [row["day"] for row in found["rows"]] == ["2026-11-20", "2026-11-21", "2026-11-22"]
    assert found["total"]["runs"] == 3
