"""The display of a search in a notebook's cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hopsgpu.core import html
from hopsgpu.core.html import Html
from hopsgpu.core.trials import TrialReport
from hopsgpu.display import phrases
from hopsgpu.display import search_phrases as say
from hopsgpu.display.cell import folded_logs, heading, plot_html
from hopsgpu.display.charts import lines_image
from hopsgpu.display.search_picture import SearchPicture
from hopsgpu.display.subjects import status_view

_WIDTH, _HEIGHT = 200, 36
_PARAMS = 60


def summary(picture: SearchPicture) -> str:
    text = say.summary(picture.status)
    return f"hopsgpu {picture.status.run_id} {picture.elapsed:.1f} s: {text}"


def page(picture: SearchPicture, key: str) -> Html:
    """Return a picture as HTML."""
    return html.box(
        *heading(status_view(picture.status, picture.elapsed)),
        _plots(picture),
        _running(picture),
        trials_table("ended last", picture.ended) if picture.ended else "",
        *folded_logs(picture.recent, "output of all trials", key, say.WHOLE_LOGS),
    )


def _plots(picture: SearchPicture) -> Html:
    status, plots = picture.status, []
    if picture.curve:
        name = f"best of {status.ended:,} trials"
        image = html.image(lines_image([picture.curve], _WIDTH, _HEIGHT), _WIDTH, _HEIGHT, name)
        first, last = picture.curve[0][1], picture.curve[-1][1]
        below = "" if first == last else f"{first:.4g} → {last:.4g}"
        scale = (f"trial {picture.curve[0][0]:,g}", f"{status.ended:,}")
        plots.append(plot_html(name, f"{last:.4g}", image, scale, below))
    if picture.held:
        what = say.unit(status)
        bounds = (0.0, max(value for _, value in picture.held) or 1.0)
        traces = [picture.used, picture.held]
        image = html.image(
            lines_image(traces, _WIDTH, _HEIGHT, bounds),
            *(_WIDTH, _HEIGHT, f"{what} in use, and held"),
        )
        now = picture.status.moments[-1]
        scale = ("0 s", phrases.seconds(picture.held[-1][0]))
        held = f"of {now.held:g} held; 0 … {bounds[1]:g}"
        plots.append(plot_html(f"{what} in use", f"{now.running:g}", image, scale, held))
    return html.element("div", *plots) if plots else Html("")


def _running(picture: SearchPicture) -> Html:
    if not picture.running:
        return Html("")
    headers = ["running", "host", "GPU", "parameters", "step", "last value", "for"]
    rows = [
        [
            trial.number,
            trial.host,
            say.gpus(trial.gpu),
            say.shorten_params(trial.params, _PARAMS),
            "" if trial.step is None else trial.step,
            say.measure(trial),
            "" if ran is None else phrases.seconds(ran),
        ]
        for trial, ran in zip(picture.running, picture.seconds, strict=True)
    ]
    omitted = len(picture.status.running) - len(rows)
    more = html.element("div", f"and {omitted:,} more running") if omitted else ""
    return Html(html.table(headers, rows) + html.escape(more))


def trials_table(first: str, trials: Iterable[TrialReport]) -> Html:
    headers = [first, "state", "value", "parameters", "took", "host", "GPU"]
    return html.table(headers, [row_of(trial, _PARAMS) for trial in trials])


def row_of(trial: TrialReport, params: int) -> Sequence[object]:
    """Return the row of an ended trial, with its parameters in at most `params` characters."""
    return (
        trial.number,
        trial.state,
        say.measure(trial),
        say.shorten_params(trial.params, params),
        "" if trial.duration is None else phrases.seconds(trial.duration),
        trial.host,
        say.gpus(trial.gpu),
    )
