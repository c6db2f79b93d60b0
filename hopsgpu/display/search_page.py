"""A search's result as a separate page for a browser."""

from __future__ import annotations

import base64
from collections.abc import Iterable

from hopsgpu.core import html
from hopsgpu.core.html import Html
from hopsgpu.core.trials import SearchOutcome
from hopsgpu.display.optuna_plots import OptunaPlot, optuna_plots
from hopsgpu.display.search_cards import summary
from hopsgpu.display.search_cell import row_of

_HEADERS = ("trial", "state", "value", "parameters", "time", "host", "GPU", "tries")
_PARAMS = 300
_STYLE = """
:root { color-scheme: light dark; }
body { font-family: system-ui, sans-serif; margin: 24px; }
h2 { font-size: 16px; margin: 24px 0 6px; }
figure { margin: 0 0 12px; }
figure img { max-width: 100%; background: #fff; border-radius: 4px; }
table.trials { border-collapse: collapse; font-size: 13px; }
.trials td, .trials th { text-align: left; padding: 1px 14px 1px 0; vertical-align: top; }
.trials th { opacity: .7; position: sticky; top: 0; background: Canvas; }
"""


def page(result: SearchOutcome) -> str:
    """Return a page with the result, its plots by Optuna and all trials; it loads nothing else."""
    body = html.element(
        "body",
        html.box(*summary(result)),
        *(_figure(plot) for plot in optuna_plots(result)),
        html.element("h2", "All trials"),
        html.element("table", *_rows(result), class_="trials"),
    )
    head = html.element(
        "head",
        Html('<meta charset="utf-8">'),
        html.element("title", f"hopsgpu {result.run_id}"),
        Html(f"<style>{_STYLE}</style>"),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'


def _figure(plot: OptunaPlot) -> Html:
    title = html.element("h2", plot.title)
    if not plot.svg:
        return Html(title + html.element("div", f"not drawn: {plot.missing}"))
    # As an image, so that ids of different plots do not clash, and no script in them runs.
    source = f"data:image/svg+xml;base64,{base64.b64encode(plot.svg).decode()}"
    image = Html(f'<img src="{source}" alt="{html.escape(plot.title)}">')
    return Html(title + html.element("figure", image))


def _rows(result: SearchOutcome) -> Iterable[Html]:
    yield html.element("tr", *(html.element("th", name) for name in _HEADERS))
    for trial in result.trials:
        cells = (*row_of(trial, _PARAMS), trial.tries)
        yield html.element("tr", *(html.element("td", cell) for cell in cells))
