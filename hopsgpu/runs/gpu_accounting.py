"""Accounting of the GPU time of executors that arrive and leave, from events."""

from __future__ import annotations

from hopsgpu.core.gpu_losses import RankLosses, split_gpu_seconds
from hopsgpu.core.run_values import GpuSeconds
from hopsgpu.core.trials import Moment

# Enough for the display, even of a search with many short trials.
_MAX_MOMENTS = 4000


class GpuAccount:
    """The sums of held and used GPUs over time.

    Args:
        gpus: number of GPUs of an executor; if it is 0, the moments count executors.

    Attributes:
        moments: GPUs held and used over time; thinned out when there are many.
    """

    def __init__(self, gpus: int, slots: int) -> None:
        self._gpus = gpus
        self._slots = slots
        # Number of executors held, and of slots taken.
        self._held = self._taken_slots = 0
        self._since: float | None = None
        self._seconds_held = self._seconds_used = 0.0
        self._losses = RankLosses()
        self.moments: list[Moment] = []

    def change_executors(self, change: int, now: float) -> None:
        """Record that a number of executors arrived, or left (below 0)."""
        self._advance(now)
        self._held += change
        self._note(now)

    def change_slots(self, change: int, now: float) -> None:
        """Record that a number of slots were taken, or freed (below 0)."""
        self._advance(now)
        self._taken_slots += change
        self._note(now)

    def add_losses(self, losses: RankLosses) -> None:
        """Record GPU seconds that ranks in slots have lost."""
        self._losses += losses

    def seconds(self, now: float) -> GpuSeconds:
        """Return the GPU seconds until now; all are 0 for a search on CPUs."""
        self._advance(now)
        held, used = self._seconds_held * self._gpus, self._seconds_used * self._gpus
        return split_gpu_seconds(held, used, losses=self._losses)

    @property
    def share(self) -> float:
        """Return the share of the held time in which trials ran, in [0, 1]; 0 if none was held."""
        return self._seconds_used / self._seconds_held if self._seconds_held else 0.0

    def _advance(self, now: float) -> None:
        if self._since is not None:
            passed = max(now - self._since, 0.0)
            self._seconds_held += passed * self._held
            self._seconds_used += passed * self._taken_slots / self._slots
        self._since = now

    def _note(self, now: float) -> None:
        each = self._gpus or 1
        held, used = self._held * each, self._taken_slots * each / self._slots
        self.moments.append(Moment(now, held, used))
        if len(self.moments) > _MAX_MOMENTS:
            del self.moments[1:-1:2]
