"""Scores without a cluster: each row once, in order; what fails, is skipped, and is resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.test_local import Told
from tests.local_scripts import local_environ, running

pytestmark = pytest.mark.soak

DRIVER = Path(__file__).with_name("score_driver.py")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def told(home: Path) -> Iterator[Told]:
    environ = local_environ(home, None, DRIVER.parents[2])
    with running(DRIVER, home, environ) as process:
        yield Told(process, home / "errors")


def record(home: Path, run_id: str) -> dict[str, object]:
    content: dict[str, object] = json.loads(
        (home / "hopsgpu" / "runs" / run_id / "run.json").read_text()
    )
    return content


def test_every_row_is_scored_once_and_in_the_tables_order(told: Told, home: Path) -> None:
    scored = told("scored")[0]
    assert scored["url"] == f"file://{home}/scored" and scored["rows"] == 1000
    assert scored["columns"] == ["name", "id", "odd", "at", "y", "pair"]
    assert scored["ids"] == list(range(1000)) and scored["names"] == ["row 0", "row 1"]
    assert scored["odd"] == {"a": 999}
    assert scored["y"] == pytest.approx([0.3 * n for n in range(1000)])
    assert scored["pair"] == pytest.approx([0.7, -0.7])
    assert scored["left"] == [] and scored["spark"] == 1000
    assert scored["at"] == [["timestamp", True]], "of the data's type, and the same points in time"
    assert scored["last"][0] == 1000 and scored["last"][1] == scored["last"][2] > 2
    assert scored["last"][3] == "succeeded"
    assert "ScoreResult" in scored["html"] and "1000 rows" in scored["repr"].replace(",", "")


def test_a_predictor_is_made_once_in_each_process_and_its_model_is_there_once(told: Told) -> None:
    made = told("scored")[0]["made"]
    assert 1 <= len(made) <= 2 and len(set(made.values())) == 1


def test_the_record_describes_the_score(told: Told, home: Path) -> None:
    content = record(home, told("scored")[0]["run"])
    score = content["score"]
    assert isinstance(score, dict)
    assert content["state"] == "succeeded" and score["is_complete"] and score["kept_in"] is None
    assert (score["rows"], score["scored"]) == (1000, 1000)
    assert str(score["model"]).endswith("/models/scaled/1")


def test_a_dataframe_is_scored_and_what_was_written_for_it_is_removed(
    told: Told, home: Path
) -> None:
    frame = told("frame")[0]
    assert frame["ids"] == list(range(300)) and frame["y"] == [float(n) for n in range(300)]
    run = home / "hopsgpu" / "runs" / frame["run"]
    assert frame["url"] == f"file://{run}/output" and not (run / "data").exists()


def test_a_part_whose_process_is_lost_is_repeated(told: Told) -> None:
    assert told("lost")[0]["y"] == pytest.approx([n / 10 for n in range(1000)])


def test_a_part_that_fails_three_times_fails_the_call_with_its_place(told: Told) -> None:
    said = told("failed")[0]["said"]
    assert "rows 500 to 599 of file:" in said and "part-1.parquet, row group 0" in said
    assert "failed 3 times" in said and "LookupError: no such row" in said
    assert 'raise LookupError("no such row")' in said and "part_scorer" not in said
    assert "resume=" in said


def test_a_predictor_that_cannot_be_made_fails_the_call_and_no_rows_are_blamed(told: Told) -> None:
    said = told("not made")[0]["said"]
    assert said.startswith("no row was at fault: 3 processes")
    assert "CannotBeMade" in said and "LookupError: no weights" in said
    assert 'raise LookupError("no weights")' in said and "rows 0 to" not in said


def test_a_part_that_fails_is_left_out_by_choice(told: Told) -> None:
    skipped = told("skipped")[0]
    assert skipped["ids"] == [n for n in range(1000) if not 500 <= n < 600]
    assert [part[:2] for part in skipped["parts"]] == [[500, 100]]
    assert skipped["tries"] == 3, "each try was in a process of its own"


def test_a_function_that_does_not_take_the_last_batch_fails_at_once_and_no_rows_are_blamed(
    told: Told,
) -> None:
    said = told("squeezed")[0]["said"]
    assert said.startswith("no row was at fault: ") and "use squeeze(-1)" in said
    assert "does not take batches of all sizes" in said and "resume=" in said
    assert told("squeezed sizes")[0]["sizes"] == ["33", "1"]


def test_what_a_score_leaves_beside_its_output_is_removed_by_the_next_one(told: Told) -> None:
    skipped = told("skipped")[0]
    assert skipped["left"] == [["parts"]] and skipped["later"] == []
    assert told("nothing left")[0]["names"] == []


def test_ctrl_c_leaves_no_process_and_no_output_and_the_rest_can_be_scored_later(
    told: Told, home: Path
) -> None:
    interrupted = told("interrupted")[0]
    assert "cancelled" in interrupted["said"] and not interrupted["there"]
    assert interrupted["alive"] == []
    assert "keep= differs" in told("other columns")[0]["said"]
    continued = told("continued")[0]
    assert continued["run"] == continued["was"] and 1 <= continued["new"] < continued["files"]
    assert continued["url"] == f"file://{home}/slow"
    assert continued["y"] == pytest.approx([n / 10 for n in range(1000)])


def test_mistakes_are_named(told: Told) -> None:
    assert "exists" in told("exists")[0]["said"]
    assert "is within data=" in told("within")[0]["said"]
    assert "that score is complete" in told("complete")[0]["said"]
    assert "columns=['y']" in told("no column")[0]["said"]
    assert "'odd' has the type struct" in told("odd")[0]["said"]
    assert "no version '9'" in told("no model")[0]["said"]
    assert "Scaled as predict()" in told("no class")[0]["said"]
