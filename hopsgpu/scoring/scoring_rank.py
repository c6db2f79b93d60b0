"""The rank of an executor that scores parts, one after the other, as the driver knows it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from hopsgpu.attempts.attempt import AttemptResult
from hopsgpu.attempts.rank_call import Call
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.control.server import ControlServer
from hopsgpu.executors.item_placement import ItemEnd, Slot
from hopsgpu.executors.rank_group_run import (
    RankGroupListener,
    RankGroupOutcome,
    RankGroupRun,
    RankGroupSetting,
)
from hopsgpu.scoring.part_reports import (
    BEGUN,
    FAILED,
    READY,
    UNFIT,
    PartReport,
    PartReports,
)
from hopsgpu.scoring.part_scorer import END, part_line


class ScoringEvents(Protocol):
    """Is notified of the progress of ranks that score parts, in the ranks' threads."""

    def on_rank_started(self, rank: ScoringRank) -> None: ...

    def on_report(self, rank: ScoringRank, report: PartReport) -> None: ...

    def on_rank_ended(self, rank: ScoringRank) -> None: ...


@dataclass(frozen=True)
class ScoringSetting(RankGroupSetting):
    """The values that all ranks of a score share."""

    events: ScoringEvents


class _ScoringListener(RankGroupListener):
    """Notifies the score of what a rank reports."""

    def __init__(self, rank: ScoringRank, setting: ScoringSetting) -> None:
        super().__init__(setting.board)
        self._rank = rank
        self._events = setting.events
        self._reports = PartReports()

    def on_start(self, rank: int) -> None:
        self._events.on_rank_started(self._rank)

    def on_record(self, rank: int, chunk: bytes) -> None:
        for report in self._reports.take(chunk):
            self._events.on_report(self._rank, report)


class ScoringRank(RankGroupRun):
    """The rank of an executor; only the score's thread calls its methods about parts.

    Args:
        number: number of the rank in the score.

    Attributes:
        executor: as given.
        parts: numbers of the parts that it has and has not completed, in its order.
        is_ready: whether it has the user's function, and its model.
        is_unfit: whether the user's function does not take small batches.
        has_all_parts: event that is set once it was told that no more parts come.
    """

    def __init__(
        self,
        number: int,
        executor: int,
        allocation: GangAllocation,
        call: Call,
        setting: ScoringSetting,
    ) -> None:
        listener = _ScoringListener(self, setting)
        super().__init__(number, (Slot(executor, 0),), allocation, call, setting, listener)
        self.executor = executor
        self.parts: list[int] = []
        self.is_ready = False
        self.is_unfit = False
        self.has_all_parts = threading.Event()
        self._server: ControlServer = allocation.server
        self._events = setting.events
        self._can_read = False
        self._unsent: list[str] = []
        self._current_part: int | None = None
        self._failed_part: int | None = None

    @property
    def label(self) -> str:
        return f"worker {self.number}"

    def add_part(self, part: int) -> None:
        """Hand over a part; the rank scores it after those that it has."""
        self.parts.append(part)
        self._send(part_line(part))

    def end_after_parts(self) -> None:
        """Have the rank end once it has scored the parts that it has."""
        self.has_all_parts.set()
        self._send(END)

    def send_unsent(self) -> None:
        """Send what was handed over before the rank's process could read."""
        self._can_read = True
        unsent, self._unsent = self._unsent, []
        for line in unsent:
            self._send(line)

    def record_report(self, report: PartReport) -> None:
        if report.event == READY:
            self.is_ready = True
        elif report.event == BEGUN:
            self._current_part = report.number
        elif report.event == FAILED:
            self._failed_part = report.number
        elif report.event == UNFIT:
            self.is_unfit = True

    @property
    def failed_part(self) -> int | None:
        """Return the part that a failure of the rank counts for; None if it counts for none."""
        if not self.is_ready:
            return None
        for part in (self._failed_part, self._current_part):
            if part in self.parts:
                return part
        # The rank ended before it had rows, or between two parts.
        return self.parts[0] if self.parts else None

    def _send(self, line: str) -> None:
        if self._can_read:
            self._server.send(self.executor, "hand", run_id=self.call.run_id, line=line)
        else:
            self._unsent.append(line)

    def _report_end(self) -> None:
        self._events.on_rank_ended(self)

    def _outcome_of(self, result: AttemptResult) -> RankGroupOutcome:
        if self.has_all_parts.is_set() and not self.parts:
            return RankGroupOutcome(ItemEnd.COMPLETE)
        why = "predict ended its process: it must return, and not call sys.exit()"
        return RankGroupOutcome(ItemEnd.FAILED, why)
