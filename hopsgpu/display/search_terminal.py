"""A search as lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hopsgpu.display import search_words as say
from hopsgpu.display import words
from hopsgpu.display.charts import sparkline
from hopsgpu.display.search_picture import SearchPicture
from hopsgpu.display.terminal import head, levels_of, shown_in, tail

if TYPE_CHECKING:
    from rich.text import Text

_PLOT_WIDTH = 40
# Trials that run have at most this part of the lines.
_SHARE = 3
_MOST_ENDED = 4
_STYLES = {"failed": "red", "pruned": "dim"}


def lines_of(picture: SearchPicture, width: int, height: int, encoding: str) -> list[Text]:
    """A picture as lines of a terminal.

    Args:
        picture: of the search.
        width: characters of a line.
        height: the most lines.
        encoding: the terminal's; what it lacks is written in ASCII.
    """
    status = picture.status
    shown, levels = shown_in(width, encoding), levels_of(encoding)
    counts = say.ends(status.wanted, say.states_of(status))
    parts = [status.state, words.seconds(picture.elapsed), counts, say.held_gpus(status)]
    lines = [head(status, parts, shown)]
    if status.waiting_for:
        lines.append(shown(f"  {status.waiting_for}"))
    if status.best is not None:
        lines.append(shown(f"  {say.best_of(status)}: {say.shortened(status.best.params, 200)}"))
    lines += [shown(text) for text in _plots(picture, levels)]
    most = max(height // _SHARE, 1)
    lines += [shown(text) for text in _running(picture, most)]
    for trial in picture.ended[: min(most, _MOST_ENDED)]:
        lines.append(shown(f"  {say.end_of(trial, status.best)}", _STYLES.get(trial.state, "")))
    lines += tail(picture.recent, height - len(lines), say.WHOLE_LOGS, shown)
    return lines[: max(height, 1)]


def _plots(picture: SearchPicture, levels: str) -> Iterable[str]:
    in_use = f"{say.unit(picture.status)} in use"

    def row(name: str, drawn: str, told: str) -> str:
        return f"  {name.ljust(len(in_use))}  {drawn.ljust(_PLOT_WIDTH)}  {told}"

    if len(picture.curve) > 1:
        first, last = picture.curve[0][1], picture.curve[-1][1]
        drawn = sparkline(picture.curve, _PLOT_WIDTH, levels)
        yield row("best value", drawn, f"{first:.4g} to {last:.4g}")
    if len(picture.held) > 1:
        bounds = (0.0, max(value for _, value in picture.held) or 1.0)
        drawn = sparkline(picture.used, _PLOT_WIDTH, levels, bounds)
        now = picture.status.moments[-1]
        yield row(in_use, drawn, f"{now.running:g} of {now.held:g} held")


def _running(picture: SearchPicture, most: int) -> Iterable[str]:
    rows = [
        (
            f"trial {trial.number}",
            trial.host,
            say.gpus(trial.gpu),
            "" if trial.step is None else f"step {trial.step}",
            say.measure(trial),
            "" if ran is None else words.seconds(ran),
            say.shortened(trial.params),
        )
        for trial, ran in zip(picture.running[:most], picture.seconds, strict=False)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w)
        yield f"  {'  '.join(cells).rstrip()}"
    if left := len(picture.status.running) - len(rows):
        yield f"  and {left:,} more that run"
