"""The HTML cards of a run and of its result in a notebook, with parts that other cards share."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from hopsgpu.core import html
from hopsgpu.core.html import Html
from hopsgpu.core.run_values import GpuSeconds, RankReport, RunOutcome, RunStatus, Timeline
from hopsgpu.display.phrases import gang, phase_durations, seconds, state, uuid
from hopsgpu.display.picture import how_ended

_MOST_METRICS = 8
_MOST_WARNINGS = 20
# "ended" comes first: a narrow page cuts off the last columns.
_REPORTED = ("ended", "host", "GPU use", "host memory", "GPUs")
_GIB = 2**30


def run_card(status: RunStatus) -> str:
    """Return a card of a run's current state."""
    reported = status.metrics[0] if status.metrics else {}
    pairs: dict[str, object] = {
        "state": html.bold(state(status.state)),
        "for": seconds(status.elapsed),
        "gang": gang(status),
        "waiting for": status.waiting_for,
        "attempt": status.attempt or "",
        "rank 0": _metrics(reported),
    }
    return html.box(html.title("Run", status.run_id), html.facts(known_facts(pairs)))


def result_card(result: RunOutcome) -> str:
    """Return a card of a run's result, with each rank's value."""
    pairs: dict[str, object] = {
        "model": "" if result.model is None else result.model.url,
        "time": timeline(result.timeline),
        "GPU seconds": gpu_seconds(result.gpu_seconds),
    }
    return html.box(
        html.title("GangResult", result.run_id),
        html.facts(known_facts(pairs)),
        *warning_lines(result.warnings),
        html.table(("rank", "value", "last reported", *_REPORTED), _rows(result)),
    )


def _rows(result: RunOutcome) -> Iterable[list[object]]:
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
        html.element("span", "\n".join(map(uuid, report.gpus)), style="white-space:nowrap"),
    ]


def _metrics(reported: Mapping[str, float]) -> str:
    known_facts = [f"{n} {v:.4g}" for n, v in reported.items() if not n.startswith("gpu.")]
    more = " …" if len(known_facts) > _MOST_METRICS else ""
    return ", ".join(known_facts[:_MOST_METRICS]) + more


def warning_lines(warnings: Sequence[str]) -> Iterable[Html]:
    """Return warnings, one per line; only the first of many."""
    for warning in warnings[:_MOST_WARNINGS]:
        # Only the sign is coloured: no colour of text is legible on light and dark backgrounds.
        sign = html.element("span", "⚠ ", style="color:#d97706")
        yield html.element("div", sign, warning)


def timeline(passed: Timeline) -> str:
    """Return the duration of each phase."""
    return " · ".join(phase_durations(passed))


def gpu_seconds(spent: GpuSeconds) -> str:
    """Return how the GPU seconds were spent."""
    return " · ".join(f"{f.name} {getattr(spent, f.name):.1f}" for f in fields(spent))


def known_facts(pairs: Mapping[str, object]) -> dict[str, object]:
    """Return the facts that have a value."""
    return {name: value for name, value in pairs.items() if value != ""}
