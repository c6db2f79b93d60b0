"""Runs as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hopsgpu.artifacts.runs import LOST, OTHER_SCHEMA
from hopsgpu.cli import trial_tables
from hopsgpu.cli.formats import duration, local_time, size
from hopsgpu.cli.tables import Fact, Layout, Row, headers
from hopsgpu.core.run_values import Timeline
from hopsgpu.display import phrases
from hopsgpu.units import counted

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
            (str(record.content["spec"]["workers"]), ""),
            (str(record.gpus), ""),
            (_model(record.model), ""),
        ]
    others = [run for run in runs if run.kind == OTHER_SCHEMA]
    for run in runs:
        if run.problem and run not in others:
            yield [(f"{run.run_id}: {run.problem}", "red")]
    # The same of all of them.
    if others:
        more = f" (the same for {counted(len(others) - 1, 'more run')})" if others[1:] else ""
        yield [(f"{others[0].run_id}: {others[0].problem}{more}", "red")]


def _model(url: str | None) -> str:
    """Return the name and number of a version from its URL."""
    return "-" if url is None else " ".join(url.rsplit("/", 2)[-2:])


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
        "gang": f"{counted(content['spec']['workers'], 'rank')}, {counted(record.gpus, 'GPU')}",
        "model": record.model or "-",
        "directory": url,
        "environment": _environment(content.get("environment")),
    }
    if "search" in content:  # its own lines tell better
        del facts["gang"], facts["attempt"]
    facts |= dict(_data(content.get("data")))
    for name, text in facts.items():
        yield Fact(name, text, _COLOURS.get(state, "bold") if name == "state" else "")
    if record.error is not None:
        for number, line in enumerate(record.error.splitlines()):
            yield Fact("" if number else "error", line, "red")
    for warning in _texts(content.get("warnings")):
        yield Fact("warning", warning, "yellow")
    known = {field.name for field in fields(Timeline)}
    passed = Timeline(**{name: at for name, at in record.timeline.items() if name in known})
    if lasted := phrases.phase_durations(passed):
        yield Fact("time", ", ".join(lasted))
    seconds = content.get("gpu_seconds")
    if isinstance(seconds, dict):
        spent = ", ".join(f"{name} {value:.1f}" for name, value in _numbers(seconds))
        yield Fact("GPU seconds", spent)
    if "search" in content:
        left = "" if record.goes_on(now) else "stopped" if record.has_ended else LOST
        yield from trial_tables.search_facts(content["search"], left, now)
        return
    yield [("", "")]
    yield headers("RANK", "ROLE", "NODE", "PID", "EXIT", "GPU-USE", "HOST-MEMORY", "LAST REPORT")
    for rank in record.ranks:
        yield _rank(rank, record, now)


def _rank(rank: Any, record: RunRecord, now: float) -> Row:
    metrics = record.content.get("metrics")
    number = rank["rank"]
    last = metrics[number] if isinstance(metrics, list) and number < len(metrics) else {}
    shown = ", ".join(f"{n}={v}" for n, v in _reported(last))
    if rank["ended"]:
        ended = str(rank.get("signal") or rank.get("exit_code"))
    elif record.has_ended:
        ended = "lost"
    else:  # of a lost run nobody knows
        ended = "runs" if record.goes_on(now) else "-"
    use, peak = rank.get("gpu_utilisation"), rank.get("peak_memory")
    return [
        (str(number), ""),
        (str(rank.get("role", "-")), ""),
        (rank["host"], ""),
        (str(rank.get("pid", "-")), ""),
        (ended, ""),
        (f"{use:.0%}" if isinstance(use, float) else "-", ""),
        (size(peak).replace(" ", "") if isinstance(peak, int) else "-", ""),
        (shown or "-", ""),
    ]


def _reported(last: Any) -> Iterator[tuple[str, str]]:
    """Yield what a rank reported last, without samples of its GPUs."""
    for name, value in last.items() if isinstance(last, dict) else ():
        if not name.startswith("gpu."):
            yield name, f"{value:.4g}" if isinstance(value, float) else str(value)


def _data(data: Any) -> Iterator[tuple[str, str]]:
    """Yield the data that the ranks read, one line each."""
    for name, facts in data.items() if isinstance(data, dict) else ():
        if isinstance(facts, dict) and isinstance(facts.get("bytes"), int):
            rows = counted(facts.get("rows", 0), "row")
            many = f"{rows}, {size(facts['bytes'])}"
            gone = "" if facts.get("kept") else ", removed at the end of the run"
            yield (
                (name if name == "data" else f"data {name}"),
                f"{many} of {facts.get('url')}{gone}",
            )


def _environment(environment: Any) -> str:
    if not isinstance(environment, dict):
        return "-"
    driver = environment.get("driver")
    host = f" on {driver['host']}" if isinstance(driver, dict) and "host" in driver else ""
    names = ("hopsgpu", "python", "spark", "hadoop")
    return ", ".join(f"{name} {environment.get(name, '-')}" for name in names) + host


def _texts(texts: Any) -> list[str]:
    return [str(text) for text in texts] if isinstance(texts, list) else []


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    return ((n, float(v)) for n, v in values.items() if isinstance(v, (int, float)))
