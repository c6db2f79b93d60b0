"""Where a search's GPU time goes: when executors come and go, and trials begin and end."""

from __future__ import annotations

from hopsgpu.core.run_values import GpuSeconds
from hopsgpu.core.trials import Moment

# Of a search of many short trials the picture needs no more.
_MOST_MOMENTS = 4000


class Tally:
    """Adds up held and used GPUs over time.

    Args:
        gpus: of an executor; without any, executors are counted in the moments.
        slots: of an executor.
    """

    def __init__(self, gpus: int, slots: int) -> None:
        self._gpus = gpus
        self._slots = slots
        # The executors that are held, and the slots that are taken.
        self._held = self._taken = 0
        self._since: float | None = None
        self._seconds_held = self._seconds_used = 0.0
        self.moments: list[Moment] = []

    def executors(self, change: int, now: float) -> None:
        """So many executors came, or went (below 0)."""
        self._advance(now)
        self._held += change
        self._note(now)

    def slots(self, change: int, now: float) -> None:
        """So many slots were taken, or are free again (below 0)."""
        self._advance(now)
        self._taken += change
        self._note(now)

    def seconds(self, now: float) -> GpuSeconds:
        """GPU seconds until now; none of a search on CPUs."""
        self._advance(now)
        held, used = self._seconds_held * self._gpus, self._seconds_used * self._gpus
        return GpuSeconds(held, used, 0.0, max(held - used, 0.0))

    @property
    def share(self) -> float:
        """Of the held time the share in which a trial ran, in [0, 1]; 0 where none was held."""
        return self._seconds_used / self._seconds_held if self._seconds_held else 0.0

    def _advance(self, now: float) -> None:
        if self._since is not None:
            passed = max(now - self._since, 0.0)
            self._seconds_held += passed * self._held
            self._seconds_used += passed * self._taken / self._slots
        self._since = now

    def _note(self, now: float) -> None:
        each = self._gpus or 1
        held, used = self._held * each, self._taken * each / self._slots
        self.moments.append(Moment(now, held, used))
        if len(self.moments) > _MOST_MOMENTS:
            del self.moments[1:-1:2]
