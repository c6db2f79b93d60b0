"""How a search stands, as its board tells."""

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
    told = board()
    for state in (GangState.WAITING, GangState.GRANTED, GangState.READY, GangState.STARTING):
        told.state(state)
    assert told.status().state == "starting" and told.timeline.started is None
    told.record_entry(2e9)
    told.record_entry(3e9)
    assert told.status().state == "running" and told.timeline.started == 2e9


def test_a_trial_that_begins_late_does_not_have_a_search_run_again() -> None:
    told = board()
    told.state(GangState.WAITING)
    told.state(GangState.RELEASING)
    told.record_entry(2e9)
    assert told.status().state == "releasing"


def test_a_search_needs_the_executors_of_its_first_trials() -> None:
    terms = PlacementTerms(items=9, max_running=8, min_running=2, ranks=3, slots=2)
    told = SearchBoard("s-1", terms, 1, "minimize", None, search_progress_of("off"))
    assert told.min_executors(plan(executors=1)) == 3
