"""The output of a notebook's cell, updated in place, and the display of a run in it."""

from __future__ import annotations

import contextvars
import importlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from hopsgpu.core import html
from hopsgpu.core.html import Html
from hopsgpu.display import phrases
from hopsgpu.display.cards import world_bars, worlds
from hopsgpu.display.charts import SHARES, bars_image, lines_image
from hopsgpu.display.phrases import NOT_TRAINING
from hopsgpu.display.picture import SHOWN_RANKS, LogTail, Picture, Row
from hopsgpu.display.run_facts import NOW, RunView
from hopsgpu.display.subjects import status_view

# A fixed width, whatever the values are: plots that move four times a second are unreadable.
_PLOT = "display:inline-block;width:204px;margin:4px 20px 4px 0;vertical-align:top"
_LINE = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis"
# A long name is cut; its value is not.
_NAMED = "display:flex;gap:6px;white-space:nowrap"
_SCALE = "display:flex;justify-content:space-between;width:200px;font-size:11px;opacity:.7"
_MARKS = dict.fromkeys(("succeeded", "held", "released"), "✔") | {"failed": "✘", "cancelled": "⊘"}
# Ranks of the largest gang that has a row for each; a larger gang has bars of all GPUs.
_ALL_RANKS = 16
# Visible on light and on dark backgrounds.
_COLOURS = {"✔": "#16a34a", "✘": "#ef4444", "⊘": "#d97706", "▶": "#3b82f6"}


P = TypeVar("P")


class Cell(Generic[P]):
    """Shows pictures in a cell, from any thread.

    Args:
        context: context of the thread that runs the cell, by which the kernel identifies the cell.
        summary: returns a picture in one line, for viewers without HTML.
    """

    def __init__(
        self,
        context: contextvars.Context,
        page: Callable[[P, str], Html],
        summary: Callable[[P], str],
    ) -> None:
        self._page = page
        self._summary = summary
        self._display: Any = importlib.import_module("IPython.display").display
        self._context = context
        self._id = uuid.uuid4().hex
        self._is_there = False

    def show(self, picture: P) -> None:
        page = str(self._page(picture, self._id))
        content = {"text/html": page, "text/plain": self._summary(picture)}
        options: dict[str, Any] = {"raw": True, "display_id": self._id, "update": self._is_there}
        self._context.run(self._display, content, **options)
        self._is_there = True

    def end(self, picture: P) -> None:
        self.show(picture)

    def close(self) -> None:
        """Do nothing: the cell has nothing to release."""


def summary(picture: Picture) -> str:
    """Return a picture in one line, for viewers without HTML."""
    view = status_view(picture.status, picture.elapsed)
    state, elapsed, *facts = view.headline
    details, between = view.details
    plots = (f"{plot.name} {phrases.metric_summary(plot)}" for plot in picture.plots)
    more = (*view.results, view.phrase(NOT_TRAINING))
    texts = [state, *facts, view.phrase(NOW), between.join(details), *more, *plots]
    return f"hopsgpu {view.run_id} {elapsed}: {'; '.join(text for text in texts if text)}"


def page(picture: Picture, key: str) -> Html:
    """Return a picture as HTML.

    Args:
        key: key of the display, letters and digits; it keeps unfolded parts unfolded.
    """
    return html.box(
        *heading(status_view(picture.status, picture.elapsed)),
        *_worlds(picture),
        _plots(picture),
        _ranks(picture),
        *_logs(picture, key),
    )


def _worlds(picture: Picture) -> Iterable[Html]:
    """Return the worlds of an elastic gang: bars over time, and at the end a table."""
    status = picture.status
    if picture.has_ended:
        return worlds(status.worlds, status.timeline)
    if not status.worlds:
        return []
    bars = world_bars(status.worlds, status.timeline, picture.elapsed)
    return [html.element("div", bars)]


def heading(view: RunView) -> Iterable[Html]:
    """Return the first lines of a live display."""
    mark = _MARKS.get(view.state, "▶")
    sign = html.element("span", mark, style=f"color:{_COLOURS[mark]}")
    state, *facts = view.headline
    details, between = view.details
    text = " · ".join(facts)
    kind = Html(sign + html.escape(f" {view.run_id}"))
    yield html.title(kind, state, f"· {text}" if text else "")
    if view.phrase(NOW):
        yield html.element("div", view.phrase(NOW))
    if details:
        style = {"style": "font-size:12px;opacity:.7"} if view.phrase(NOW) else {}
        yield html.element("div", between.join(details), **style)
    for line in (*view.results, view.phrase(NOT_TRAINING)):
        if line:
            yield html.element("div", line)


