"""A fact about a run is in one place, and all that show runs show it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.artifacts.runs import StoredRun
from hopsgpu.cli.run_tables import run_facts
from hopsgpu.core.run_record import ApplicationReport, FailureRecord, RankRecord, RunRecord
from hopsgpu.core.run_values import RankReport, RunStatus
from hopsgpu.core.scores import ScoreStatus
from hopsgpu.display import cell, score_screens, search_cell, search_terminal, terminal
from hopsgpu.display.cards import result_card, run_card, score_card
from hopsgpu.display.picture import Scene, how_ended
from hopsgpu.display.progress import RunLines
from hopsgpu.display.run_facts import BAD, WARNING
from hopsgpu.display.run_view import RecordView, record_view, summary_of
from hopsgpu.display.score_screens import ScoreScene
from hopsgpu.display.search_cards import search_card
from hopsgpu.display.search_picture import SearchScene
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.scoring.score_results import ScoreResult
from tests.unit import searches
from tests.unit.records import put_run, record_of
from tests.unit.web.site import browser, sources_of

PLACE: dict[str, Any] = {"application": "application_17_0001", "queue": "root.a"}
STATUS = RunStatus("run-1", "running", 0, 1, 1, ("node1",), "", 1.5, **PLACE)
PICTURE = Scene(STATUS, 0.0).picture(0.0)
SEARCH = SearchScene(replace(searches.status(2), **PLACE), 0.0).picture(0.0)
SCORE = ScoreScene(ScoreStatus("s-1", "running", 1.0, **PLACE), 0.0).picture(0.0)


def page_of_run(root: Path) -> str:
    put_run(root, "run-1", **PLACE)
    return browser(sources_of(root)).get("/runs/lake/run-1").text


RENDERERS: dict[str, Callable[[Path], object]] = {
    "terminal": lambda root: terminal.lines_of(PICTURE, 120, 9, "utf-8"),
    "cell": lambda root: cell.page(PICTURE, "key"),
    "summary": lambda root: cell.summary(PICTURE),
    "card": lambda root: run_card(STATUS),
    "result": lambda root: result_card(GangResult("run-1", **PLACE)),
    "runs show": lambda root: list(run_facts(record_view(record_of("run-1", **PLACE), "url", 0.0))),
    "page": page_of_run,
    "search in a terminal": lambda root: search_terminal.lines_of(SEARCH, 120, 9, "utf-8"),
    "search in a cell": lambda root: search_cell.page(SEARCH, "key"),
    "search's result": lambda root: search_card(replace(searches.result([]), **PLACE)),
    "score in a terminal": lambda root: score_screens.lines_of(SCORE, 120, 9, "utf-8"),
    "score in a cell": lambda root: score_screens.page(SCORE, "key"),
    "score's result": lambda root: score_card(ScoreResult("s-1", "", 0, **PLACE)),
}


@pytest.mark.parametrize("render", RENDERERS.values(), ids=RENDERERS)
def test_application_and_queue_are_in_every_view(
    render: Callable[[Path], object], tmp_path: Path
) -> None:
    shown = str(render(tmp_path / "lake" / "hopsgpu"))
    assert all(text in shown for text in PLACE.values()), shown


LOST_NODE = (
    "Application application_1_0001 failed 1 times due to AM Container exited with exitCode: -100"
    " Failing this attempt.Diagnostics: Container released on a *lost* node. For more detailed"
    " output, check the application tracking page"
)
ERROR = """rank 1 on node2 (container container_7, GPU GPU-2) raised ValueError: bad batch
Traceback (most recent call last):
ValueError: bad batch
whole log: hdfs://lake/rank-1.log"""


def view(state: str, **changes: Any) -> RecordView:
    return record_view(record_of("run-1", state, **changes), "url", 1000.0)


def rank(number: int, exit_code: int | None, *, stopped: bool = False) -> RankRecord:
    return RankRecord(
        number,
        "worker",
        "node1",
        (),
        7,
        exit_code,
        stopped=stopped,
        has_ended=exit_code is not None,
    )


def test_a_failed_gang_shows_which_rank_failed_first() -> None:
    ranks = (rank(0, 1, stopped=True), rank(1, 1), rank(2, 1), rank(3, 0))
    failure = FailureRecord("ValueError: bad batch", 1)
    failed = view("failed", error=ERROR, failure=failure, ranks=ranks)
    assert [row.ended for row in failed.ranks] == [
        "stopped after rank 1 failed",
        "failed first: exit code 1",
        "ended after rank 1 failed: exit code 1",
        "returned",
    ]
    assert [row.is_bad for row in failed.ranks] == [False, True, False, False]
    assert failed.failure is not None
    assert (failed.failure.name, failed.failure.tone, failed.failure.rank) == ("error", BAD, 1)


def test_a_rank_that_was_lost_first_is_the_culprit() -> None:
    ranks = (rank(0, 1, stopped=True), rank(1, None), rank(2, None))
    failed = view("failed", error="x", failure=FailureRecord("lost", 1), ranks=ranks)
    ended = ["stopped after rank 1 failed", "lost first", "lost"]
    assert [row.ended for row in failed.ranks] == ended


