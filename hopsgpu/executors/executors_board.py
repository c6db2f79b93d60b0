"""The status board of what runs on executors that arrive and leave: a search, for example."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

from hopsgpu.core.gang import GangState
from hopsgpu.core.run_values import GpuSeconds
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.core.trials import Moment
from hopsgpu.core.wait_reasons import WaitReason
from hopsgpu.executors.item_placement import PlacementTerms
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.gpu_accounting import GpuAccount
from hopsgpu.runs.status_board import StatusBoard, StoppableDisplay


class ExecutorsBoard(StatusBoard):
    def __init__(
        self, run_id: str, terms: PlacementTerms, gpus: int, progress: StoppableDisplay
    ) -> None:
        super().__init__(run_id, gpus, progress)
        self._terms = terms
        self._account = GpuAccount(gpus, terms.slots)
        self._held_count = self._ready_count = self._max_count = 0

    def _mark(self, point: str, at: float) -> None:
        # The first time counts.
        if getattr(self._timeline, point) is None:
            super()._mark(point, at)

    def on_executors_arrived(self, times: Sequence[float]) -> None:
        """Do nothing: executors arrive one by one, and `record_executors` records them."""

    def record_executors(self, held: int, ready: int, most: int, why: WaitReason) -> None:
        """Record how many executors are held, are ready, and would be used now.

        Args:
            why: why there are not more executors.
        """
        with self._lock:
            if held != self._held_count:
                self._account.change_executors(held - self._held_count, time.time())
            self._held_count, self._ready_count, self._max_count, self._why = held, ready, most, why

    def min_executors(self, plan: LaunchPlan) -> int:
        return self._terms.count_executors(self._terms.min_running)

    def record_entry(self, at: float) -> None:
        """Record that the function of an item runs; called by the item's thread."""
        self.mark("started", at)
        with self._lock:
            if self._state is GangState.STARTING:
                self._state = GangState.RUNNING

    @abstractmethod
    def line(self, number: int, rank: int, host: str, *texts: str) -> None:
        """Show output of a rank of an item."""

    def result(self) -> GangResult:
        return GangResult(
            run_id=self.run_id,
            warnings=self.warnings,
            timeline=self.timeline,
            gpu_seconds=self.gpu_seconds(),
        )

    @property
    def moments(self) -> tuple[Moment, ...]:
        with self._lock:
            return tuple(self._account.moments)

    def gpu_seconds(self) -> GpuSeconds:
        """Return how the GPU time was spent until now, or until the release."""
        with self._lock:
            return self._gpu_seconds()

    def _gpu_seconds(self) -> GpuSeconds:
        return self._account.seconds(self._timeline.released or time.time())
