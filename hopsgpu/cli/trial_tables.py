"""A search's record on the lake, as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hopsgpu.cli.tables import Fact, Row, headers
from hopsgpu.core.formats import duration
from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED, RUNNING, TrialReport
from hopsgpu.display.search_phrases import gpus, measure, number, shortened
from hopsgpu.storage.error_messages import JSON_ERRORS
from hopsgpu.units import count_of

_COLOURS = {COMPLETE: "green", FAILED: "red", PRUNED: "yellow", RUNNING: "bold"}
_MOST_TRIALS = 50
# Of the parameters of a trial; their table is as wide as the terminal.
_LONGEST = 200


def search_facts(search: Any, interrupted: str, now: float) -> list[Row | Fact]:
    """Return what a record says about a search and its trials.

    Args:
        search: `search` of the record.
        interrupted: state of a trial that ran when the search ended; "" while the search is active.
        now: seconds since the epoch.
    """
    try:
        trials = [TrialReport(**fields) for fields in search["trials"]]
        return [*_heads(search, trials), [("", "")], *_table(trials, interrupted, now)]
    except JSON_ERRORS as error:
        odd = f"another version of hopsgpu wrote its trials ({error!r}); --json shows them"
        return [Fact("search", odd, "yellow")]


def _heads(search: Any, trials: Sequence[TrialReport]) -> Iterator[Fact]:
    states = Counter(trial.state for trial in trials)
    ended = ", ".join(f"{states[state]} {state}" for state in (COMPLETE, PRUNED, FAILED))
    metric = f"{search['direction']} {search['metric'] or 'the value'}"
    yield Fact("search", f"{metric}, by {search['sampler']} and {search['pruner']}")
    yield Fact("trials", f"{search['trials_wanted']} requested: {ended}")
    most, of_each = search["max_concurrent"], count_of(search["workers_per_trial"], "rank")
    yield Fact("at a time", f"at most {most}, each of {of_each} with {_gpus(search)}")
    if best := search["best"]:
        value, params = number(best["value"]), shortened(best["params"], _LONGEST)
        yield Fact("best", f"trial {best['number']}: {value} with {params}", "green")


def _gpus(search: Any) -> str:
    each = search["gpus_per_trial"]
    return count_of(each, "GPU") if each == int(each) else f"{each:g} of a GPU"


def _table(trials: Sequence[TrialReport], interrupted: str, now: float) -> Iterator[Row]:
    yield headers("TRIAL", "STATE", "VALUE", "TOOK", "TRIES", "NODE", "GPU", "PARAMETERS")
    in_order = sorted(trials, key=lambda trial: (trial.state == RUNNING, trial.ended or 0.0))
    shown = in_order[-_MOST_TRIALS:]
    for trial in shown:
        state, took = trial.state, trial.duration
        if state == RUNNING and interrupted:
            state = interrupted
        elif state == RUNNING and trial.started is not None:
            took = now - trial.started
        yield [
            (str(trial.number), ""),
            (state, _COLOURS.get(state, "")),
            # What failed has a line of its own.
            ("-" if trial.state == FAILED else measure(trial) or "-", ""),
            (duration(took), ""),
            (str(trial.tries), ""),
            (trial.host or "-", ""),
            (gpus(trial.gpu) or "-", ""),
            (shortened(trial.params, _LONGEST), ""),
        ]
    for trial in shown:
        if trial.state == FAILED:
            yield [(f"trial {trial.number}: {measure(trial)}", "red")]
    if len(trials) > len(shown):
        yield [
            (
                f"and {count_of(len(trials) - len(shown), 'trial')} earlier; --json shows all",
                "dim",
            )
        ]
