"""One run, one search and one score, as a page shows them: values from the record. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.artifacts.checkpoints import CheckpointShard, complete_shards, metric_shard
from hopsgpu.artifacts.run_logs import Log, log_of
from hopsgpu.artifacts.runs import RunRecord, StoredRun
from hopsgpu.artifacts.saving_ranks import SavingRank
from hopsgpu.core.formats import duration, local_time
from hopsgpu.core.gpu_losses import largest_loss
from hopsgpu.core.run_values import GpuSeconds, WorldReport
from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED, RUNNING, TrialReport
from hopsgpu.display import phrases, record_phrases, score_phrases, search_phrases
from hopsgpu.display.picture import RETURNED, Point
from hopsgpu.web.coordinates import Coordinates, coordinates, value_of
from hopsgpu.web.run_rows import RunRow, row_of

_TRACEBACK = "Traceback (most recent call last)"
_WHOLE_LOG = "whole log: "
# Ranks and trials that have rows of their own.
_MOST_RANKS = 256
_MOST_TRIALS = 200
_MOST_PARTS = 100
_LONGEST = 200
_MOST_STEPS = 100


@dataclass(frozen=True)
class Failure:
    """The error that ended a run.

    Attributes:
        traceback: the user's traceback; "" if there is none.
        words: the rest: which rank failed, where, and how.
        rank: the rank that failed first, or None.
    """

    traceback: str
    words: str
    rank: int | None = None


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    Attributes:
        name: "waited", "trained", ....
        seconds: how long it took.
        begin: where it begins, as a share in [0, 1] of the whole time.
        share: its share.
    """

    name: str
    seconds: float
    begin: float
    share: float


@dataclass(frozen=True)
class RankRow:
    """A rank.

    Attributes:
        rank: its number.
        role: "worker" or "ps".
        host: the node.
        gpus: UUIDs, abbreviated.
        ended: how it ended, or "runs".
        is_bad: whether it failed.
        gpu_use: mean utilisation in [0, 1]; or None.
        now_use: last sampled utilisation in [0, 1] of a rank that runs; or None.
        memory: peak bytes of the host's memory; or None.
        reported: last reported values.
        log: its log in the last attempt; or None.
    """

    rank: int
    role: str
    host: str
    gpus: str
    ended: str
    is_bad: bool
    gpu_use: float | None
    now_use: float | None
    memory: int | None
    reported: str
    log: Log | None


@dataclass(frozen=True)
class RunView:
    """One run.

    Attributes:
        row: as in a list.
        facts: names and values.
        failure: the error that ended it, or None.
        warnings: what a person should know.
        phases: its phases so far.
        waits: what it waited for, over time: pairs of seconds since the epoch and words.
        worlds: the worlds of an elastic gang.
        requested: when it began, in seconds since the epoch; or None.
        gpu_seconds: what the GPUs did while they were held, in words; empty if none were held.
        largest_loss: what most of their time was lost to, in words; "" for nothing.
        ranks: the first ranks.
        ranks_left_out: number of the others.
        logs: all logs that the record lists, with their bytes.
        model: name and version that it published; or None.
        search: the search; or None.
        score: the score; or None.
    """

    row: RunRow
    facts: tuple[tuple[str, str], ...]
    failure: Failure | None
    warnings: tuple[str, ...]
    phases: tuple[Phase, ...]
    waits: tuple[tuple[float, str], ...]
    worlds: tuple[WorldReport, ...]
    requested: float | None
    gpu_seconds: tuple[str, ...]
    largest_loss: str
    ranks: tuple[RankRow, ...]
    ranks_left_out: int
    logs: tuple[tuple[Log, int], ...]
    model: tuple[str, str] | None
    search: SearchView | None
    score: ScoreView | None


