"""Work of a search that is deferred until the ranks of new trials run.

Optuna and the upload of logs to the lake use the CPU of the process that starts trials: while they
compute, a GPU is idle.
"""

from __future__ import annotations

from collections.abc import Callable

# A trial on a new executor starts later: its agent receives more, and starts the fork servers.
# Other trials must not wait so long for Optuna's proposals.
_MAX_SECONDS = 0.1

Work = Callable[[], object]


class DeferredWork:
    """A queue of work that is due when no trial is starting, and after 0.1 s in any case."""

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._oldest_at = float("inf")
        self._starting_trials: set[int] = set()

    def record_starting(self, trial: int) -> None:
        self._starting_trials.add(trial)

    def record_started(self, trial: int) -> None:
        """Record that a trial's first rank runs, or never will."""
        self._starting_trials.discard(trial)

    def add(self, work: Work, now: float) -> None:
        """Add work to do later."""
        self._oldest_at = min(self._oldest_at, now)
        self._works.append(work)

    def seconds_until_due(self, now: float) -> float:
        """Return in how many seconds all work is due at the latest; infinity without work."""
        return max(self._oldest_at + _MAX_SECONDS - now, 0.0)

    def take_due(self, now: float, *, is_urgent: bool) -> list[Work]:
        """Remove and return the work that is due now."""
        if self._starting_trials and not is_urgent and self.seconds_until_due(now) > 0:
            return []
        works, self._works, self._oldest_at = self._works, [], float("inf")
        return works
