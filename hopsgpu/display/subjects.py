"""The views of the statuses and the results of runs, searches and scores. Pure."""

from __future__ import annotations

from dataclasses import replace

from hopsgpu.core.gang import ENDS, GangState
from hopsgpu.core.run_values import RunOutcome, RunStatus
from hopsgpu.core.scores import ScoreOutcome, ScoreStatus
from hopsgpu.core.trials import FAILED, SearchOutcome, SearchStatus
from hopsgpu.display import phrases, search_phrases
from hopsgpu.display.run_facts import RunSubject, RunView, ScoreSubject, SearchSubject, view_of

_MAX_FAILED = 3


def status_view(status: RunStatus | SearchStatus | ScoreStatus, elapsed: float) -> RunView:
    """Return the view of a run, a search or a score, so many seconds after its begin."""
    has_ended = GangState(status.state) in ENDS
    subject = RunSubject(
        run_id=status.run_id,
        state=status.state,
        took=elapsed,
        application=status.application,
        queue=status.queue,
        waiting_for="" if has_ended else status.waiting_for,
        waiting_details=() if has_ended else status.waiting_details,
    )
    if has_ended:
        subject = replace(subject, gpu_seconds=status.gpu_seconds)
    if isinstance(status, SearchStatus):
        states, held = search_phrases.states_of(status), search_phrases.held_gpus(status)
        search = SearchSubject(status.wanted, states, status.best, status.metric)
        return view_of(replace(subject, search=search, held=held))
    if isinstance(status, ScoreStatus):
        score = ScoreSubject(status.rows, status.scored, status.failed)
        if has_ended:
            return view_of(replace(subject, score=score))
        score = replace(score, rate=status.rate, seconds_left=status.seconds_left)
        held = phrases.held_executors(status) if status.most else ""
        return view_of(replace(subject, score=score, held=held))
    subject = replace(
        subject,
        attempt=status.attempt,
        sizes=status.sizes,
        worlds=status.worlds,
        held=phrases.gang(status),
        model=None if status.model is None else status.model.url,
        value="" if status.value is None else phrases.value(status.value),
    )
    return view_of(replace(subject, timeline=status.timeline) if has_ended else subject)


def result_view(result: RunOutcome | SearchOutcome | ScoreOutcome) -> RunView:
    """Return the view of a result; the first failed trials of a search are warnings."""
    subject = RunSubject(
        run_id=result.run_id,
        application=result.application,
        queue=result.queue,
        timeline=result.timeline,
        gpu_seconds=result.gpu_seconds,
        warnings=result.warnings,
    )
    if isinstance(result, SearchOutcome):
        search = SearchSubject(len(result.trials), result.states, result.best, result.metric)
        failed = [trial for trial in result.trials if trial.state == FAILED][:_MAX_FAILED]
        reasons = (f"trial {trial.number} failed: {search_phrases.why(trial)}" for trial in failed)
        return view_of(replace(subject, search=search, warnings=(*result.warnings, *reasons)))
    if isinstance(result, ScoreOutcome):
        columns = "" if result.schema is None else ", ".join(result.schema.names)
        score = ScoreSubject(
            result.rows, result.rows, len(result.failed_parts), output=result.url, columns=columns
        )
        return view_of(replace(subject, score=score))
    return view_of(replace(subject, model=None if result.model is None else result.model.url))