def run_view(root: str, record: RunRecord, url: str, now: float) -> RunView:
    """Return the page of a run.

    Args:
        root: key of the root that it is below.
        record: its record.
        url: URL of its directory.
        now: seconds since the epoch.

    Raises:
        JSON_ERRORS: the record has fields of another form than this version knows.
    """
    logs = {log: size for name, size in record.logs.items() if (log := log_of(name))}
    search, scored = record.content.get("search"), record.content.get("score")
    seconds = record_phrases.gpu_seconds(record.content) or GpuSeconds()
    ranks = list(itertools.islice(_ranks(record, logs, now), _MOST_RANKS))
    return RunView(
        row=row_of(root, StoredRun(record.run_id, record), now),
        facts=tuple(_facts(record, url)),
        failure=None if record.error is None else failure_of(record.error),
        warnings=tuple(record_phrases.texts(record.content.get("warnings"))),
        phases=tuple(_phases(record, now)),
        waits=tuple(_waits(record.content.get("waits"))),
        worlds=tuple(record_phrases.worlds(record.content)),
        requested=record.timeline.get("requested"),
        gpu_seconds=tuple(phrases.spent(seconds)) if seconds.held else (),
        largest_loss=largest_loss(seconds),
        ranks=tuple(ranks),
        ranks_left_out=len(record.ranks) - len(ranks),
        logs=tuple(sorted(logs.items())),
        model=_model(record.model),
        search=None if search is None else search_view(search, record, now),
        score=None if scored is None else score_view(scored, record, now),
    )


def failure_of(error: str) -> Failure:
    """Return an error with the user's traceback apart from the other words."""
    lines = error.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith(_TRACEBACK)), None)
    ends = (n for n, line in enumerate(lines) if line.startswith(_WHOLE_LOG))
    last = next((n for n in ends if first is not None and n > first), len(lines))
    words = lines if first is None else lines[:first] + lines[last:]
    found = words[0].split(" ", 2) if words else []
    named = len(found) > 1 and found[0] == "rank" and found[1].isdecimal() and len(found[1]) < 10
    return Failure(
        "" if first is None else "\n".join(lines[first:last]),
        "\n".join(words),
        int(found[1]) if named else None,
    )


def _model(url: str | None) -> tuple[str, str] | None:
    parts = (url or "").rsplit("/", 2)
    return (parts[1], parts[2]) if len(parts) == 3 else None


def _facts(record: RunRecord, url: str) -> Iterator[tuple[str, str]]:
    content = record.content
    facts = {
        "user": record.user,
        "application": str(content.get("application") or "-"),
        "queue": str(content.get("queue") or "-"),
        "requested": local_time(record.timeline.get("requested")),
        "gang": record_phrases.gang(record),
        "attempt": str(record.attempt),
        "directory": url,
        "environment": record_phrases.environment(content.get("environment")),
    }
    if "search" in content or "score" in content:
        del facts["gang"]
    if "search" in content or "score" in content or "worlds" in content:
        del facts["attempt"]
    yield from facts.items()
    yield from record_phrases.data(content.get("data"))


def _phases(record: RunRecord, now: float) -> Iterator[Phase]:
    """Yield the phases that have ended, and the present one of a run that goes on."""
    phases = list(record_phrases.timeline(record).phases())
    took = record.took(now)
    passed = sum(seconds for _, seconds in phases)
    if record.is_running(now) and took is not None and took > passed:
        phases.append((f"{phrases.state(record.state)} now", took - passed))
    whole = sum(seconds for _, seconds in phases)
    begin = 0.0
    for name, seconds in phases:
        share = seconds / whole if whole else 0.0
        yield Phase(name, seconds, begin, share)
        begin += share


def _waits(listed: Any) -> Iterator[tuple[float, str]]:
    for wait in listed if isinstance(listed, list) else ():
        yield float(wait["time"]), str(wait["why"])


def _ranks(record: RunRecord, logs: Mapping[Log, int], now: float) -> Iterator[RankRow]:
    for rank in record.ranks:
        number = rank["rank"]
        last = record_phrases.last_reported(record, number)
        sampled = [v for n, v in last.items() if _is_utilisation(n) and isinstance(v, (int, float))]
        ended = record_phrases.rank_end(rank, record, now)
        use, peak, log = rank.get("gpu_utilisation"), rank.get("peak_memory"), _log(logs, number)
        yield RankRow(
            rank=number,
            role=str(rank.get("role", "-")),
            host=rank["host"],
            gpus=", ".join(phrases.uuid(str(gpu)) for gpu in rank.get("gpus") or ()),
            ended=_ended(rank, ended),
            is_bad=bool(rank["ended"]) and ended != "0" and not rank.get("stopped"),
            gpu_use=float(use) if isinstance(use, (int, float)) else None,
            now_use=sum(sampled) / len(sampled) if sampled and not rank["ended"] else None,
            memory=peak if isinstance(peak, int) else None,
            reported=", ".join(f"{n} {v}" for n, v in record_phrases.reported(last)),
            log=log,
        )


