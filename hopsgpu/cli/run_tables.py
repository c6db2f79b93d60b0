"""Runs as tables for people."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence

from hopsgpu.artifacts.kept_files import KeptFile
from hopsgpu.cli.tables import Fact, Row, TableLayout, headers
from hopsgpu.core.formats import duration, local_time, size
from hopsgpu.core.run_record import OTHER_SCHEMA
from hopsgpu.core.trials import FAILED
from hopsgpu.display import phrases
from hopsgpu.display.run_comparison import RunComparison
from hopsgpu.display.run_facts import BAD, GOOD, PLAIN, STRONG, TONES, WARNING, RunFact
from hopsgpu.display.run_view import RecordView, RunSummary, SearchView
from hopsgpu.units import count_of

_STYLES = {GOOD: "green", BAD: "red", WARNING: "yellow", STRONG: "bold", PLAIN: ""}
_MAX_TRIALS = 50
_MINUTE = len("2026-11-22 12:16")
# An ID is typed and begins with the run's name, so it is not cut unless it is very long.
LIST_LAYOUT = TableLayout(
    right=("TOOK", "RANKS", "GPUS"),
    least={"RUN": 40, "REQUESTED": 12, "RESULT": 16},
    dropped_first=("RANKS", "REQUESTED", "GPUS", "TOOK"),
    cut_in_front=("REQUESTED",),
)
LAYOUT = TableLayout(
    right=("TOOK", "RANK", "PID", "GPU-USE", "HOST-MEMORY", "TRIAL", "TRIES"),
    least={"NODE": 10, "PARAMETERS": 20, "LAST REPORT": 16},
    dropped_first=("TRIES", "TOOK", "PID", "ROLE"),
)


FILES_LAYOUT = TableLayout(right=("SIZE", "RANK", "ATTEMPT"), least={"FILE": 20})


def file_rows(files: Mapping[str, KeptFile]) -> Iterator[Row | Fact]:
    """Yield the rows of `hopsgpu runs files`."""
    yield headers("FILE", "SIZE", "RANK", "ATTEMPT")
    for name, file in files.items():
        yield [
            (name, ""),
            (size(file.facts.bytes), ""),
            (str(file.rank), ""),
            (str(file.attempt), ""),
        ]


def run_rows(runs: Sequence[RunSummary]) -> Iterator[Row | Fact]:
    """Yield the rows of `hopsgpu runs`."""
    yield headers("RUN", "STATE", "REQUESTED", "TOOK", "RANKS", "GPUS", "RESULT")
    for run in runs:
        first = [(run.run_id, ""), (run.state, _STYLES[TONES.get(run.state, STRONG)])]
        if run.problem:
            yield [*first, *[("-", "dim")] * 5]
            continue
        cells = (
            *(local_time(run.requested)[:_MINUTE], duration(run.took), run.ranks),
            *(str(run.gpus), run.model or run.error or run.waiting_for or "-"),
        )
        yield [*first, *((cell, "") for cell in cells)]
    foreign = [run for run in runs if run.problem_kind == OTHER_SCHEMA]
    for run in runs:
        if run.problem and run not in foreign:
            yield [(f"{run.run_id}: {run.problem}", "red")]
    # Records of other versions have the same problem: one line is enough.
    if foreign:
        more = f" (the same for {count_of(len(foreign) - 1, 'more run')})" if foreign[1:] else ""
        yield [(f"{foreign[0].run_id}: {foreign[0].problem}{more}", "red")]


def run_facts(view: RecordView) -> Iterator[Row | Fact]:
    """Yield the rows of `hopsgpu runs show`."""
    yield from map(_fact, view.about)
    if view.failure is not None:
        for number, line in enumerate(view.failure.full_text.splitlines()):
            name = "" if number else view.failure.name
            yield Fact(name, line, _STYLES[view.failure.tone])
    for warning in view.warnings:
        yield Fact("warning", warning, "yellow")
    lines = phrases.world_lines(view.worlds, view.summary.requested, len(view.worlds))
    for number, line in enumerate(lines):
        yield Fact("" if number else "worlds", line)
    yield from map(_fact, view.costs)
    yield from map(_fact, view.progress)
    if view.search is not None:
        yield from _trials(view.search)
    elif view.score is not None:
        yield from (Fact("left out", part.place, "red") for part in view.score.failed)
    else:
        yield from _ranks(view)


def comparison_table(comparison: RunComparison) -> tuple[list[Row | Fact], TableLayout]:
    """Return the table of `hopsgpu runs compare`, and its layout.

    A letter stands for each run, because several IDs beside each other are wider than a terminal.
    """
    letters = string.ascii_uppercase[: len(comparison.run_ids)]
    rows: list[Row | Fact] = [
        [(f"{letter}  {run_id}", "")]
        for letter, run_id in zip(letters, comparison.run_ids, strict=True)
    ]
    rows += [[("", "")], headers("  FACT", *letters)]
    for group in comparison.groups:
        equal = f" ({group.equal} equal)" if group.equal else ""
        rows.append([(f"{group.name}{equal}", "bold")])
        for row in group.rows:
            mark, style = ("*", "yellow") if row.is_different else (" ", "")
            rows.append([(f"{mark} {row.name}", style), *((text, style) for text in row.texts)])
        if group.left_out:
            rows.append([(f"and {count_of(group.left_out, 'more difference')}", "dim")])
    return rows, TableLayout(least={"  FACT": 16, **dict.fromkeys(letters, 8)})


def _fact(fact: RunFact) -> Fact:
    if fact.name == phrases.NOT_TRAINING:
        # The name is too long for its column; the line continues the GPU seconds.
        return Fact("", fact.phrase)
    return Fact(fact.name, fact.text, _STYLES[fact.tone])


def _ranks(view: RecordView) -> Iterator[Row]:
    yield [("", "")]
    yield headers("RANK", "ROLE", "NODE", "PID", "ENDED", "GPU-USE", "HOST-MEMORY", "LAST REPORT")
    for rank in view.ranks:
        use = "-" if rank.gpu_use is None else f"{rank.gpu_use:.0%}"
        memory = "-" if rank.memory is None else size(rank.memory).replace(" ", "")
        first = (str(rank.rank), rank.role, rank.host, str(rank.pid))
        ended = (rank.ended, _STYLES[BAD if rank.is_bad else PLAIN])
        rest = (use, memory, rank.reported or "-")
        yield [*((cell, "") for cell in first), ended, *((cell, "") for cell in rest)]


def _trials(search: SearchView) -> Iterator[Row]:
    yield [("", "")]
    yield headers("TRIAL", "STATE", "VALUE", "TOOK", "TRIES", "NODE", "GPU", "PARAMETERS")
    in_order = sorted(search.trials, key=lambda trial: (trial.ended is None, trial.ended or 0.0))
    shown = in_order[-_MAX_TRIALS:]
    for trial in shown:
        rest = (
            *(trial.value or "-", trial.took, str(trial.tries)),
            *(trial.host or "-", trial.gpu or "-", trial.params),
        )
        style = _STYLES[TONES.get(trial.state, STRONG)]
        yield [(str(trial.number), ""), (trial.state, style), *((cell, "") for cell in rest)]
    for trial in shown:
        if trial.state == FAILED:
            yield [(f"trial {trial.number}: {trial.why}", "red")]
    if len(in_order) > len(shown):
        earlier = count_of(len(in_order) - len(shown), "trial")
        yield [(f"and {earlier} earlier; --json shows all", "dim")]
