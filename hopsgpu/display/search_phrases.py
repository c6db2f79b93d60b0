"""The phrases about a search that plain lines, cell, terminal and page share."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hopsgpu.core.gang import GangState
from hopsgpu.core.html import plain_line
from hopsgpu.core.trials import (
    COMPLETE,
    FAILED,
    PRUNED,
    Best,
    SearchStatus,
    TrialReport,
    Writer,
)
from hopsgpu.display.phrases import (
    ReportSchedule,
    WaitDetails,
    held_executors,
    not_training,
    seconds,
    state,
    uuid,
)
from hopsgpu.units import count_of

_LONGEST = 80
_LONGEST_VALUE = 24
_LONGEST_ERROR = 200
_MAX_PARAMS = 12
_MAX_GPUS = 2
_TRACEBACK = "Traceback (most recent call last)"
_LOG = "whole log: "
_PLACE = re.compile(r"( on \S+)? \(container [^)]*\)")
WHOLE_LOGS = "whole logs: `log` of each of the result's trials"


def number(value: object) -> str:
    """Return a short form of a parameter or metric; the start of a text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    # An empty text would be invisible, for example the name of `ablate`'s whole.
    return plain_line(str(value), _LONGEST_VALUE) or "''"


def shorten_params(params: Mapping[str, Any], longest: int = _LONGEST) -> str:
    """Return the first parameters with their values."""
    some = itertools.islice(params.items(), _MAX_PARAMS)
    text = ", ".join(f"{plain_line(str(name), _LONGEST_VALUE)}={number(v)}" for name, v in some)
    return plain_line(text if len(params) <= _MAX_PARAMS else f"{text}, …", longest)


def gpus(uuids: str) -> str:
    listed = uuids.split(",") if uuids else []
    if len(listed) > _MAX_GPUS:
        return f"{len(listed)} GPUs"
    return ", ".join(map(uuid, listed))


def why(trial: TrialReport) -> str:
    """Return why a trial failed, in one line: the end of the traceback, or which rank and how."""
    lines = [line for line in trial.error.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(_LOG)]
    if not lines:
        return ""
    has_traceback = any(line.startswith(_TRACEBACK) for line in lines)
    # Tables have the node and the GPU in columns of their own.
    line = _PLACE.sub("", lines[-1 if has_traceback else 0].strip())
    return plain_line(line, _LONGEST_ERROR)


def measure(trial: TrialReport) -> str:
    if trial.state == FAILED:
        return why(trial)
    value = "" if trial.value is None else number(float(trial.value))
    at = f" at step {trial.step}" if trial.state == PRUNED and trial.step is not None else ""
    return f"{value}{at}"


def end_of(trial: TrialReport, best: Best | None) -> str:
    is_best = best is not None and best.number == trial.number
    value = measure(trial)
    begin = f"trial {trial.number} {trial.state}{f': {value}' if value else ''}"
    took = "" if trial.duration is None else seconds(trial.duration)
    at = " ".join(part for part in (plain_line(trial.host, 60), gpus(trial.gpu)) if part)
    place = " on ".join(part for part in (took, at) if part)
    parts = [f"{begin}{' (best so far)' if is_best else ''}", shorten_params(trial.params), place]
    return ", ".join(part for part in parts if part)


def count_phrase(wanted: int, states: Mapping[str, int]) -> str:
    counts = [f"{states.get(name, 0):,} {name}" for name in (COMPLETE, PRUNED, FAILED)]
    count = sum(states.get(name, 0) for name in (COMPLETE, PRUNED, FAILED))
    shown = ", ".join(part for part in counts if not part.startswith("0 "))
    of = (
        f"{count:,} of {wanted:,} trials"
        if count != wanted
        else f"{count:,} trial{'s' * (count != 1)}"
    )
    return f"{of}: {shown}" if shown else of


def states_of(status: SearchStatus) -> Mapping[str, int]:
    return {COMPLETE: status.complete, PRUNED: status.pruned, FAILED: status.failed}


def held_gpus(status: SearchStatus) -> str:
    """Return how many of the allowed GPUs, or executors, are here; "" if that says nothing."""
    if not status.most or GangState(status.state).is_terminal:
        return ""
    if not status.gpus:
        return held_executors(status)
    return (
        f"{status.executors * status.gpus} of at most {count_of(status.most * status.gpus, 'GPU')}"
    )


def unit(status: SearchStatus) -> str:
    return "GPUs" if status.gpus else "executors"


def best_phrase(best: Best, metric: str | None) -> str:
    name = f"{plain_line(metric, 40)} " if metric else ""
    return f"{name}{best.value:.6g} (trial {best.number})"


def summary(status: SearchStatus) -> str:
    counts = count_phrase(status.wanted, states_of(status))
    best = "" if status.best is None else f"best {best_phrase(status.best, status.metric)}"
    if GangState(status.state).is_terminal or status.state == "releasing":
        parts = [f"{status.state}: {counts}", best]
    elif status.state == "running":
        running = f"{len(status.running)} running on {held_executors(status)}"
        parts = [counts, running, best, status.waiting_for]
    else:
        executors = held_executors(status) if status.most and status.state == "waiting" else ""
        before = counts if status.ended else ""
        begin, *rest = [*filter(None, (status.waiting_for, executors, before)), ""]
        parts = [f"{state(status.state)}: {begin}", *rest]
    return "; ".join(part for part in parts if part).removesuffix(": ")


class SearchFormatter:
    """Reports a search in lines: ended trials, what it waits for, and its state every 10 s.

    Trials that ended before the first status are only counted.
    """

    def __init__(self) -> None:
        self._schedule = ReportSchedule()
        self._details = WaitDetails()
        self._ended: int | None = None
        self._reported: frozenset[int] = frozenset()
        self._workers = 1

    def news(self, status: SearchStatus, now: float) -> Iterable[str]:
        self._workers = status.workers
        lines = self._ends(status)
        if self._schedule.is_due(status.state, status.waiting_for, now):
            details = self._details.lines(status.waiting_details)
            lines += filter(None, [summary(status), *details, not_training(status)])
        return lines

    def _ends(self, status: SearchStatus) -> list[str]:
        news = [trial for trial in status.recent if trial.number not in self._reported]
        before, self._ended = self._ended, status.ended
        self._reported = frozenset(trial.number for trial in status.recent)
        if before is None:
            return []
        # More trials may have ended than a status can list.
        missed = status.ended - before - len(news)
        lines = [f"{count_of(missed, 'more trial')} ended"] if missed > 0 else []
        return lines + [end_of(trial, status.best) for trial in news]

    def label(self, writer: Writer, host: str) -> str:
        return label(writer, host, self._workers)


def label(writer: Writer, host: str, workers: int) -> str:
    rank = f" rank {writer.rank}" if workers > 1 or writer.rank else ""
    return f"trial {writer.trial}{rank} {host}"
