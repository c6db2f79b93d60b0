"""What of a search has time until the trials that were started have begun.

Optuna, and whatever brings logs to the lake, compute in the process that starts trials: what they
take meanwhile, a GPU stands idle.
"""

from __future__ import annotations

from collections.abc import Callable

# A trial on a new executor takes longer: its agent is to be told more, and the processes from which
# ranks are forked are started. Others are not to wait for what Optuna would propose meanwhile.
_MOST_SECONDS = 0.1

Work = Callable[[], object]


class Later:
    """Work in its order, due once no trial is about to begin, and soon in any case."""

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._oldest_at = float("inf")
        self._beginning: set[int] = set()

    def started(self, trial: int) -> None:
        """A trial is about to begin."""
        self._beginning.add(trial)

    def begun(self, trial: int) -> None:
        """It has, or will not."""
        self._beginning.discard(trial)

    def put(self, work: Work, now: float) -> None:
        """Has something done later.

        Args:
            work: to be done.
            now: the clock's reading.
        """
        self._oldest_at = min(self._oldest_at, now)
        self._works.append(work)

    def patience(self, now: float) -> float:
        """Seconds until all that was put is due at the latest; endless where nothing was."""
        return max(self._oldest_at + _MOST_SECONDS - now, 0.0)

    def due(self, now: float, *, hurry: bool) -> list[Work]:
        """What is to be done now; each is given once.

        Args:
            now: the clock's reading.
            hurry: whether all of it is due.
        """
        if self._beginning and not hurry and self.patience(now) > 0:
            return []
        works, self._works, self._oldest_at = self._works, [], float("inf")
        return works
