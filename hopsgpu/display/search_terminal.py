"""The display of a search as lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hopsgpu.display import phrases
from hopsgpu.display import search_phrases as say
from hopsgpu.display.charts import sparkline
from hopsgpu.display.picture import Bounds, Point
from hopsgpu.display.search_picture import SearchPicture
from hopsgpu.display.subjects import status_view
from hopsgpu.display.terminal import head, levels_of, line_style, plot_width, tail
from hopsgpu.units import count_of

if TYPE_CHECKING:
    from rich.text import Text

_VALUES_WIDTH = 32
# The running trials have at most 1/3 of the lines.
_SHARE = 3
_MAX_ENDED = 4
_RUNNING_HEADERS = ("running", "host", "GPU", "step", "last value", "for", "parameters")
_STYLES = {"failed": "red", "pruned": "dim"}


def lines_of(picture: SearchPicture, width: int, height: int, encoding: str) -> list[Text]:
    """Return a picture as lines of a terminal.

    Args:
        encoding: the terminal's encoding; missing characters are written in ASCII.
    """
    status = picture.status
    shown, levels = line_style(width, encoding), levels_of(encoding)
    lines = head(status_view(status, picture.elapsed), (), shown, width)
    lines += [shown(text) for text in _plots(picture, levels, width)]
    most = max(height // _SHARE, 1)
    lines += [shown(text) for text in _running(picture, most)]
    for trial in picture.ended[: min(most, _MAX_ENDED)]:
        lines.append(shown(f"  {say.end_of(trial, status.best)}", _STYLES.get(trial.state, "")))
    lines += tail(picture.recent, height - len(lines), say.WHOLE_LOGS, shown)
    return lines[: max(height, 1)]


def _plots(picture: SearchPicture, levels: str, width: int) -> Iterable[str]:
    drawn: list[tuple[str, Sequence[Point], Bounds | None, str]] = []
    if len(picture.curve) > 1:
        first, last = picture.curve[0][1], picture.curve[-1][1]
        after = count_of(picture.status.ended, "trial")
        text = f"{first:.4g} to {last:.4g} after {after}"
        drawn.append(("best value", picture.curve, None, text))
    if len(picture.held) > 1:
        bounds = (0.0, max(value for _, value in picture.held) or 1.0)
        now, after = picture.status.moments[-1], phrases.seconds(picture.held[-1][0])
        text = f"{now.running:g} of {now.held:g} held after {after}"
        drawn.append((f"{say.unit(picture.status)} in use", picture.used, bounds, text))
    if not drawn:
        return
    names = [name for name, *_ in drawn]
    wide = plot_width(width, names, _VALUES_WIDTH)
    for name, points, limits, text in drawn:
        shown = sparkline(points, wide, levels, limits).ljust(wide)
        yield f"  {name.ljust(max(map(len, names)))}  {shown}  {text}"


def _running(picture: SearchPicture, most: int) -> Iterable[str]:
    rows = [
        (
            str(trial.number),
            trial.host,
            say.gpus(trial.gpu),
            "" if trial.step is None else str(trial.step),
            say.measure(trial),
            "" if ran is None else phrases.seconds(ran),
            say.shorten_params(trial.params),
        )
        for trial, ran in zip(picture.running[:most], picture.seconds, strict=False)
    ]
    if not rows:
        return
    rows = [_RUNNING_HEADERS, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Columns without content have no header.
    kept = [number for number, column in enumerate(zip(*rows[1:], strict=True)) if any(column)]
    for row in rows:
        yield f"  {'  '.join(row[number].ljust(widths[number]) for number in kept).rstrip()}"
    if omitted := len(picture.status.running) - len(rows) + 1:
        yield f"  and {omitted:,} more running"
