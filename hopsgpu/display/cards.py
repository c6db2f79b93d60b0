"""The HTML cards of a run and of its result in a notebook, with parts that other cards share."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence

from hopsgpu.core import html
from hopsgpu.core.html import Html
from hopsgpu.core.run_values import RankReport, RunOutcome, RunStatus, Timeline, WorldReport
from hopsgpu.core.scores import ScoreOutcome
from hopsgpu.core.trials import SearchOutcome
from hopsgpu.display.charts import worlds_image
from hopsgpu.display.phrases import WORLD_HEADERS, uuid, world_cells
from hopsgpu.display.picture import how_ended
from hopsgpu.display.run_facts import RUN, RunView
from hopsgpu.display.subjects import result_view, status_view

_MAX_METRICS = 8
_MAX_WARNINGS = 20
# "ended" comes first: a narrow page cuts off the last columns.
_REPORTED = ("ended", "host", "GPU use", "host memory", "GPUs")
_GIB = 2**30
_MAX_BARS = 200
_WIDTH, _HEIGHT = 400, 64


def run_card(status: RunStatus) -> str:
    reported = _metrics(status.metrics[0]) if status.metrics else ""
    return html.box(
        html.title("Run", status.run_id),
        _facts(status_view(status, status.elapsed), {"rank 0": reported} if reported else {}),
        *worlds(status.worlds, status.timeline),
    )


def _facts(view: RunView, more: Mapping[str, str]) -> Html:
    return html.facts({**{f.name: f.text for f in view.facts if f.name != RUN}, **more})


def result_lines(kind: str, result: RunOutcome | SearchOutcome | ScoreOutcome) -> Iterable[Html]:
    """Return the first lines of a result's card: its facts and warnings; only the first of many."""
    view = result_view(result)
    yield html.title(kind, view.run_id)
    yield _facts(view, {})
    for warning in view.warnings[:_MAX_WARNINGS]:
        # Only the sign is coloured: no colour of text is legible on light and dark backgrounds.
        sign = html.element("span", "⚠ ", style="color:#d97706")
        yield html.element("div", sign, warning)


def result_card(result: RunOutcome) -> str:
    return html.box(
        *result_lines("GangResult", result),
        *worlds(result.worlds, result.timeline),
        html.table(("rank", "value", "last reported", *_REPORTED), _rows(result)),
    )


def score_card(result: ScoreOutcome) -> str:
    return html.box(*result_lines("ScoreResult", result))


def _rows(result: RunOutcome) -> Iterable[list[object]]:
    reports = {report.rank: report for report in result.ranks}
    count = max(len(result.values), len(result.metrics), *(rank + 1 for rank in reports), 0)
    for rank in range(count):
        value = reprlib.repr(result.values[rank]) if rank < len(result.values) else ""
        reported = result.metrics[rank] if rank < len(result.metrics) else {}
        yield [rank, value, _metrics(reported), *_report(reports.get(rank), result.failed_rank)]


def _report(report: RankReport | None, failed_rank: int | None) -> list[object]:
    if report is None:
        return ["" for _ in _REPORTED]
    busy, peak = report.gpu_utilisation, report.peak_memory
    ended = how_ended(report, failed_rank)
    return [
        f"{report.role}: {ended}" if report.role != "worker" else ended,
        report.host,
        "" if busy is None else f"{busy:.0%}",
        "" if peak is None else f"{peak / _GIB:.2f} GiB",
        html.element("span", "\n".join(map(uuid, report.gpus)), style="white-space:nowrap"),
    ]


def _metrics(reported: Mapping[str, float]) -> str:
    texts = [f"{n} {v:.4g}" for n, v in reported.items() if not n.startswith("gpu.")]
    more = " …" if len(texts) > _MAX_METRICS else ""
    return ", ".join(texts[:_MAX_METRICS]) + more


def worlds(reports: Sequence[WorldReport], passed: Timeline) -> Iterable[Html]:
    """Return the worlds of an elastic gang: bars over time, and a table; nothing without worlds."""
    if reports:
        yield html.element("div", world_bars(reports, passed))
        cells = [world_cells(world, passed.requested) for world in reports]
        yield html.table(WORLD_HEADERS, cells)


def world_bars(reports: Sequence[WorldReport], passed: Timeline, elapsed: float = 0.0) -> Html:
    """Return bars of the worlds over time, as high as their numbers of ranks.

    Args:
        elapsed: seconds since the run began, up to which a world that runs is drawn.
    """
    zero = reports[0].began if passed.requested is None else passed.requested
    # The end of a world that runs is unknown: its bar lasts until now.
    ends = [zero + elapsed, *(at for world in reports for at in (world.began, world.ended) if at)]
    last = max(*ends, passed.released or zero)
    bars = [
        (world.began - zero, (last if world.ended is None else world.ended) - zero, world.ranks)
        for world in reports
    ]
    words = ", ".join(f"{world.ranks}" for world in reports[-_MAX_BARS:])
    drawn = worlds_image(bars[-_MAX_BARS:], last - zero, _WIDTH, _HEIGHT)
    return html.image(drawn, _WIDTH, _HEIGHT, f"ranks of the worlds: {words}")
