"""Work of a search that is deferred until the trials that were started have begun.

Optuna and the upload of logs to the lake use the CPU of the process that starts trials: while they
compute, a GPU is idle.
"""

from __future__ import annotations

from collections.abc import Callable

# A trial on a new executor takes longer to begin: its agent receives more, and starts the fork
# servers. Other trials must not wait so long for Optuna's proposals.
_MOST_SECONDS = 0.1

Work = Callable[[], object]


class DeferredWork:
    """A queue of work that is due once no trial is about to begin, and after 0.1 s in any case."""

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._oldest_at = float("inf")
        self._beginning: set[int] = set()

    def started(self, trial: int) -> None:
        """Record that a trial is about to begin."""
        self._beginning.add(trial)

    def begun(self, trial: int) -> None:
        """Record that a trial has begun, or never will."""
        self._beginning.discard(trial)

    def put(self, work: Work, now: float) -> None:
        """Add work to do later.

        Args:
            work: function that does the work.
            now: current reading of the clock, in seconds.
        """
        self._oldest_at = min(self._oldest_at, now)
        self._works.append(work)

    def patience(self, now: float) -> float:
        """Return in how many seconds all work is due at the latest; infinity without work."""
        return max(self._oldest_at + _MOST_SECONDS - now, 0.0)

    def due(self, now: float, *, hurry: bool) -> list[Work]:
        """Remove and return the work that is due now.

        Args:
            now: current reading of the clock, in seconds.
            hurry: whether all work is due.
        """
        if self._beginning and not hurry and self.patience(now) > 0:
            return []
        works, self._works, self._oldest_at = self._works, [], float("inf")
        return works