def _plots(picture: Picture) -> Html:
    if not picture.plots:
        return Html("")
    cells = []
    for plot in picture.plots:
        summary = phrases.metric_summary(plot)
        drawn = lines_image(plot.traces, 200, 36, span=plot.steps)
        image = html.image(drawn, 200, 36, f"{plot.name} {summary}")
        below = (phrases.plot_bounds(plot), phrases.rank_bounds(plot))
        cells.append(plot_html(plot.name, f"{plot.value:.4g}", image, phrases.scale(plot), *below))
    return html.element("div", *cells)


def plot_html(name: str, value: str, image: Html, scale: tuple[str, str], *below: str) -> Html:
    """Return a small plot with its name and the last value above it.

    Args:
        scale: labels of its left and right ends.
        below: more lines, with the range of the values.
    """
    named = html.element("span", name, style=_LINE)
    above = html.element("div", named, " ", html.bold(value), style=_NAMED)
    # An empty line keeps its space, so that the lines below do not jump.
    under = (
        html.element("div", line or Html("&nbsp;"), style=f"{_LINE};opacity:.7") for line in below
    )
    ends = html.element("div", *(html.element("span", end) for end in scale), style=_SCALE)
    return html.element("div", above, image, ends, *under, style=_PLOT)


def _ranks(picture: Picture) -> Html:
    # Without reports, the table would have only empty cells.
    if not phrases.has_rank_facts(picture.rows):
        return Html("")
    has_gpus = any(row.gpu is not None for row in picture.rows)
    has_steps = any(row.step is not None for row in picture.rows)
    headers = ["rank", "host", *(["step"] if has_steps else [])]
    gpu_headers = ["GPU use", "GPU memory", "GPU use, 0 to 100 % over time"]
    headers += [*(gpu_headers if has_gpus else []), "ended"]
    most = SHOWN_RANKS if picture.ranks > _ALL_RANKS else _ALL_RANKS
    rows = [_rank(row, has_gpus, has_steps) for row in picture.rows[:most]]
    more = phrases.remaining_ranks(picture, len(rows))
    strip = Html("")
    if more and picture.utilisations:
        strip = html.image(bars_image(picture.utilisations, 400, 28), 400, 28, more)
    return Html(html.table(headers, rows) + html.element("div", more) + strip)


def _rank(row: Row, has_gpus: bool, has_steps: bool) -> list[object]:
    busy, memory = phrases.use(row.gpu)
    trace = Html("")
    if row.trace:
        trace = html.image(lines_image([row.trace], 90, 14, SHARES), 90, 14, f"GPU of {row.rank}")
    cells: list[object] = [row.rank, row.host]
    if has_steps:
        cells.append("" if row.step is None else f"{row.step:g}")
    return [*cells, *([busy, memory, trace] if has_gpus else []), row.ended]


def _logs(picture: Picture, key: str) -> Iterable[Html]:
    if not picture.recent.total:
        return
    logs = picture.logs if picture.ranks <= len(picture.logs) else (picture.recent, *picture.logs)
    for log in logs:
        name = "log of all ranks" if log.rank is None else f"log of rank {log.rank} on {log.host}"
        yield folded_log(log, name, f"{key}-{'all' if log.rank is None else log.rank}")
    yield html.element("div", phrases.whole_log(picture.status.run_id), style="opacity:.7")


def folded_logs(recent: LogTail, name: str, key: str, where: str) -> Iterable[Html]:
    """Return the last lines of all writers, and where the whole logs are; nothing without lines."""
    if recent.total:
        yield folded_log(recent, name, f"{key}-all")
        yield html.element("div", where, style="opacity:.7")


def folded_log(log: LogTail, name: str, key: str) -> Html:
    """Return the last lines, folded; a key of letters, digits and "-" keeps them unfolded."""
    omitted = log.total - len(log.lines)
    last = f"; the last {len(log.lines)}" if omitted else ""
    title = f"{name} ({log.total:,} line{'s' if log.total > 1 else ''}{last})"
    # An update replaces the element, so the page keeps whether it was open.
    note = f"(window.hopsgpuOpen=window.hopsgpuOpen||{{}})['{key}']=this.open"
    # The press of the mouse button folds: a click is lost if an update comes before the release.
    # Clicks by keyboard have detail 0, and keep their default action.
    press = f"if(event.button==0&&event.target.closest('summary')){{this.open=!this.open;{note}}}"
    click = "if(event.detail&&event.target.closest('summary'))event.preventDefault()"
    # All elements with the id, because JupyterLab can show an output in two views.
    again = (
        f"<script>if((window.hopsgpuOpen||{{}})['{key}'])"
        f"document.querySelectorAll('[id=\"{key}\"]').forEach(e=>e.open=true)</script>"
    )
    lines = html.pre("\n".join(log.lines))
    return Html(
        html.collapsible(title, lines, id=key, ontoggle=note, onmousedown=press, onclick=click)
        + again
    )
