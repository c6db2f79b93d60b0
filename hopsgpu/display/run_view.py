"""The view of a run, a search or a score from its record, for the command line and pages. Pure.

`run_facts` computes the facts; here are the tables that only a record has: ranks, trials, logs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hopsgpu.artifacts.run_logs import RankLog, parse_log_name
from hopsgpu.artifacts.runs import StoredRun
from hopsgpu.core.formats import duration
from hopsgpu.core.run_record import (
    LOST,
    ApplicationReport,
    RankRecord,
    RunRecord,
    ScoreRecord,
    SearchRecord,
)
from hopsgpu.core.run_values import WorldReport
from hopsgpu.core.scores import FailedPart
from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED, RUNNING, TrialReport, finite_value
from hopsgpu.core.waits import Wait
from hopsgpu.display import phrases, search_phrases
from hopsgpu.display.picture import Point, how_ended
from hopsgpu.display.run_facts import (
    BAD,
    WARNING,
    ManagerPages,
    RunSubject,
    RunView,
    ScoreSubject,
    SearchSubject,
    model_of,
    view_of,
)
from hopsgpu.units import count_of

STOPPED = "stopped"
_TRACEBACK = "Traceback (most recent call last)"
_WHOLE_LOG = "whole log: "
_LONGEST = 200
_DIAGNOSTICS = re.compile(r"Diagnostics: (.+?)(?:\. ?)?(?:For more detailed output|$)")


@dataclass(frozen=True)
class RunSummary:
    """A run in a list; texts are "" if there is nothing to show.

    Attributes:
        root: key of the root that it is below, on pages.
        state_before: the last recorded state of a run that is lost.
        is_running: whether its driver is working.
        problem_kind: kind of the problem, as of a StoreError.
        requested: when it began, in seconds since the epoch; or None.
        took: seconds until its end or until now; or None.
        gang: ranks and GPUs in words.
        error: why it did not succeed, in one line.
        kind: "gang", "search" or "score".
    """

    run_id: str
    state: str
    root: str = ""
    state_before: str = ""
    is_running: bool = False
    problem: str = ""
    problem_kind: str = ""
    name: str = ""
    user: str = ""
    queue: str = ""
    application: str = ""
    requested: float | None = None
    took: float | None = None
    ranks: str = ""
    gpus: int = 0
    gang: str = ""
    model: str = ""
    error: str = ""
    waiting_for: str = ""
    waiting_details: tuple[str, ...] = ()
    kind: str = "gang"


def summary_of(run: StoredRun, now: float, root: str = "") -> RunSummary:
    """Return a run as lists show it."""
    record, state = run.record, run.state_at(now)
    if record is None:
        return RunSummary(run.run_id, state, root, problem=run.problem, problem_kind=run.kind)
    spec, is_lost = record.spec, state == LOST
    is_running = not (record.has_ended or is_lost)
    least = "" if spec.least_workers is None else f"{spec.least_workers}-"
    error = next(_why_lost(record, run.report, now)) if is_lost else _outcome(record)
    return RunSummary(
        run_id=run.run_id,
        state=state,
        root=root,
        state_before="" if state == record.state else record.state,
        is_running=is_running,
        name=record.name,
        user=record.user,
        queue=record.queue,
        application=record.application,
        requested=record.timeline.requested,
        took=run.seconds_taken(now),
        ranks=f"{least}{spec.workers}",
        gpus=record.gpus,
        gang=_gang(record),
        model=" ".join(model_of(record.model)),
        error=error,
        waiting_for=record.waiting_for if is_running else "",
        waiting_details=record.waiting_details if is_running else (),
        kind=record.kind,
    )


def _outcome(record: RunRecord) -> str:
    """Return why a run did not succeed, in one line; "" for other runs."""
    if record.failure is not None:
        return record.failure.summary.removeprefix(f"{record.run_id} ")
    return (record.error or "").partition("\n")[0]


def _why_lost(record: RunRecord, report: ApplicationReport | None, now: float) -> Iterator[str]:
    """Yield what is known about the end of a run whose driver recorded none, in lines."""
    host = record.environment.driver.get("host")
    driver = f"its driver on {host}" if host else "its driver"
    diagnostics = "" if report is None else report.diagnostics
    if report is None or not report.has_ended:
        yield f"{driver} was last heard from {duration(now - record.updated)} ago"
    elif not diagnostics:
        yield f"{driver} ended without recording why"
    else:
        # YARN's reason of a failed driver in YARN is in the middle of a long text.
        match = _DIAGNOSTICS.search(diagnostics)
        yield match[1] if match else diagnostics
        diagnostics = diagnostics if match else ""
    if report is not None:
        rest = f": {diagnostics}" if diagnostics else ""
        yield f"the state of {record.application}: {report.state}{rest}"


def newest(rows: Sequence[RunSummary], most: int) -> Sequence[RunSummary]:
    """Return at most so many runs of several roots, the newest first."""
    return sorted(rows, key=lambda row: (row.requested or 0.0, row.run_id), reverse=True)[:most]


def _gang(record: RunRecord) -> str:
    spec, gpus = record.spec, count_of(record.gpus, "GPU")
    if spec.least_workers is None:
        return f"{count_of(spec.workers, 'rank')}, {gpus}"
    return f"{phrases.sizes((spec.least_workers, spec.workers))}, at most {gpus}"


@dataclass(frozen=True)
class Failure:
    """The error that ended a run.

    Attributes:
        traceback: the user's traceback; "" if there is none.
        words: the rest: which rank failed, where, and how.
        rank: the rank that failed first, or None.
        name: "error", "lost" or "cancelled".
        tone: BAD; WARNING if the run was cancelled.
    """

    full_text: str
    traceback: str
    words: str
    rank: int | None = None
    name: str = "error"
    tone: str = BAD


@dataclass(frozen=True)
class Phase:
    """A phase of a run; begin and share are shares of the whole time in [0, 1]."""

    name: str
    seconds: float
    begin: float
    share: float


@dataclass(frozen=True)
class RankRow:
    """A rank.

    Attributes:
        gpus: UUIDs, abbreviated.
        ended: how it ended, "runs", "lost", or "-" if nobody knows.
        is_bad: whether it failed by itself; if one rank failed first, only that rank did.
        gpu_use: mean utilisation in [0, 1]; or None.
        now_use: last sampled utilisation in [0, 1] of a rank that runs; or None.
        memory: peak bytes of the host's memory; or None.
    """

    rank: int
    role: str
    host: str
    pid: int
    gpus: str
    ended: str
    is_bad: bool
    gpu_use: float | None
    now_use: float | None
    memory: int | None
    reported: str
    log: RankLog | None


@dataclass(frozen=True)
class TrialRow:
    """A trial; texts are "" if there is nothing to show.

    Attributes:
        state: its state; "stopped" or "lost" if the search ended before it.
        ended: when it ended, in seconds since the epoch; None while it runs.
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
    ended: float | None
    is_best: bool


