"""`hopsgpu usage`, on a local directory that stands for the lake."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hopsgpu.cli.main import main
from tests.unit.records import NEW, OLD, put_run, root

__all__ = ["root"]


def call(*words: str) -> Result:
    return CliRunner().invoke(main, ["usage", *words])


def use(held_hours: float, ago: float = 3600.0) -> list[dict[str, float]]:
    """Points of a run that trained half of the time that it held GPUs."""
    now, held = time.time(), held_hours * 3600
    first = {"time": now - ago, "held": 0.0, "training": 0.0, "publishing": 0.0, "waited": 0.0}
    return [first, first | {"time": now - 1.0, "held": held, "training": held / 2}]


def test_a_table_has_a_row_for_each_user_and_the_sum(root: Path) -> None:
    put_run(root, OLD, use=use(2.0), user="bob", state="failed")
    put_run(root, NEW, use=use(150.0))
    done = call()
    lines = done.stdout.splitlines()
    assert lines[0].startswith("GPU hours by user, ") and lines[0].endswith(" UTC")
    words = "USER HELD TRAINING PUBLISHING IDLE WAITED FAILED RUNS"
    assert lines[1].split() == words.split()
    assert lines[2].split() == ["alice", "150.00", "75.00", "0.00", "75.00", "0.00", "0%", "1"]
    assert lines[3].split() == ["bob", "2.00", "1.00", "0.00", "1.00", "0.00", "100%", "1"]
    assert lines[4].split() == ["total", "152.00", "76.00", "0.00", "76.00", "0.00", "1%", "2"]
    assert len(lines) == 5 and done.stderr == ""


def test_runs_have_their_user_and_state(root: Path) -> None:
    put_run(root, NEW, use=use(0.001), state="running", queue="")
    lines = call("--by", "run").stdout.splitlines()
    assert lines[1].split()[:4] == ["RUN", "USER", "QUEUE", "STATE"]
    assert lines[2].split() == [
        *(NEW, "alice", "-", "active", "0.0010", "0.0005", "0.00", "0.0005", "0.00", "0%"),
    ]
    assert lines[3].startswith("1 run not ended, counted until the last record")


def test_what_cannot_be_read_is_named_beside_the_rest(root: Path) -> None:
    put_run(root, NEW, use=use(1.0))
    (root / "runs" / "odd\x1b[2J").mkdir()
    for words in ((), ("--csv",), ("--json",)):
        done = call(*words)
        assert done.exit_code == 0
        (line,) = done.stderr.splitlines()
        assert line.startswith("hopsgpu: not counted: odd?[2J: ")
    assert len(json.loads(done.stdout)["problems"]) == 1


def test_many_that_cannot_be_read_are_counted(root: Path) -> None:
    for number in range(25):
        (root / "runs" / f"odd-{number}").mkdir(parents=True)
    lines = call().stderr.splitlines()
    assert len(lines) == 21
    assert lines[-1] == "hopsgpu: not counted: 5 more; --json lists all of them"
    assert len(json.loads(call("--json").stdout)["problems"]) == 25


def test_csv_has_units_in_its_names(root: Path) -> None:
    put_run(root, NEW, use=use(1.5))
    (row,) = csv.DictReader(io.StringIO(call("--csv", "--by", "queue").stdout))
    assert list(row) == [
        "queue",
        "gpu_hours_held",
        "gpu_hours_training",
        "gpu_hours_publishing",
        "gpu_hours_idle",
        "gpu_hours_waited",
        "failed_share",
        "runs",
        "runs_failed",
        "runs_cancelled",
        "runs_lost",
        "runs_active",
    ]
    assert (row["queue"], row["gpu_hours_held"], row["runs"]) == ("default", "1.5", "1")


def test_names_of_others_may_be_anything(root: Path) -> None:
    put_run(root, NEW, use=use(1.5), user="\ud800\x1b[2J,a")
    for words in ((), ("--json",), ("--csv",)):
        assert call(*words).exit_code == 0
    assert "\x1b" not in call().stdout
    (row,) = csv.DictReader(io.StringIO(call("--csv").stdout))
    assert row["user"] == "??[2J,a"


@pytest.mark.parametrize("name", ["=1+1", "+cmd|' /C calc'!A0", "-1", "@SUM(A1)", "\uff1d1"])
def test_csv_has_no_formulas(root: Path, name: str) -> None:
    put_run(root, NEW, use=use(1.5), user=name, queue=f"root.{name}")
    (row,) = csv.DictReader(io.StringIO(call("--csv", "--by", "run").stdout))
    assert (row["user"], row["queue"]) == (f"'{name}", f"root.{name}")
    (row,) = json.loads(call("--json").stdout)["rows"]
    assert row["user"] == name


def test_json_has_the_period_and_the_sums(root: Path) -> None:
    put_run(root, NEW, use=use(1.5, ago=1000.0))
    found = json.loads(call("--json", "--since", "500s").stdout)
    assert found["by"] == "user" and found["until"] - found["since"] == pytest.approx(500.0)
    (row,) = found["rows"]
    assert row["user"] == "alice" and "queue" not in row
    assert row["gpu_hours_held"] == pytest.approx(0.75, abs=0.05)
    assert found["total"]["gpu_hours_held"] == row["gpu_hours_held"]
    assert json.loads(call("--json", "--since", "all").stdout)["since"] is None


def test_nothing_is_said_too(root: Path) -> None:
    assert call().stdout.startswith("no runs from ")
    assert call("--since", "all").stdout.startswith("no runs from the first run to ")
    assert len(call("--csv").stdout.splitlines()) == 1
    assert json.loads(call("--json").stdout)["rows"] == []


def test_several_roots_add_up(root: Path) -> None:
    for name in ("a", "b"):
        put_run(root / name, f"{name}-20261122-120000-bbbbbb", use=use(1.0))
    words = [word for name in ("a", "b") for word in ("--root", f"file://{root}/{name}")]
    (row,) = json.loads(call("--json", *words, *words).stdout)["rows"]
    assert (row["gpu_hours_held"], row["runs"]) == (2.0, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--since", "soon"), "since='soon': must be a duration until now, such as '30d'"),
        (("--until", "40d"), "the period must begin before its end"),
        (("--csv", "--json"), "--csv and --json: give one of them"),
        (("--root", "/lake"), "cannot hold runs and models"),
    ],
)
def test_what_cannot_be_is_refused(root: Path, words: tuple[str, ...], said: str) -> None:
    done = call(*words)
    assert done.exit_code == 1 and said in done.stderr