def _ended(rank: Mapping[str, Any], ended: str) -> str:
    if rank.get("stopped"):
        return "stopped"
    return RETURNED if ended == "0" else f"exit code {ended}" if ended.isdecimal() else ended


def _is_utilisation(name: str) -> bool:
    return name.startswith("gpu.") and name.endswith(".utilisation")


def _log(logs: Mapping[Log, int], rank: int) -> Log | None:
    """Return the log of a rank's last attempt."""
    return max((log for log in logs if log.rank == rank), default=None)


@dataclass(frozen=True)
class CheckpointRow:
    """A step that was saved.

    Attributes:
        step: the step.
        is_complete: whether all ranks that save have saved it.
        ranks: number of ranks that have.
        metric: the metric that it was saved with; or None.
    """

    step: int
    is_complete: bool
    ranks: int
    metric: float | None


def checkpoint_rows(
    shards: Mapping[int, frozenset[CheckpointShard]], announced: frozenset[SavingRank]
) -> Sequence[CheckpointRow]:
    """Return the latest steps of a run's checkpoints, the latest first.

    Args:
        shards: the complete shards by step.
        announced: the ranks that announced that they save.
    """
    whole = complete_shards(shards, announced)
    rows = []
    for step in sorted(shards, reverse=True)[:_MOST_STEPS]:
        there = whole.get(step) or shards[step]
        metric = metric_shard(there).metric if there else None
        rows.append(CheckpointRow(step, step in whole, len({p.rank for p in there}), metric))
    return rows


@dataclass(frozen=True)
class TrialRow:
    """A trial.

    Attributes:
        number: its number.
        state: its state; that of the search if it was interrupted.
        value: its metric in words, or "".
        took: how long it took or has run, in words.
        tries: how often it was started.
        host: hosts of its ranks.
        gpu: GPUs of its ranks.
        params: its parameters.
        why: why it failed, or "".
        is_best: whether it is the best one.
    """

    number: int
    state: str
    value: str
    took: str
    tries: int
    host: str
    gpu: str
    params: str
    why: str
    is_best: bool


@dataclass(frozen=True)
class SearchView:
    """A search.

    Attributes:
        goal: what it optimises, and how.
        counts: how many trials ended how.
        best: the best trial so far in words; "" if none is complete.
        trials: those that run, then the best ones, then those that ended last without a value.
        left_out: number of other trials.
        curve: best value so far by the number of ended trials.
        coordinates: parallel coordinates of the complete trials.
        problem: why the trials cannot be read, or "".
    """

    goal: str
    counts: str = ""
    best: str = ""
    trials: tuple[TrialRow, ...] = ()
    left_out: int = 0
    curve: tuple[Point, ...] = ()
    coordinates: Coordinates = Coordinates((), ())
    problem: str = ""


def search_view(search: Any, record: RunRecord, now: float) -> SearchView:
    """Return the part of a page that only a search has.

    Args:
        search: `search` of the record.
        record: the record.
        now: seconds since the epoch.
    """
    minimize = search["direction"] == "minimize"
    metric = str(search["metric"] or "value")
    goal = f"{search['direction']} {metric}, by {search['sampler']} and {search['pruner']}"
    trials = [TrialReport(**fields) for fields in search["trials"]]
    states = Counter(trial.state for trial in trials)
    best = search["best"] or {}
    ended = sorted((t for t in trials if t.state != RUNNING), key=lambda t: t.ended or 0.0)
    left = "" if record.is_running(now) else "stopped" if record.has_ended else "lost"
    rows = _in_order(trials, ended, minimize=minimize)
    return SearchView(
        goal=goal,
        counts=search_phrases.count_phrase(int(search["trials_wanted"]), states),
        best=(
            f"{search_phrases.number(best['value'])} in trial {best['number']}:"
            f" {search_phrases.shortened(best['params'], _LONGEST)}"
            if best
            else ""
        ),
        trials=tuple(_trial(t, best.get("number"), left, now) for t in rows[:_MOST_TRIALS]),
        left_out=max(len(rows) - _MOST_TRIALS, 0),
        curve=tuple(_curve(ended, minimize=minimize)),
        coordinates=coordinates(trials, metric, minimize=minimize),
    )


