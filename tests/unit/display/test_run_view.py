"""A fact about a run is in one place, and all that show runs show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.cli.run_tables import run_facts
from hopsgpu.core.run_values import RunStatus
from hopsgpu.core.scores import ScoreStatus
from hopsgpu.display import cell, score_screens, search_cell, search_terminal, terminal
from hopsgpu.display.cards import result_card, run_card, score_card
from hopsgpu.display.picture import Scene
from hopsgpu.display.run_view import record_view
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
