"""The HTML card of a search's result in a notebook; the result's page starts with the same."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hopsgpu.core import html
from hopsgpu.core.html import Html
from hopsgpu.core.trials import COMPLETE, SearchOutcome, TrialReport
from hopsgpu.display.cards import result_lines
from hopsgpu.display.charts import held_image
from hopsgpu.display.search_cell import trials_table
from hopsgpu.display.search_picture import held_and_used

_BEST = 10
_WIDTH, _HEIGHT = 560, 130


def search_card(result: SearchOutcome) -> str:
    return html.box(*summary(result))


def summary(result: SearchOutcome) -> Sequence[Html]:
    """Return the elements of the card, with which the page of a result starts, too."""
    return [*result_lines("SearchResult", result), _best(result), _held_image(result)]


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


def _held_image(result: SearchOutcome) -> Html:
    if not result.moments:
        return Html("")
    held, used = held_and_used(result.moments)
    what = "GPUs" if result.gpu_seconds.held else "executors"
    words = f"{what} held and in use by trials, over time"
    image = html.image(held_image(held, used, _WIDTH, _HEIGHT), _WIDTH, _HEIGHT, words)
    return html.element("div", html.element("div", words, style="opacity:.7"), image)