@dataclass(frozen=True)
class SearchView:
    """The tables of a search.

    Attributes:
        trials: those that run, then the best ones, then those that ended last without a value.
        curve: best value so far by the number of ended trials.
    """

    trials: tuple[TrialRow, ...]
    curve: tuple[Point, ...]


@dataclass(frozen=True)
class FailedPartRow:
    """Rows that a score left out; `why` is the line of the last error with the exception."""

    place: str
    tries: int
    why: str


@dataclass(frozen=True)
class ScoreView:
    """A score; `share` is the share of the rows that are on the lake, in [0, 1]."""

    share: float
    failed: tuple[FailedPartRow, ...]


@dataclass(frozen=True)
class RecordView(RunView):
    """One run, as its record shows it.

    Attributes:
        ranks: the ranks that have started; none for a search or a score.
        logs: all logs that the record lists, with their bytes.
        model: name and number of the version that it published; or nothing.
    """

    summary: RunSummary
    failure: Failure | None
    phases: tuple[Phase, ...]
    waits: tuple[Wait, ...]
    worlds: tuple[WorldReport, ...]
    ranks: tuple[RankRow, ...]
    logs: tuple[tuple[RankLog, int], ...]
    model: tuple[str, ...]
    search: SearchView | None
    score: ScoreView | None


def record_view(
    record: RunRecord,
    url: str,
    now: float,
    root: str = "",
    pages: ManagerPages = ManagerPages(),  # noqa: B008 - frozen
    report: ApplicationReport | None = None,
) -> RecordView:
    """Return what people want to know about a run.

    Args:
        root: key of the root that it is below, on pages.
        pages: the cluster manager's pages, for links.
        report: the cluster manager's report on the application of a silent run; None if unknown.
    """
    summary = summary_of(StoredRun(record.run_id, record, report=report), now, root)
    logs = {log: size for name, size in record.logs.items() if (log := parse_log_name(name))}
    ranks, score = record.ranks if record.kind == "gang" else (), record.score
    return RecordView(
        **vars(view_of(_subject_of(record, summary, url), pages)),
        summary=summary,
        failure=_failure(record, summary, "\n".join(_why_lost(record, report, now))),
        phases=tuple(_phases(record, summary)),
        waits=record.waits,
        worlds=record.worlds,
        ranks=tuple(_rank_row(rank, record, logs, summary) for rank in ranks),
        logs=tuple(sorted(logs.items())),
        model=model_of(record.model),
        search=None if record.search is None else _search_view(record.search, summary, now),
        score=None
        if score is None
        else ScoreView(
            share=min(score.scored / score.rows, 1.0) if score.rows else 0.0,
            failed=tuple(map(_failed_part_row, score.failed_parts)),
        ),
    )


