"""The states of an attempt's ranks: started, in the user's function, ended."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from hopsgpu.core.gang import World
from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.core.run_values import RankReport


@dataclass(frozen=True)
class FunctionEntry:
    """In how many ranks the user's function runs.

    Attributes:
        ranks: number of ranks in which the function runs, parameter servers included.
        at: when the function began in the last of these ranks, in seconds since the epoch.
    """

    ranks: int
    of: int
    at: float

    @property
    def is_complete(self) -> bool:
        return self.ranks == self.of


class RankTable:
    """The ranks of one attempt; written by the attempt's thread, read by any thread."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._reports: dict[int, RankReport] = {}
        self._entered: dict[int, float] = {}
        self._ended: set[int] = set()
        self._losses: dict[int, RankLosses] = {}
        # Losses until the function ran in all ranks. They are not losses of training.
        self._losses_before: dict[int, RankLosses] = {}

    def record_start(self, rank: int, pid: int) -> None:
        place = self._world.processes[rank]
        with self._lock:
            self._reports[rank] = RankReport(
                rank, place.role, place.container.host, place.gpus, pid
            )

    def record_entry(self, rank: int, at: float) -> FunctionEntry:
        """Record that the user's function began, at a time of the clock of the rank's node."""
        clock = self._world.processes[rank].container.clock
        with self._lock:
            self._entered[rank] = at + clock
            entry = FunctionEntry(
                len(self._entered), len(self._world.processes), max(self._entered.values())
            )
            if entry.is_complete:
                self._losses_before = dict(self._losses)
            return entry

    def record_blocked(self, rank: int, data: float, checkpoints: float) -> None:
        """Record how many seconds in all a rank has waited for data, and for checkpoint calls."""
        with self._lock:
            unused = self._losses.get(rank, RankLosses()).unused
            self._losses[rank] = RankLosses(data, checkpoints, unused)

    def record_unused(self, rank: int, seconds: float) -> None:
        """Record how many seconds in all a rank's GPUs were unused."""
        with self._lock:
            self._losses[rank] = replace(self._losses.get(rank, RankLosses()), unused=seconds)

    def losses(self, gpus: float) -> RankLosses:
        """Return the GPU seconds that the workers have lost until now.

        Args:
            gpus: number of GPUs of an executor's ranks.
        """
        with self._lock:
            total = RankLosses()
            for rank, losses in self._losses.items():
                if rank < self._world.size:
                    before = self._losses_before.get(rank, RankLosses())
                    total += losses.since(before).without_overlap()
            return total.of_gpus(gpus / self._world.ranks_per_container)

    def record_end(
        self,
        rank: int,
        *,
        exit_code: int | None,
        signal: str | None,
        peak_memory: int | None,
        gpu_utilisation: float | None,
        was_stopped: bool,
    ) -> None:
        """Record the end of a rank that has started; `RankReport` describes the arguments."""
        with self._lock:
            self._reports[rank] = replace(
                self._reports[rank],
                exit_code=exit_code,
                signal=signal,
                peak_memory=peak_memory,
                gpu_utilisation=gpu_utilisation,
                stopped=was_stopped,
            )
            self._ended.add(rank)

    @property
    def reports(self) -> tuple[RankReport, ...]:
        """Return the reports of the ranks that have ended, in order."""
        return tuple(report for report, has_ended in self.started_ranks if has_ended)

    @property
    def started_ranks(self) -> tuple[tuple[RankReport, bool], ...]:
        """Return, in order, the report of each rank that has started, and whether it has ended."""
        with self._lock:
            return tuple(
                (report, rank in self._ended) for rank, report in sorted(self._reports.items())
            )
