"""Runs as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hopsgpu.artifacts.runs import LOST, OTHER_SCHEMA
from hopsgpu.cli import trial_tables
from hopsgpu.cli.score_facts import score_facts
from hopsgpu.cli.tables import Fact, Layout, Row, headers
from hopsgpu.core.formats import duration, local_time, size
from hopsgpu.core.gpu_losses import largest_loss
from hopsgpu.display import phrases, record_phrases
from hopsgpu.units import count_of

if TYPE_CHECKING:
    from hopsgpu.artifacts.runs import RunRecord, StoredRun

_COLOURS = {"succeeded": "green", "failed": "red", "lost": "red"}
_COLOURS |= {"cancelled": "yellow", "unreadable": "red"}
LAYOUT = Layout(
    right=(
        *("TOOK", "RANKS", "GPUS", "RANK", "PID", "EXIT", "GPU-USE", "HOST-MEMORY"),
        *("TRIAL", "TRIES"),
    ),
    least={
        **{"RUN": 24, "NAME": 6, "MODEL": 10, "NODE": 10, "PARAMETERS": 20},
        **{"LAST REPORT": 16},
    },
    spared=("MODEL", "NAME", "RANKS", "TRIES", "TOOK", "PID", "ROLE"),
    cut_in_front=("RUN", "MODEL"),
)


def rows(runs: Sequence[StoredRun], now: float) -> list[Row]:
    """Return the list of runs.

    Args:
        runs: the runs, the newest first.
        now: seconds since the epoch.
    """
    return list(_rows(runs, now))


def _rows(runs: Sequence[StoredRun], now: float) -> Iterator[Row]:
    yield headers("RUN", "STATE", "NAME", "REQUESTED", "TOOK", "RANKS", "GPUS", "MODEL")
    for run in runs:
        state = run.state_at(now)
        first = [(run.run_id, ""), (state, _COLOURS.get(state, "bold"))]
        record = run.record
        if record is None:
            yield [*first, *[("-", "dim")] * 6]
            continue
        yield [
            *first,
            (record.name, ""),
            (local_time(record.timeline.get("requested")), ""),
            (duration(record.took(now)), ""),
            (record_phrases.world_sizes(record.content["spec"]), ""),
            (str(record.gpus), ""),
            (record_phrases.model(record.model), ""),
        ]
    others = [run for run in runs if run.kind == OTHER_SCHEMA]
    for run in runs:
        if run.problem and run not in others:
            yield [(f"{run.run_id}: {run.problem}", "red")]
    # The same of all of them.
    if others:
        more = f" (the same for {count_of(len(others) - 1, 'more run')})" if others[1:] else ""
        yield [(f"{others[0].run_id}: {others[0].problem}{more}", "red")]


def _worlds(content: Mapping[str, Any], requested: float | None) -> Iterator[Fact]:
    """Yield a line about each world of an elastic gang; nothing for other runs."""
    reports = record_phrases.worlds(content)
    for number, line in enumerate(phrases.world_lines(reports, requested, len(reports))):
        yield Fact("" if number else "worlds", line)


def _spent(content: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield what the GPUs did while they were held, and what most of their time was lost to."""
    if (seconds := record_phrases.gpu_seconds(content)) is not None:
        yield Fact("GPU seconds", ", ".join(phrases.spent(seconds)))
        if lost := largest_loss(seconds):
            yield Fact("largest loss", lost)


def run_facts(record: RunRecord, url: str, now: float) -> list[Row | Fact]:
    """Return all that people want to know about a run.

    Args:
        record: record of the run.
        url: URL of its directory.
        now: seconds since the epoch.
    """
    return list(_described(record, url, now))


def _described(record: RunRecord, url: str, now: float) -> Iterator[Row | Fact]:
    state = record.state_at(now)
    lost = f" (was {record.state})" if state != record.state else ""
    content = record.content
    requested = record.timeline.get("requested")
    facts = {
        "run": record.run_id,
        "state": f"{state}{lost}",
        "user": record.user,
        "application": str(content.get("application")),
        "queue": str(content.get("queue")),
        "requested": local_time(requested),
        "took": duration(record.took(now)),
        "attempt": str(record.attempt),
        "gang": record_phrases.gang(record),
        "model": record.model or "-",
        "directory": url,
        "environment": record_phrases.environment(content.get("environment")),
    }
    for name in _told_otherwise(content):
        del facts[name]
    if why := record_phrases.waiting_for(record, now):
        facts["waits for"] = why
    facts |= dict(record_phrases.data(content.get("data")))
    for name, text in facts.items():
        yield Fact(name, text, _COLOURS.get(state, "bold") if name == "state" else "")
    if record.error is not None:
        for number, line in enumerate(record.error.splitlines()):
            yield Fact("" if number else "error", line, "red")
    for warning in record_phrases.texts(content.get("warnings")):
        yield Fact("warning", warning, "yellow")
    yield from _worlds(content, requested)
    if lasted := phrases.phase_durations(record_phrases.timeline(record)):
        yield Fact("time", ", ".join(lasted))
    yield from _spent(content)
    if "search" in content or "score" in content:
        yield from _on_elastic_executors(record, now)
        return
    yield [("", "")]
    yield headers("RANK", "ROLE", "NODE", "PID", "EXIT", "GPU-USE", "HOST-MEMORY", "LAST REPORT")
    for rank in record.ranks:
        yield _rank(rank, record, now)


def _on_elastic_executors(record: RunRecord, now: float) -> Iterable[Row | Fact]:
    """Return the rows about a search's trials, or a score's parts."""
    content = record.content
    if "score" in content:
        return score_facts(content["score"], is_running=record.is_running(now))
    left = "" if record.is_running(now) else "stopped" if record.has_ended else LOST
    return trial_tables.search_facts(content["search"], left, now)


def _told_otherwise(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the facts of a gang that lines of a record's own tell better."""
    if "search" in content or "score" in content:
        return ("gang", "attempt")
    return ("attempt",) if "worlds" in content else ()


def _rank(rank: Any, record: RunRecord, now: float) -> Row:
    last = record_phrases.last_reported(record, rank["rank"])
    shown = ", ".join(f"{n}={v}" for n, v in record_phrases.reported(last))
    use, peak = rank.get("gpu_utilisation"), rank.get("peak_memory")
    return [
        (str(rank["rank"]), ""),
        (str(rank.get("role", "-")), ""),
        (rank["host"], ""),
        (str(rank.get("pid", "-")), ""),
        (record_phrases.rank_end(rank, record, now), ""),
        (f"{use:.0%}" if isinstance(use, float) else "-", ""),
        (size(peak).replace(" ", "") if isinstance(peak, int) else "-", ""),
        (shown or "-", ""),
    ]