def _subject_of(record: RunRecord, summary: RunSummary, url: str) -> RunSubject:
    spec, environment = record.spec, record.environment
    names = ("hopsgpu", "python", "spark", "hadoop")
    versions = ", ".join(f"{name} {getattr(environment, name) or '-'}" for name in names)
    host = environment.driver.get("host")
    search, score = record.search, record.score
    return RunSubject(
        run_id=record.run_id,
        state=summary.state,
        state_before=summary.state_before,
        attempt=record.attempt,
        sizes=None if spec.least_workers is None else (spec.least_workers, spec.workers),
        worlds=record.worlds,
        user=record.user,
        requested=summary.requested,
        took=summary.took,
        gang=summary.gang if record.kind == "gang" else "",
        application=record.application,
        queue=record.queue,
        model=record.model,
        directory=url,
        environment=f"{versions} on {host}" if host else versions,
        waiting_for=summary.waiting_for,
        waiting_details=summary.waiting_details,
        data=record.data or {},
        left_out=record.left_out,
        search=None if search is None else _search_subject(search, record.left_out),
        score=None if score is None else _score_subject(score, summary.is_running),
        timeline=record.timeline,
        gpu_seconds=record.gpu_seconds,
        warnings=record.warnings,
    )


def _search_subject(search: SearchRecord, left_out: Mapping[str, int]) -> SearchSubject:
    states = Counter(trial.state for trial in search.trials)
    states.update({name: left_out.get(f"{name} trials", 0) for name in (COMPLETE, PRUNED, FAILED)})
    gpus = search.gpus_per_trial
    gpu_text = count_of(int(gpus), "GPU") if gpus == int(gpus) else f"{gpus:g} of a GPU"
    ranks = count_of(search.workers_per_trial, "rank")
    return SearchSubject(
        wanted=search.trials_wanted,
        states=states,
        best=search.best,
        metric=search.metric,
        direction=search.direction,
        sampler=search.sampler,
        pruner=search.pruner,
        at_a_time=f"at most {search.max_concurrent}, each of {ranks} with {gpu_text}",
    )


def _score_subject(score: ScoreRecord, is_running: bool) -> ScoreSubject:
    gpus = score.gpus_per_worker
    executors = count_of(score.max_concurrent, "executor")
    kept = f"; parts are in {score.kept_in}" if score.kept_in else ""
    return ScoreSubject(
        rows=score.rows,
        scored=score.scored,
        failed=len(score.failed_parts),
        parts=score.parts,
        parts_done=score.done,
        rate=score.rate if is_running else None,
        seconds_left=score.seconds_left if is_running else None,
        model=score.model,
        at_a_time=f"at most {executors}, each with {count_of(gpus, 'GPU') if gpus else 'CPUs'}",
        output=score.output if score.is_complete else f"{score.output} is not there yet{kept}",
        is_complete=score.is_complete,
    )


def _failure(record: RunRecord, summary: RunSummary, why_lost: str) -> Failure | None:
    if summary.state == LOST:
        return Failure(why_lost, "", why_lost, name=LOST)
    if record.error is None:
        return None
    rank = None if record.failure is None else record.failure.rank
    failure = replace(failure_of(record.error), rank=rank)
    if summary.state == "cancelled":
        return replace(failure, name=summary.state, tone=WARNING)
    return failure


def failure_of(error: str) -> Failure:
    """Return an error with the user's traceback apart from the other words."""
    lines = error.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith(_TRACEBACK)), None)
    ends = (n for n, line in enumerate(lines) if line.startswith(_WHOLE_LOG))
    last = next((n for n in ends if first is not None and n > first), len(lines))
    words = lines if first is None else lines[:first] + lines[last:]
    traceback = "" if first is None else "\n".join(lines[first:last])
    return Failure(error, traceback, "\n".join(words))


def _phases(record: RunRecord, summary: RunSummary) -> Iterator[Phase]:
    """Yield the phases that have ended, and the present one of a run that is active."""
    phases = list(record.timeline.phases())
    took = summary.took
    passed = sum(seconds for _, seconds in phases)
    if summary.is_running and took is not None and took > passed:
        phases.append((f"{phrases.state(record.state)} now", took - passed))
    total = sum(seconds for _, seconds in phases)
    begin = 0.0
    for name, seconds in phases:
        share = seconds / total if total else 0.0
        yield Phase(name, seconds, begin, share)
        begin += share