def test_without_a_first_failure_ranks_show_their_own_ends() -> None:
    ends = [
        RankReport(0, "worker", "node1", (), 7, 1),
        RankReport(1, "worker", "n", (), 7, None, "X"),
    ]
    assert [how_ended(end) for end in ends] == ["exit code 1", "X"]
    assert how_ended(replace(ends[0], stopped=True)) == "stopped"


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        (record_of("r-1"), ""),
        (
            record_of(
                "r-1", "failed", error=ERROR, failure=FailureRecord("ValueError: bad batch", 1)
            ),
            "ValueError: bad batch",
        ),
        (
            record_of("r-1", "cancelled", error="x", failure=FailureRecord("r-1 was cancelled")),
            "was cancelled",
        ),
        (record_of("r-1", "failed", error="the lake is away\nmore"), "the lake is away"),
        (record_of("r-1", "running", 900.0), "its driver on laptop was last heard from 1m40s ago"),
    ],
)
def test_outcomes_begin_with_what_failed(record: RunRecord, outcome: str) -> None:
    assert summary_of(StoredRun("r-1", record), 1000.0).error == outcome


@pytest.mark.parametrize(
    ("report", "state", "reason"),
    [
        (
            ApplicationReport("FAILED", LOST_NODE, has_ended=True),
            "lost",
            "Container released on a *lost* node\n"
            f"the state of application_1_0001: FAILED: {LOST_NODE}",
        ),
        (
            ApplicationReport("KILLED", "by dr.who", has_ended=True),
            "lost",
            "by dr.who\nthe state of application_1_0001: KILLED",
        ),
        (
            ApplicationReport("FINISHED", "", has_ended=True),
            "lost",
            "its driver on laptop ended without recording why\n"
            "the state of application_1_0001: FINISHED",
        ),
        (ApplicationReport("RUNNING", "", has_ended=False), "running", None),
        (None, "running", None),
    ],
)
def test_a_silent_run_is_lost_once_its_application_has_ended(
    report: ApplicationReport | None, state: str, reason: str | None
) -> None:
    record = record_of("run-1", "running", 970.0)
    shown = record_view(record, "url", 1000.0, report=report)
    assert shown.state == state and shown.summary.is_running == (state == "running")
    failure = shown.failure
    assert (None if failure is None else failure.full_text) == reason
    if failure is not None:
        assert (failure.name, failure.tone, shown.summary.took) == ("lost", BAD, 75.0)


def test_a_lost_run_whose_application_runs_says_so() -> None:
    report = ApplicationReport("RUNNING", "", has_ended=False)
    shown = record_view(record_of("run-1", "running", 700.0), "url", 1000.0, report=report)
    assert shown.state == "lost" and shown.failure is not None
    assert shown.failure.words == (
        "its driver on laptop was last heard from 5m00s ago\n"
        "the state of application_1_0001: RUNNING"
    )


def test_a_cancelled_run_does_not_look_like_a_failed_one() -> None:
    failure = FailureRecord("run-1 was cancelled")
    cancelled = view("cancelled", error="run-1 was cancelled", failure=failure)
    assert cancelled.failure is not None
    assert (cancelled.failure.name, cancelled.failure.tone) == ("cancelled", WARNING)
    (state,) = (fact for fact in cancelled.facts if fact.name == "state")
    assert state.tone == WARNING
    pictures = [
        Scene(replace(STATUS, state=state), 0.0).picture(0.0) for state in ("cancelled", "failed")
    ]
    marks = ["⊘" in cell.page(one, "key") for one in pictures]
    styles = [str(terminal.lines_of(one, 120, 9, "utf-8")[0].spans[0].style) for one in pictures]
    assert marks == [True, False] and styles == ["bold yellow", "bold red"]


class Model:
    url = "hdfs://lake/models/digits/3"


class Odd:
    def __repr__(self) -> str:
        return "<b>\x1b[31m" + "x\n" * 1000


def test_a_run_that_succeeded_shows_its_model_and_its_value() -> None:
    model: Any = Model()
    status = replace(STATUS, state="succeeded", model=model, value={"acc": 0.93})
    picture = Scene(status, 0.0).picture(0.0)
    shown = cell.page(picture, "key")
    assert "model digits version 3, hdfs://lake/models/digits/3" in shown
    assert "value of rank 0: {&#x27;acc&#x27;: 0.93}" in shown
    lines = [line.plain for line in terminal.lines_of(picture, 70, 20, "utf-8")]
    assert "  model digits version 3, hdfs://lake/models/digits/3" in lines
    assert "  value of rank 0: {'acc': 0.93}" in lines
    out = io.StringIO()
    RunLines(out=out, err=out).status(status)
    told = [line.partition(" s: ")[2] for line in out.getvalue().splitlines()]
    assert told[2:] == [line.strip() for line in lines if "digits" in line or "value" in line]
    view = record_view(record_of("run-1", model=model.url), "url", 1000.0)
    assert [fact.text for fact in view.facts if fact.name == "model"] == [
        "digits version 3, hdfs://lake/models/digits/3"
    ]


def test_a_value_is_bounded_and_escaped() -> None:
    picture = Scene(replace(STATUS, state="succeeded", value=Odd()), 0.0).picture(0.0)
    shown = cell.page(picture, "key")
    assert "&lt;b&gt;" in shown and "<b>x" not in shown and "\x1b" not in shown
    assert shown.count("x x") < 100
