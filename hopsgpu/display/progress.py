"""The progress of runs, searches and scores, for people: choice of display, and plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO

from hopsgpu.core.gang import ENDS, GangState
from hopsgpu.core.run_values import RunStatus
from hopsgpu.core.scores import ScoreStatus
from hopsgpu.core.trials import SearchStatus, Writer
from hopsgpu.display import phrases
from hopsgpu.display.base import Display, PlainLines, Shield, display_of
from hopsgpu.display.score_phrases import ScoreFormatter
from hopsgpu.display.search_phrases import SearchFormatter
from hopsgpu.display.subjects import status_view
from hopsgpu.units import count_of

_REPEAT_SECONDS = 10.0
_MAX_METRICS = 6
# States with many changes that nobody needs to see at once.
_SELDOM = ("preparing", "starting", "running")

# The writer of a line is the number of a rank.
Progress = Display[RunStatus, int]
Shielded = Shield[RunStatus, int]
# The writer of a line is the number of a worker.
ShieldedScore = Shield[ScoreStatus, int]


class SearchProgress(Protocol):
    """Receives a search's states and the output of its trials' ranks."""

    def status(self, status: SearchStatus) -> None: ...

    def line(self, trial: int, rank: int, host: str, *texts: str) -> None: ...


class _RunFormatter:
    """Reports a run in lines: one per change, but at most one every 10 s for metrics and data."""

    def __init__(self) -> None:
        self._state = ""
        self._last = ""
        self._reported_at = float("-inf")
        self._details = phrases.WaitDetails()

    def news(self, status: RunStatus, now: float) -> Iterable[str]:
        text = describe(status)
        is_same_state = status.state == self._state and status.state in _SELDOM
        is_news = text != self._last and not is_same_state
        # An unchanged state is also repeated every 10 s, for example while the run waits.
        if not is_news and now - self._reported_at < _REPEAT_SECONDS:
            return []
        self._state, self._last, self._reported_at = status.state, text, now
        details = self._details.lines(status.waiting_details)
        results = status_view(status, status.elapsed).results
        more = filter(None, [phrases.not_training(status)])
        return [text, *details, *_worlds(status), *results, *more]

    def label(self, rank: int, host: str) -> str:
        return f"rank {rank} {host}"


class RunLines(PlainLines[RunStatus, int]):
    """Plain lines of a run."""

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(_RunFormatter(), out, err, clock)


class ShieldedSearch:
    """A search's display that may fail, wrapped in a `Shield`; a SearchProgress."""

    def __init__(self, shown: Display[SearchStatus, Writer]) -> None:
        self._shield = Shield(shown)

    @property
    def problem(self) -> str | None:
        return self._shield.problem

    def status(self, status: SearchStatus) -> None:
        self._shield.status(status)

    def line(self, trial: int, rank: int, host: str, *texts: str) -> None:
        self._shield.line(Writer(trial, rank), host, *texts)


def describe(status: RunStatus) -> str:
    """Return a status in one line; the details of why it waits are left out."""
    why = status.waiting_for
    if status.state in ("requested", "waiting"):
        for_ranks = "" if status.sizes is None else f" for {phrases.sizes(status.sizes)}"
        hosts = f" ({', '.join(status.granted_hosts)})" if status.granted_hosts else ""
        gang = f"{count_of(status.wanted, 'executor')} {'is' if status.wanted == 1 else 'are'}"
        return f"waiting{for_ranks}: {why or f'{status.granted} of {gang} here{hosts}'}"
    if status.state == "preparing":
        return why or status.state
    which = phrases.attempt(status)
    again = f" ({which})" if which else ""
    if status.state in ("granted", "ready"):
        hosts = ", ".join(status.granted_hosts)
        executors = status.wanted if status.sizes is None else status.granted
        return f"{status.state}: {count_of(executors, 'executor')} on {hosts}{again}"
    if status.state == "starting":
        return f"{why or 'starting ranks'}{again}"
    if status.state == "running":
        outlook = f"; {why}" if why and status.sizes is not None else ""
        return f"running{again}{_last_report(status)}{outlook}"
    lasted = ", ".join(f"{word} {took:.1f} s" for word, took in status.timeline.phases())
    if GangState(status.state) in ENDS and lasted:
        return f"{status.state}: {lasted}"
    return status.state


def _worlds(status: RunStatus) -> list[str]:
    """Return what an elastic gang's worlds were, once the run has ended."""
    if GangState(status.state) not in ENDS:
        return []
    return phrases.world_lines(status.worlds, status.timeline.requested)


def _last_report(status: RunStatus) -> str:
    reported = status.metrics[0] if status.metrics else {}
    shown = [f"{n} {v:g}" for n, v in reported.items() if not n.startswith("gpu.")]
    return f": {', '.join(shown[:_MAX_METRICS])}" if shown else ""


def progress_of(progress: object) -> Shielded:
    """Return the display of a run that `progress=` names; see `display_of`."""

    def live() -> Progress:
        from hopsgpu.display.live import Live

        return Live()

    return Shielded(display_of(progress, "RunStatus", live, RunLines))


def search_progress_of(progress: object) -> ShieldedSearch:
    """Return the display of a search that `progress=` names; see `display_of`."""

    def live() -> Display[SearchStatus, Writer]:
        from hopsgpu.display.live import LiveSearch

        return LiveSearch()

    return ShieldedSearch(
        display_of(progress, "SearchStatus", live, lambda: PlainLines(SearchFormatter()))
    )


def score_progress_of(progress: object) -> ShieldedScore:
    """Return the display of a score that `progress=` names; see `display_of`."""

    def live() -> Display[ScoreStatus, int]:
        from hopsgpu.display.live import LiveScore

        return LiveScore()

    return ShieldedScore(
        display_of(progress, "ScoreStatus", live, lambda: PlainLines(ScoreFormatter()))
    )
