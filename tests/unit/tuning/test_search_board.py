"""The status that the board of a search shows."""

from __future__ import annotations

from hopsgpu.core.gang import GangState
from hopsgpu.display.progress import search_progress_of
from hopsgpu.executors.item_placement import PlacementTerms
from hopsgpu.tuning.search_board import SearchBoard
from tests.unit.plans import plan


def board() -> SearchBoard:
    terms, shown = PlacementTerms(items=3, max_running=2), search_progress_of("off")
    return SearchBoard("s-1", terms, 1, "minimize", None, shown)


def test_a_search_runs_once_the_function_of_its_first_trial_does() -> None:
    search_board = board()
    for state in (GangState.WAITING, GangState.GRANTED, GangState.READY, GangState.STARTING):
        search_board.state(state)
    assert search_board.status().state == "starting" and search_board.timeline.started is None
    search_board.record_entry(2e9)
    search_board.record_entry(3e9)
    assert search_board.status().state == "running" and search_board.timeline.started == 2e9


def test_a_trial_that_begins_late_does_not_have_a_search_run_again() -> None:
    search_board = board()
    search_board.state(GangState.WAITING)
    search_board.state(GangState.RELEASING)
    search_board.record_entry(2e9)
    assert search_board.status().state == "releasing"


def test_a_search_needs_the_executors_of_its_first_trials() -> None:
    terms = PlacementTerms(items=9, max_running=8, min_running=2, ranks=3, slots=2)
    search_board = SearchBoard("s-1", terms, 1, "minimize", None, search_progress_of("off"))
    assert search_board.min_executors(plan(executors=1)) == 3
