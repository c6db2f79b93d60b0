"""The one place that knows how the ranks of an attempt are: started, entered, ended."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from hopsgpu.core.gang import World
from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.core.run_values import RankReport


@dataclass(frozen=True)
class Entered:
    """In how many ranks the user's function runs.

    Attributes:
        ranks: number of ranks in which it runs, with parameter servers.
        of: number of all ranks.
        at: when it began in the last of these, in seconds since the epoch.
    """

    ranks: int
    of: int
    at: float

    @property
    def all(self) -> bool:
        """Return whether it runs in all ranks."""
        return self.ranks == self.of


class RankTable:
    """The ranks of one attempt; written by the attempt's thread, read by any thread.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._reports: dict[int, RankReport] = {}
        self._entered: dict[int, float] = {}
        self._ended: set[int] = set()
        # Of each rank the seconds in which it was blocked, and in which its GPUs were not used.
        self._seen: dict[int, RankLosses] = {}
        # The same until the function ran in all ranks, which was no training.
        self._before: dict[int, RankLosses] = {}

    def started(self, rank: int, pid: int) -> None:
        """Record that a rank's process has started."""
        place = self._world.processes[rank]
        with self._lock:
            self._reports[rank] = RankReport(
                rank, place.role, place.container.host, place.gpus, pid
            )

    def entered(self, rank: int, at: float) -> Entered:
        """Record when the user's function began in a rank, by the clock of the rank's node."""
        clock = self._world.processes[rank].container.clock
        with self._lock:
            self._entered[rank] = at + clock
            entered = Entered(
                len(self._entered), len(self._world.processes), max(self._entered.values())
            )
            if entered.all:
                self._before = dict(self._seen)
            return entered

    def blocked(self, rank: int, data: float, checkpoints: float) -> None:
        """Record for how many seconds a rank has waited for data, and been in checkpoint calls."""
        with self._lock:
            seen = self._seen.get(rank, RankLosses())
            self._seen[rank] = RankLosses(data, checkpoints, seen.unused)

    def unused(self, rank: int, seconds: float) -> None:
        """Record for how long a rank's GPUs have not been used."""
        with self._lock:
            self._seen[rank] = replace(self._seen.get(rank, RankLosses()), unused=seconds)

    def losses(self, gpus: float) -> RankLosses:
        """Return the GPU seconds that the workers have lost until now.

        Args:
            gpus: number of GPUs of an executor's ranks.
        """
        with self._lock:
            lost = RankLosses()
            for rank, seen in self._seen.items():
                if rank < self._world.size:
                    lost += seen.since(self._before.get(rank, RankLosses())).without_overlap()
            return lost.of_gpus(gpus / self._world.ranks_per_container)

    def ended(
        self,
        rank: int,
        *,
        exit_code: int | None,
        signal: str | None,
        peak_memory: int | None,
        gpu_utilisation: float | None,
        stopped: bool,
    ) -> None:
        """Record how a rank that has started has ended; `RankReport` describes the arguments."""
        with self._lock:
            self._reports[rank] = replace(
                self._reports[rank],
                exit_code=exit_code,
                signal=signal,
                peak_memory=peak_memory,
                gpu_utilisation=gpu_utilisation,
                stopped=stopped,
            )
            self._ended.add(rank)

    @property
    def reports(self) -> tuple[RankReport, ...]:
        """Return the reports of the ranks that have ended, in order."""
        return tuple(report for report, has_ended in self.seen if has_ended)

    @property
    def seen(self) -> tuple[tuple[RankReport, bool], ...]:
        """Return, in order, the report of each rank that has started, and whether it has ended."""
        with self._lock:
            return tuple(
                (report, rank in self._ended) for rank, report in sorted(self._reports.items())
            )
