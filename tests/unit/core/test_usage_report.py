"""Runs summed up by user, queue, run and day, with numbers computed by hand."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import pytest

from hopsgpu.core.gpu_use import UsePoint
from hopsgpu.core.usage_report import RunUse, Usage, UsageRow, check_grouping, moment_of, sum_usage
from hopsgpu.errors import ConfigError

HOUR = 3600.0
DAY = 24 * HOUR
# 2026-11-20 00:00 UTC.
D20 = datetime.datetime(2026, 11, 20, tzinfo=datetime.UTC).timestamp()
NOW = D20 + 10 * DAY


def run(name: str, began: float, hours: float, gpus: int = 1, **fields: Any) -> RunUse:
    """Return a run that held GPUs for some hours, and trained half of the time."""
    held = hours * HOUR * gpus
    points = (UsePoint(began), UsePoint(began + hours * HOUR, held, held / 2))
    told: dict[str, Any] = {
        "user": "alice",
        "queue": "default",
        "state": "succeeded",
        "points": points,
    }
    return RunUse(name, name, **told | fields)


def by(grouping: str, *runs: RunUse, since: float | None = None, until: float = NOW) -> Usage:
    return sum_usage(runs, grouping, since, until)


def held(usage: Usage, name: str) -> dict[str, float]:
    return {getattr(row, name): round(row.gpu_hours_held, 6) for row in usage}


def test_users_with_the_most_hours_come_first() -> None:
    usage = by("user", run("a", D20, 2.0), run("b", D20, 3.0, 4, user="bob"), run("c", D20, 1.0))
    assert held(usage, "user") == {"bob": 12.0, "alice": 3.0}
    assert [row.user for row in usage] == ["bob", "alice"]
    bob = usage[0]
    assert (bob.gpu_hours_training, bob.gpu_hours_idle, bob.runs) == (6.0, 6.0, 1)
    assert (bob.queue, bob.run, bob.state, bob.day) == (None, None, None, None)
    assert (usage.total.gpu_hours_held, usage.total.runs, usage.total.user) == (15.0, 3, None)


def test_queues_and_runs() -> None:
    runs = run("a", D20, 2.0, queue="root.ml"), run("b", D20, 3.0, state="failed"), run("c", D20, 1)
    assert held(by("queue", *runs), "queue") == {"default": 4.0, "root.ml": 2.0}
    rows = by("run", *runs)
    assert [(row.run, row.user, row.queue, row.state) for row in rows] == [
        ("b", "alice", "default", "failed"),
        ("a", "alice", "root.ml", "succeeded"),
        ("c", "alice", "default", "succeeded"),
    ]


def test_a_run_over_midnight_is_in_both_days_with_its_time() -> None:
    usage = by("day", run("a", D20 + 22 * HOUR, 6.0, 2), run("b", D20 + DAY, 1.0))
    assert held(usage, "day") == {"2026-11-20": 4.0, "2026-11-21": 9.0}
    assert [row.day for row in usage] == ["2026-11-20", "2026-11-21"]
    assert [row.runs for row in usage] == [1, 2]
    assert usage.total.runs == 2


def test_days_are_those_of_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert held(by("day", run("a", D20 + 20 * HOUR, 4.0)), "day")["2026-11-20"] == 4.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_long_run_has_each_of_its_days() -> None:
    usage = by("day", run("a", D20 + 12 * HOUR, 48.0))
    assert held(usage, "day") == {"2026-11-20": 12.0, "2026-11-21": 24.0, "2026-11-22": 12.0}


def test_a_run_that_began_before_counts_from_the_begin_of_the_period() -> None:
    usage = by("user", run("a", D20, 10.0), run("gone", D20 - DAY, 1.0), since=D20 + 4 * HOUR)
    assert held(usage, "user") == {"alice": 6.0}
    assert usage.total.runs == 1


def test_a_run_that_ended_after_counts_until_the_end_of_the_period() -> None:
    usage = by("day", run("a", D20 + 23 * HOUR, 10.0), run("later", D20 + 3 * DAY, 1.0),
               until=D20 + DAY + 2 * HOUR)  # fmt: skip
    assert held(usage, "day") == {"2026-11-20": 1.0, "2026-11-21": 2.0}
    assert usage.total.runs == 1


def test_a_record_of_another_century_makes_no_million_rows() -> None:
    old = RunUse("a", "a", "eve", "", "succeeded", (UsePoint(0.0), UsePoint(1e11, 1e9)))
    usage = by("day", old, since=NOW - 2 * DAY)
    assert len(usage) == 2


def test_failed_and_lost_runs_have_a_share_of_what_was_held() -> None:
    usage = by(
        "user",
        run("a", D20, 5.0),
        run("b", D20, 2.0, state="failed"),
        run("c", D20, 1.0, state="lost"),
        run("d", D20, 2.0, state="cancelled"),
        run("e", D20, 0.0, user="bob", state="failed"),
    )
    alice, bob = usage
    assert alice.failed_share == pytest.approx(0.3)
    assert (alice.runs, alice.runs_failed, alice.runs_lost, alice.runs_cancelled) == (4, 1, 1, 1)
    assert bob.failed_share is None and bob.runs_failed == 1


def test_what_is_incomplete_is_said() -> None:
    usage = by("user", run("going", D20, 1.0, state="active"), run("gone", D20, 1.0, state="lost"))
    active, lost = usage.notes
    assert "1 run not ended, counted until the last record" in active and "going" in active
    assert "1 run lost" in lost and "unknown: gone" in lost
    assert usage.total.runs_active == 1


def test_a_run_that_is_there_twice_counts_once_as_it_was_recorded_last() -> None:
    usage = by("run", run("a", D20, 1.0, state="lost"), run("a", D20, 2.0), run("a", D20, 2.0, 9))
    assert [(row.run, row.state, row.gpu_hours_held) for row in usage] == [("a", "succeeded", 2.0)]


def test_a_held_gang_between_its_launches_is_no_run() -> None:
    usage = by("user", run("gang", D20, 3.0, state="held"), run("a", D20, 1.0))
    (alice,) = usage
    assert (alice.gpu_hours_held, alice.runs) == (4.0, 1)


def test_waiting_counts_apart() -> None:
    waited = (UsePoint(D20), UsePoint(D20 + HOUR, waited=8 * HOUR))
    (alice,) = by("user", run("a", D20, 0.0, points=waited))
    assert (alice.gpu_hours_waited, alice.gpu_hours_held, alice.failed_share) == (8.0, 0.0, None)


def test_nothing_is_nothing() -> None:
    usage = by("day")
    assert (len(usage), usage.total, usage.notes) == (0, UsageRow(), ())
    assert "0 rows by day, the first run to 2026-11-30 00:00 UTC: 0.00 GPU hours held" in repr(
        usage
    )


def test_it_is_a_table() -> None:
    import pandas

    usage = sum_usage(
        [run("a", D20, 2.0), run("b", D20, 1.0, user="bob")], "user", None, NOW, ["x"]
    )
    table = pandas.DataFrame(usage)
    assert list(table["gpu_hours_held"]) == [2.0, 1.0]
    assert list(table["user"]) == ["alice", "bob"]
    assert usage.problems == ("x",)
    assert pickle.loads(pickle.dumps(usage)) == usage
    assert usage[:1] == (usage[0],) and list(usage) == [usage[0], usage[1]]
    html = sum_usage([run("<b>", D20, 2.0)], "run", None, NOW)._repr_html_()
    assert "&lt;b&gt;" in html


@pytest.mark.parametrize(
    ("value", "moment"),
    [
        (None, None),
        ("all", None),
        ("30d", NOW - 30 * DAY),
        (90, NOW - 90.0),
        (datetime.timedelta(hours=2), NOW - 2 * HOUR),
        ("2026-11-20", D20),
        ("2026-11-20T12:00", D20 + 12 * HOUR),
        ("2026-11-20T12:00+01:00", D20 + 11 * HOUR),
        (datetime.date(2026, 11, 20), D20),
        (datetime.datetime(2026, 11, 20, 1), D20 + HOUR),
        (datetime.datetime(2026, 11, 20, tzinfo=datetime.UTC), D20),
    ],
)
def test_points_in_time(value: object, moment: float | None) -> None:
    assert moment_of(value, "since", NOW) == moment


@pytest.mark.parametrize("value", ["soon", "", -1, "30", object(), True])
def test_other_texts_are_no_points_in_time(value: object) -> None:
    with pytest.raises(ConfigError, match="since=.*such as '30d'.*'2026-11-01'.*'all'"):
        moment_of(value, "since", NOW)


def test_other_groupings_are_refused() -> None:
    with pytest.raises(ConfigError, match="by='week'"):
        check_grouping("week")