def _rank_row(
    rank: RankRecord, record: RunRecord, logs: Mapping[RankLog, int], summary: RunSummary
) -> RankRow:
    number = rank.rank
    last = record.metrics[number] if number < len(record.metrics) else {}
    busy = (use for name, use in last.items() if re.fullmatch(r"gpu\..*\.utilisation", name))
    sampled = [use for use in busy if 0.0 <= use <= 1.0]
    failed_rank = None if record.failure is None else record.failure.rank
    is_culprit = number == failed_rank
    if rank.has_ended:
        ended = how_ended(rank, failed_rank)
    elif record.has_ended:
        ended = STOPPED if rank.stopped else f"{LOST} first" if is_culprit else LOST
    else:
        ended = "runs" if summary.is_running else "-"
    has_failed = rank.has_ended and rank.exit_code != 0 and not rank.stopped
    return RankRow(
        rank=number,
        role=rank.role,
        host=rank.host,
        pid=rank.pid,
        gpus=", ".join(map(phrases.uuid, rank.gpus)),
        ended=ended,
        is_bad=is_culprit or (has_failed and failed_rank is None),
        gpu_use=rank.gpu_utilisation,
        now_use=sum(sampled) / len(sampled) if sampled and not rank.has_ended else None,
        memory=rank.peak_memory,
        reported=reported_text(last),
        log=max((log for log in logs if log.rank == number), default=None),
    )


def reported_text(metrics: Mapping[str, object]) -> str:
    """Return reported values as text, without samples of GPUs."""
    return ", ".join(
        f"{name}={f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in metrics.items()
        if not name.startswith("gpu.")
    )


def _search_view(search: SearchRecord, summary: RunSummary, now: float) -> SearchView:
    is_minimized = search.direction == "minimize"
    ended = sorted((t for t in search.trials if t.state != RUNNING), key=lambda t: t.ended or 0.0)
    interrupted = "" if summary.is_running else LOST if summary.state == LOST else STOPPED
    best = None if search.best is None else search.best.number
    return SearchView(
        trials=tuple(
            _trial_row(trial, best, interrupted, now)
            for trial in _in_order(search.trials, ended, is_minimized=is_minimized)
        ),
        curve=tuple(_curve(ended, is_minimized=is_minimized)),
    )


def _in_order(
    trials: Sequence[TrialReport], ended: Sequence[TrialReport], *, is_minimized: bool
) -> list[TrialReport]:
    sign = 1.0 if is_minimized else -1.0
    running = [trial for trial in trials if trial.state == RUNNING]
    valued = [
        trial for trial in ended if trial.state == COMPLETE and finite_value(trial) is not None
    ]
    valued.sort(key=lambda trial: (sign * (trial.value or 0.0), trial.number))
    numbers = {trial.number for trial in valued}
    return [*running, *valued, *(t for t in reversed(ended) if t.number not in numbers)]


def _trial_row(trial: TrialReport, best: int | None, interrupted: str, now: float) -> TrialRow:
    state, took = trial.state, trial.duration
    if state == RUNNING and interrupted:
        state = interrupted
    elif state == RUNNING and trial.started is not None:
        took = max(now - trial.started, 0.0)
    return TrialRow(
        number=trial.number,
        state=state,
        value="" if trial.state == FAILED else search_phrases.measure(trial),
        took=duration(took),
        tries=trial.tries,
        host=trial.host,
        gpu=search_phrases.gpus(trial.gpu),
        params=search_phrases.shorten_params(trial.params, _LONGEST),
        why=search_phrases.why(trial) if trial.state in (FAILED, PRUNED) else "",
        ended=None if trial.state == RUNNING else trial.ended or 0.0,
        is_best=trial.number == best,
    )


def _curve(ended: Sequence[TrialReport], *, is_minimized: bool) -> Iterator[Point]:
    best: float | None = None
    for number, trial in enumerate(ended, 1):
        value = finite_value(trial) if trial.state == COMPLETE else None
        if value is not None and (best is None or (value < best if is_minimized else value > best)):
            best = value
        if best is not None:
            yield float(number), best


def _failed_part_row(part: FailedPart) -> FailedPartRow:
    lines = [line for line in part.error.splitlines() if line.strip()]
    first = next((n for n, line in enumerate(lines) if line.startswith(_TRACEBACK)), 0)
    ends = (n for n, line in enumerate(lines) if n > first and not line.startswith(" "))
    return FailedPartRow(part.place, part.tries, lines[next(ends, 0)][:_LONGEST] if lines else "")
