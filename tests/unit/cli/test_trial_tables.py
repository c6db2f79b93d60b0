"""`hopsgpu runs show` of a search, on a local directory that stands for the lake."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hopsgpu.cli.main import main
from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED, RUNNING, Best
from tests.unit.records import put_run
from tests.unit.searches import trial

ID = "fit-20261122-120000-bbbbbb"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOPSGPU_ROOT", f"file://{tmp_path}")
    return tmp_path


def search(*trials: Any, **given: Any) -> dict[str, Any]:
    """What a search's record has under its name."""
    best = next((one for one in trials if one.state == COMPLETE), None)
    told = {
        "trials_wanted": 60,
        "max_concurrent": 4,
        "workers_per_trial": 1,
        "gpus_per_trial": 0.5,
        "direction": "minimize",
        "metric": "loss",
        "sampler": "TPESampler",
        "pruner": "MedianPruner",
        "best": best and asdict(Best(best.params, best.value or 0.0, best.number)),
        "trials": [asdict(one) for one in trials],
    }
    return told | given


def shown(root: Path, state: str = "running", **content: Any) -> list[str]:
    put_run(root, ID, state, ranks=[], **content)
    result = CliRunner().invoke(main, ["runs", "show", ID])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_a_search_is_shown_with_its_best_trial_and_why_others_failed(root: Path) -> None:
    now = time.time()
    trials = [
        trial(0, started=now - 90, ended=now - 80),
        trial(1, FAILED, started=now - 80, ended=now - 77.5, tries=3),
        trial(2, PRUNED, step=7, started=now - 77, ended=now - 70),
        trial(3, RUNNING, started=now - 65),
    ]
    lines = shown(root, search=search(*trials))
    text = "\n".join(lines)
    assert "minimize loss, by TPESampler and MedianPruner" in text
    assert "3 of 60 trials: 1 complete, 1 pruned, 1 failed" in text
    assert "at most 4, each of 1 rank with 0.5 of a GPU" in text
    assert "loss 1 (trial 0): lr=0.1, optimizer=adam" in text
    header = next(n for n, line in enumerate(lines) if line.split()[:2] == ["TRIAL", "STATE"])
    rows = [line.split() for line in lines[header + 1 :]]
    assert [row[:2] for row in rows[:4]] == [
        ["0", "complete"],
        ["1", "failed"],
        ["2", "pruned"],
        ["3", "running"],
    ]
    assert rows[0][2:5] == ["1", "10.0s", "1"]
    assert rows[1][2:5] == ["-", "2.5s", "3"]
    assert "0.3333 at step 7" in lines[header + 3]
    assert rows[3][3].startswith("1m")
    assert lines[header + 5] == "trial 1: ValueError: <lr> is too large"
    assert "RANK" not in text and "\ngang" not in text


def test_what_ran_in_a_search_that_has_ended_was_stopped(root: Path) -> None:
    lines = shown(root, "cancelled", search=search(trial(5, RUNNING)))
    assert lines[-1].split()[:3] == ["5", "stopped", "0.1667"]
    assert "best" not in "\n".join(lines)


def test_what_ran_in_a_search_that_is_lost_nobody_knows(root: Path) -> None:
    lines = shown(root, updated=-120.0, search=search(trial(5, RUNNING)))
    assert lines[-1].split()[:2] == ["5", "lost"]


def test_of_many_trials_the_last_are_shown(root: Path) -> None:
    trials = [trial(n) for n in range(70)]
    lines = shown(root, "succeeded", search=search(*trials))
    numbers = [int(line.split()[0]) for line in lines if line.split()[1:2] == ["complete"]]
    assert numbers == list(range(20, 70))
    assert lines[-1] == "and 20 trials earlier; --json shows all"
