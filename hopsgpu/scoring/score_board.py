"""The status board of a score: how its parts and executors are, and how fast it goes."""

from __future__ import annotations

import time
from collections import deque

from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.core.scores import FailedPart, ScoreStatus
from hopsgpu.display.progress import ShieldedScore
from hopsgpu.executors.executors_board import ExecutorsBoard
from hopsgpu.executors.item_placement import PlacementTerms

# The time over which the rate is averaged, and after which there is one.
_RATE_SECONDS = 30.0
_MIN_SECONDS = 2.0


class ScoreBoard(ExecutorsBoard):
    """The status board of a score."""

    def __init__(
        self, run_id: str, terms: PlacementTerms, gpus: int, progress: ShieldedScore
    ) -> None:
        super().__init__(run_id, terms, gpus, progress)
        self._progress = progress
        self._rows = self._parts = self._done = 0
        self._complete = 0
        self._partial: dict[int, int] = {}
        self._failed: list[FailedPart] = []
        self._past: deque[tuple[float, int]] = deque()

    def set_parts(self, rows: int, parts: int, kept_parts: int, kept_rows: int) -> None:
        """Record the parts of the table.

        Args:
            kept_parts, kept_rows: those that an earlier run of the score has kept.
        """
        with self._lock:
            self._rows, self._parts = rows, parts
            self._done, self._complete = kept_parts, kept_rows

    def record_busy(self, change: int) -> None:
        """Record that a number of executors began to score, or have nothing to score (below 0)."""
        with self._lock:
            self._account.change_slots(change, time.time())

    def add_losses(self, losses: RankLosses) -> None:
        with self._lock:
            self._account.add_losses(losses)

    def record_rows(self, number: int, rows: int) -> None:
        """Record how many rows of a part have been scored; 0 for one that is put back."""
        with self._lock:
            self._partial[number] = rows

    def record_kept(self, number: int, rows: int) -> None:
        with self._lock:
            self._partial.pop(number, None)
            self._done += 1
            self._complete += rows

    def record_left_out(self, number: int, part: FailedPart) -> None:
        with self._lock:
            self._partial.pop(number, None)
            self._failed.append(part)

    @property
    def failed_parts(self) -> tuple[FailedPart, ...]:
        """Return the parts that are left out, in the table's order."""
        with self._lock:
            return tuple(sorted(self._failed, key=lambda part: part.first))

    @property
    def rows_kept(self) -> int:
        """Return the number of rows of the parts that are on the lake."""
        with self._lock:
            return self._complete

    def show(self) -> None:
        self._progress.status(self.status())

    def line(self, number: int, rank: int, host: str, *texts: str) -> None:
        self._progress.line(number, host, *texts)

    def status(self) -> ScoreStatus:
        with self._lock:
            scored, rate, seconds_left = self._pace()
            return ScoreStatus(
                run_id=self.run_id,
                state=self._state.value,
                elapsed=self._elapsed_seconds,
                rows=self._rows,
                scored=scored,
                parts=self._parts,
                done=self._done,
                failed=len(self._failed),
                rate=rate,
                seconds_left=seconds_left,
                executors=self._ready_count,
                most=self._max_count,
                gpus=self._gpus,
                waiting_for=self._why.sentence,
                waiting_details=self._why.details,
                moments=tuple(self._account.moments),
                gpu_seconds=self._gpu_seconds(),
                application=self.application,
                queue=self.queue,
            )

    def _pace(self) -> tuple[int, float | None, float | None]:
        """Return the rows scored, the rows scored in a second, and the seconds that are left."""
        scored = self._complete + sum(self._partial.values())
        rate = self._rate(scored, time.monotonic())
        remaining = self._rows - scored - sum(part.rows for part in self._failed)
        return scored, rate, max(remaining, 0) / rate if rate else None

    def _rate(self, scored: int, now: float) -> float | None:
        """Return the rows scored in a second, over the last half minute of work."""
        if self._timeline.started is None:
            self._past = deque([(now, scored)])
            return None
        self._past.append((now, scored))
        while len(self._past) > 2 and self._past[1][0] <= now - _RATE_SECONDS:
            self._past.popleft()
        since, before = self._past[0]
        if now - since < _MIN_SECONDS or scored <= before:
            return None
        return (scored - before) / (now - since)
