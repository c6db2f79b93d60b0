"""The HTML card of a search's result in a notebook; the result's page starts with the same."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hopsgpu.core import html
from hopsgpu.core.gpu_losses import largest_loss
from hopsgpu.core.html import Html
from hopsgpu.core.trials import COMPLETE, FAILED, SearchOutcome, TrialReport
from hopsgpu.display import search_phrases as say
from hopsgpu.display.cards import known_facts, timeline, warning_lines
from hopsgpu.display.charts import held_image
from hopsgpu.display.phrases import spent
from hopsgpu.display.search_cell import trials_table
from hopsgpu.display.search_picture import held_and_used

_BEST = 10
_FAILED = 3
_WIDTH, _HEIGHT = 560, 130


def search_card(result: SearchOutcome) -> str:
    """Return a card of a search's result."""
    return html.box(*summary(result))


def summary(result: SearchOutcome) -> Sequence[Html]:
    """Return the elements of the card, with which the page of a result starts, too."""
    best = result.best
    name = f"best {result.metric or 'value'}"
    pairs: dict[str, object] = {
        name: "" if best is None else html.bold(f"{float(best.value):.6g}"),
        "of trial": "" if best is None else best.number,
        "parameters": "" if best is None else say.shortened(best.params, 300),
        "trials": say.count_phrase(len(result.trials), result.states),
        "time": timeline(result.timeline),
        "GPU seconds": " · ".join(spent(result.gpu_seconds)) if result.gpu_seconds.held else "",
        "largest loss": largest_loss(result.gpu_seconds),
    }
    return [
        html.title("SearchResult", result.run_id),
        html.facts(known_facts(pairs)),
        *warning_lines((*result.warnings, *_failures(result))),
        _best(result),
        _held(result),
    ]


def best_trials(result: SearchOutcome, most: int = _BEST) -> list[TrialReport]:
    """Return the best complete trials, the best first."""
    sign = 1.0 if result.direction == "minimize" else -1.0
    values = (
        (sign * float(trial.value), trial.number, trial)
        for trial in result.trials
        if trial.state == COMPLETE and trial.value is not None
    )
    return [trial for _, _, trial in heapq.nsmallest(most, values)]


def _best(result: SearchOutcome) -> Html:
    best = best_trials(result)
    return trials_table("best trials", best) if best else Html("")


def _failures(result: SearchOutcome) -> list[str]:
    failed = [trial for trial in result.trials if trial.state == FAILED]
    return [f"trial {trial.number} failed: {say.why(trial)}" for trial in failed[:_FAILED]]


def _held(result: SearchOutcome) -> Html:
    if not result.moments:
        return Html("")
    held, used = held_and_used(result.moments)
    what = "GPUs" if result.gpu_seconds.held else "executors"
    words = f"{what} held and in use by trials, over time"
    image = html.image(held_image(held, used, _WIDTH, _HEIGHT), _WIDTH, _HEIGHT, words)
    return html.element("div", html.element("div", words, style="opacity:.7"), image)