@dataclass(frozen=True)
class FailedPartRow:
    """Rows that a score left out.

    Attributes:
        place: which rows, and where they are.
        tries: how often they were tried.
        why: the last line of the last error.
    """

    place: str
    tries: int
    why: str


@dataclass(frozen=True)
class ScoreView:
    """A score.

    Attributes:
        facts: names and values.
        share: share of the rows that are on the lake, in [0, 1].
        failed: the first parts that were left out.
        left_out: number of other such parts.
    """

    facts: tuple[tuple[str, str], ...]
    share: float
    failed: tuple[FailedPartRow, ...] = ()
    left_out: int = 0


def score_view(scored: Any, record: RunRecord, now: float) -> ScoreView:
    """Return the part of a page that only a score has.

    Args:
        scored: `score` of the record.
        record: the record.
        now: seconds since the epoch.
    """
    failed = [
        FailedPartRow(str(part["place"]), int(part["tries"]), _last_line(str(part["error"])))
        for part in scored["failed_parts"][:_MOST_PARTS]
    ]
    rows = int(scored["rows"])
    return ScoreView(
        facts=tuple(score_phrases.recorded(scored, is_running=record.is_running(now))),
        share=min(int(scored["scored"]) / rows, 1.0) if rows > 0 else 0.0,
        failed=tuple(failed),
        left_out=len(scored["failed_parts"]) - len(failed),
    )


def _last_line(error: str) -> str:
    """Return the line that names the exception: that before the place of the whole log."""
    lines = [line for line in error.splitlines() if line.strip()]
    first = next((n for n, line in enumerate(lines) if line.startswith(_TRACEBACK)), 0)
    ends = (n for n, line in enumerate(lines) if n > first and not line.startswith(" "))
    return lines[next(ends, 0)][:_LONGEST] if lines else ""


def _in_order(
    trials: Sequence[TrialReport], ended: Sequence[TrialReport], *, minimize: bool
) -> list[TrialReport]:
    sign = 1.0 if minimize else -1.0
    running = [trial for trial in trials if trial.state == RUNNING]
    valued = [trial for trial in ended if trial.state == COMPLETE and value_of(trial) is not None]
    valued.sort(key=lambda trial: (sign * (value_of(trial) or 0.0), trial.number))
    done = {trial.number for trial in valued}
    return [*running, *valued, *(t for t in reversed(ended) if t.number not in done)]


def _trial(trial: TrialReport, best: object, left: str, now: float) -> TrialRow:
    took = trial.duration
    if trial.state == RUNNING and not left and trial.started is not None:
        took = max(now - trial.started, 0.0)
    return TrialRow(
        number=trial.number,
        state=left if trial.state == RUNNING and left else trial.state,
        value="" if trial.state == FAILED else search_phrases.measure(trial),
        took=duration(took),
        tries=trial.tries,
        host=trial.host,
        gpu=search_phrases.gpus(trial.gpu),
        params=search_phrases.shortened(trial.params, _LONGEST),
        why=search_phrases.why(trial) if trial.state in (FAILED, PRUNED) else "",
        is_best=trial.number == best,
    )


def _curve(ended: Sequence[TrialReport], *, minimize: bool) -> Iterator[Point]:
    best: float | None = None
    for number, trial in enumerate(ended, 1):
        value = value_of(trial) if trial.state == COMPLETE else None
        if value is not None and (best is None or (value < best if minimize else value > best)):
            best = value
        if best is not None:
            yield float(number), best
