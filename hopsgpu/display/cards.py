"""What a notebook shows of a run's handle and of its result."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import fields

from hopsgpu import html
from hopsgpu.display.picture import how_ended
from hopsgpu.display.words import gang, seconds
from hopsgpu.results import GangResult, GpuSeconds, RankReport, RunStatus, Timeline

_MOST_METRICS = 8
_MOST_WARNINGS = 20
# How it ended comes before what is cut off first where a page is narrow.
_REPORTED = ("ended", "host", "GPU use", "peak memory", "GPUs")
_GIB = 2**30


def run_card(status: RunStatus) -> str:
    """A run as it stands."""
    reported = status.metrics[0] if status.metrics else {}
    pairs: dict[str, object] = {
        "state": html.bold(status.state),
        "for": seconds(status.elapsed),
        "gang": gang(status),
        "waiting for": status.waiting_for,
        "attempt": status.attempt or "",
        "rank 0": _metrics(reported),
    }
    return html.box(html.title("Run", status.run_id), html.facts(_told(pairs)))


def result_card(result: GangResult) -> str:
    """A run's result, each rank with its value."""
    pairs: dict[str, object] = {
        "model": "" if result.model is None else result.model.url,
        "seconds": _timeline(result.timeline),
        "GPU seconds": _gpu_seconds(result.gpu_seconds),
    }
    parts: list[object] = [html.title("GangResult", result.run_id), html.facts(_told(pairs))]
    for warning in result.warnings[:_MOST_WARNINGS]:
        # Only the sign: no colour of text is read well on light and on dark paper.
        sign = html.element("span", "⚠ ", style="color:#d97706")
        parts.append(html.element("div", sign, warning))
    parts.append(html.table(("rank", "value", "last reported", *_REPORTED), _rows(result)))
    return html.box(*parts)


def _rows(result: GangResult) -> Iterable[list[object]]:
    reports = {report.rank: report for report in result.ranks}
    count = max(len(result.values), len(result.metrics), *(rank + 1 for rank in reports), 0)
    for rank in range(count):
        value = reprlib.repr(result.values[rank]) if rank < len(result.values) else ""
        reported = result.metrics[rank] if rank < len(result.metrics) else {}
        yield [rank, value, _metrics(reported), *_report(reports.get(rank))]


def _report(report: RankReport | None) -> list[object]:
    if report is None:
        return ["" for _ in _REPORTED]
    busy, peak = report.gpu_utilisation, report.peak_memory
    ended = how_ended(report)
    return [
        f"{report.role}: {ended}" if report.role != "worker" else ended,
        report.host,
        "" if busy is None else f"{busy:.0%}",
        "" if peak is None else f"{peak / _GIB:.2f} GiB",
        "\n".join(report.gpus),
    ]


def _metrics(reported: Mapping[str, float]) -> str:
    told = [f"{n} {v:.4g}" for n, v in reported.items() if not n.startswith("gpu.")]
    more = " …" if len(told) > _MOST_METRICS else ""
    return ", ".join(told[:_MOST_METRICS]) + more


def _timeline(timeline: Timeline) -> str:
    first = timeline.requested
    if first is None:
        return ""
    passed = ((f.name, getattr(timeline, f.name)) for f in fields(timeline))
    return " · ".join(f"{name} {at - first:.1f}" for name, at in passed if at is not None)


def _gpu_seconds(spent: GpuSeconds) -> str:
    return " · ".join(f"{f.name} {getattr(spent, f.name):.1f}" for f in fields(spent))


def _told(pairs: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in pairs.items() if value != ""}
