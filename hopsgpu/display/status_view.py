"""The views of statuses and results: all that displays show beside plots and logs. Pure.

The terminal and the notebook's cell render a `StatusView`, the cards of results a `ResultView`. A
new fact about a status or a result belongs here; one from a run's record belongs into `run_view`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hopsgpu.core.gang import ENDS, GangState
from hopsgpu.core.gpu_losses import largest_loss
from hopsgpu.core.run_values import GpuSeconds, RunOutcome, RunStatus, Timeline
from hopsgpu.core.scores import ScoreOutcome, ScoreStatus
from hopsgpu.core.trials import FAILED, SearchOutcome, SearchStatus
from hopsgpu.display import phrases, score_phrases, search_phrases
from hopsgpu.units import count_of

_MOST_FAILED = 3
_LONGEST_PARAMS = 200


@dataclass(frozen=True)
class StatusView:
    """The first lines of a live display.

    Attributes:
        run_id: the run's id.
        state: value of a GangState.
        facts: the state in words, the elapsed time and further facts, without empty ones.
        details: why it waits, or at the end the durations of the phases.
        separator: what is between two details.
        best: the best trial of a search so far; "" for none.
        loss: at the end, what most GPU time was lost to; "" for nothing.
    """

    run_id: str
    state: str
    facts: tuple[str, ...]
    details: tuple[str, ...] = ()
    separator: str = "; "
    best: str = ""
    loss: str = ""


def run_status_view(status: RunStatus, elapsed: float) -> StatusView:
    """Return the first lines of a run's display, so many seconds after its begin."""
    facts = (phrases.phase(status), phrases.seconds(elapsed), phrases.gang(status))
    view = _view(status, facts)
    if GangState(status.state) not in ENDS:
        return view
    durations = tuple(phrases.phase_durations(status.timeline))
    return replace(view, details=durations, separator=", ")


def search_status_view(status: SearchStatus, elapsed: float) -> StatusView:
    """Return the first lines of a search's display, so many seconds after its begin."""
    counts = search_phrases.count_phrase(status.wanted, search_phrases.states_of(status))
    facts = (
        *(phrases.state(status.state), phrases.seconds(elapsed), counts),
        search_phrases.held_gpus(status),
    )
    best = search_phrases.best_phrase(status)
    if status.best is not None:
        best = f"{best}: {search_phrases.shorten_params(status.best.params, _LONGEST_PARAMS)}"
    return _view(status, facts, best)


def score_status_view(status: ScoreStatus, elapsed: float) -> StatusView:
    """Return the first lines of a score's display, so many seconds after its begin."""
    has_ended = GangState(status.state).is_terminal
    facts = [phrases.state(status.state), phrases.seconds(elapsed), score_phrases.rows(status)]
    if not has_ended:
        facts += [score_phrases.rate(status), score_phrases.time_left(status)]
    facts.append(score_phrases.failed_parts(status))
    if not has_ended and status.most:
        facts.append(score_phrases.held_executors(status))
    return _view(status, tuple(facts))


def _view(
    status: RunStatus | SearchStatus | ScoreStatus,
    facts: tuple[str, ...],
    best: str = "",
) -> StatusView:
    return StatusView(
        run_id=status.run_id,
        state=status.state,
        facts=tuple(fact for fact in facts if fact),
        details=tuple(filter(None, status.waiting_for.split("; "))),
        best=best,
        loss=phrases.loss(status),
    )


@dataclass(frozen=True)
class ResultView:
    """A result: its class, and names and values of facts, without empty ones."""

    kind: str
    run_id: str
    facts: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def run_result_view(result: RunOutcome) -> ResultView:
    """Return the facts about a run's result."""
    model = "" if result.model is None else result.model.url
    spent = spent_facts(result.timeline, result.gpu_seconds)
    return _result("GangResult", result, [("model", model), *spent])


def search_result_view(result: SearchOutcome) -> ResultView:
    """Return the facts about a search's result; the first failed trials are warnings."""
    facts = [("trials", search_phrases.count_phrase(len(result.trials), result.states))]
    if (best := result.best) is not None:
        facts = [
            (f"best {result.metric or 'value'}", f"{best.value:.6g}"),
            ("of trial", str(best.number)),
            ("parameters", search_phrases.shorten_params(best.params, _LONGEST_PARAMS)),
            *facts,
        ]
    failed = [trial for trial in result.trials if trial.state == FAILED][:_MOST_FAILED]
    reasons = (f"trial {trial.number} failed: {search_phrases.why(trial)}" for trial in failed)
    facts += spent_facts(result.timeline, result.gpu_seconds)
    return _result("SearchResult", result, facts, tuple(reasons))


def score_result_view(result: ScoreOutcome) -> ResultView:
    """Return the facts about a score's result."""
    columns = "" if result.schema is None else ", ".join(result.schema.names)
    count = len(result.failed_parts)
    facts = [
        ("output", result.url),
        ("rows", f"{result.rows:,}"),
        ("columns", columns),
        ("left out", count_of(count, "part") if count else ""),
        *spent_facts(result.timeline, result.gpu_seconds),
    ]
    return _result("ScoreResult", result, facts)


def _result(
    kind: str,
    result: RunOutcome | SearchOutcome | ScoreOutcome,
    facts: list[tuple[str, str]],
    warnings: tuple[str, ...] = (),
) -> ResultView:
    non_empty = tuple((name, text) for name, text in facts if text)
    return ResultView(kind, result.run_id, non_empty, (*result.warnings, *warnings))


def spent_facts(timeline: Timeline, seconds: GpuSeconds) -> Iterator[tuple[str, str]]:
    """Yield how long each phase took, and what the GPUs did while they were held."""
    if durations := phrases.phase_durations(timeline):
        yield "time", ", ".join(durations)
    if seconds.held:
        yield "GPU seconds", ", ".join(phrases.spent_texts(seconds))
        if loss := largest_loss(seconds):
            yield "largest loss", loss
