"""What of a search has time until the trials that were started have begun.

Optuna, and whatever brings logs to the lake, compute in the process that starts trials: what they
take meanwhile, a GPU stands idle.
"""

from __future__ import annotations

from collections.abc import Callable

# A trial on a new executor takes longer: its agent is to be told more, and the processes from which
# ranks are forked are started. Optuna is not to wait for that.
_MOST_SECONDS = 0.1

Work = Callable[[], object]


class Later:
    """Work in its order, due once no trial is about to begin."""

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._beginning: dict[int, float] = {}

    def started(self, trial: int, now: float) -> None:
        """A trial is about to begin."""
        self._beginning[trial] = now

    def begun(self, trial: int) -> None:
        """It has, or will not."""
        self._beginning.pop(trial, None)

    def put(self, work: Work) -> None:
        """Has something done later."""
        self._works.append(work)

    def due(self, now: float, *, hurry: bool) -> list[Work]:
        """What is to be done now; each is given once.

        Args:
            now: the clock's reading, as of `started`.
            hurry: whether all of it is due.
        """
        about_to = any(now - at < _MOST_SECONDS for at in self._beginning.values())
        if about_to and not hurry:
            return []
        works, self._works = self._works, []
        return works
