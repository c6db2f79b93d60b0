"""The process of an executor that scores parts, one after the other, as the driver knows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from hopsgpu.attempts.attempt import Trained
from hopsgpu.attempts.attempt_watcher import WatchBounds
from hopsgpu.attempts.rank_call import Call
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.control.server import ControlServer
from hopsgpu.scoring.part_reports import (
    BEGUN,
    FAILED,
    READY,
    UNFIT,
    PartReport,
    PartReports,
)
from hopsgpu.scoring.part_scorer import END, part_line
from hopsgpu.scoring.score_board import ScoreBoard
from hopsgpu.storage.background import Background
from hopsgpu.tuning.scheduler import Slot, TrialEnd
from hopsgpu.tuning.slot_run import SlotListener, SlotRun
from hopsgpu.tuning.trial_outcome import Outcome


@dataclass(frozen=True)
class Opened:
    """News of a worker: its process has started, and can be handed parts."""

    worker: PartWorker


@dataclass(frozen=True)
class Told:
    """News of a worker: what it reports of a part."""

    worker: PartWorker
    report: PartReport


@dataclass(frozen=True)
class WorkerSetting:
    """What all workers of a score have in common.

    Attributes:
        board: the score's status board.
        background: uploads the workers' logs to the lake.
        bounds: how long ranks and agents are waited for, and how long GPUs may idle.
        tell: called with news of a worker, in its thread; a PartWorker is the news of its own end.
    """

    board: ScoreBoard
    background: Background
    bounds: WatchBounds
    tell: Callable[[Opened | Told | PartWorker], None]


class _WorkerListener(SlotListener):
    """Tells the score what a worker's rank reports."""

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__(setting.board)
        self._setting = setting
        self._reports = PartReports()
        self.worker: PartWorker | None = None

    def started(self, rank: int) -> None:
        assert self.worker is not None, "set before the thread starts"
        self._setting.tell(Opened(self.worker))

    def record(self, rank: int, chunk: bytes) -> None:
        assert self.worker is not None, "set before the thread starts"
        for report in self._reports.take(chunk):
            self._setting.tell(Told(self.worker, report))


class PartWorker(SlotRun):
    """The process of an executor; only the score's thread calls its methods about parts.

    Args:
        number: number of the worker.
        executor: key of the executor's agent.
        allocation: allocation of the executor.
        call: what the process runs.
        setting: what it has in common with other workers.

    Attributes:
        executor: as given.
        parts: numbers of the parts that it has and has not completed, in its order.
        is_ready: whether it has the user's function, and its model.
        is_unfit: whether the user's function does not take small batches.
        leaving: whether it was told that no more parts come.
    """

    def __init__(
        self,
        number: int,
        executor: int,
        allocation: GangAllocation,
        call: Call,
        setting: WorkerSetting,
    ) -> None:
        listener = _WorkerListener(setting)
        super().__init__(
            number,
            (Slot(executor, 0),),
            allocation,
            call,
            setting.board,
            setting.background,
            setting.bounds,
            listener,
        )
        listener.worker = self
        self.executor = executor
        self.parts: list[int] = []
        self.is_ready = False
        self.is_unfit = False
        self.leaving = threading.Event()
        self._server: ControlServer = allocation.server
        self._setting = setting
        self._is_open = False
        self._unsent: list[str] = []
        self._begun: int | None = None
        self._failed: int | None = None

    @property
    def label(self) -> str:
        return f"worker {self.number}"

    def give(self, part: int) -> None:
        """Give it a part; it begins once it is done with those that it has."""
        self.parts.append(part)
        self._send(part_line(part))

    def leave(self) -> None:
        """Have it end once it is done with the parts that it has."""
        self.leaving.set()
        self._send(END)

    def opened(self) -> None:
        """Hand over what was given to it before it could read."""
        self._is_open = True
        unsent, self._unsent = self._unsent, []
        for line in unsent:
            self._send(line)

    def reported(self, report: PartReport) -> None:
        """Record what it reports."""
        if report.event == READY:
            self.is_ready = True
        elif report.event == BEGUN:
            self._begun = report.number
        elif report.event == FAILED:
            self._failed = report.number
        elif report.event == UNFIT:
            self.is_unfit = True

    @property
    def blamed(self) -> int | None:
        """Return the part that its failure counts for: the one that it was at; None without one."""
        if not self.is_ready:
            return None
        for part in (self._failed, self._begun):
            if part in self.parts:
                return part
        # It ended before it had rows, or between two parts.
        return self.parts[0] if self.parts else None

    def _send(self, line: str) -> None:
        if self._is_open:
            self._server.send(self.executor, "hand", run_id=self.call.run_id, line=line)
        else:
            self._unsent.append(line)

    def _tell_end(self) -> None:
        self._setting.tell(self)

    def _returned(self, trained: Trained) -> Outcome:
        if self.leaving.is_set() and not self.parts:
            return Outcome(TrialEnd.COMPLETE)
        why = "predict ended its process: it must return, and not call sys.exit()"
        return Outcome(TrialEnd.FAILED, error=why)
