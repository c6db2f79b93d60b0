"""The main loop of a score: hands parts to ranks, and keeps what they have scored."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from hopsgpu.attempts.rank_call import PackedFunction
from hopsgpu.core.scores import FailedPart
from hopsgpu.errors import HopsGpuError
from hopsgpu.executors.item_placement import ItemEnd, Placement, Start
from hopsgpu.executors.placement_loop import PlacementLoop
from hopsgpu.executors.rank_group_run import RankGroupRun
from hopsgpu.packaging.pickling import name_of
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.scoring.part_reports import DONE, READY, PartReport
from hopsgpu.scoring.parts import Part, place_of
from hopsgpu.scoring.score_board import ScoreBoard
from hopsgpu.scoring.score_options import TRIES, ScoreArguments
from hopsgpu.scoring.score_plan import ScorePlan
from hopsgpu.scoring.scoring_rank import ScoringRank, ScoringSetting
from hopsgpu.scoring.table_output import TableOutput
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

# Directory below the run's directory; each rank has a directory for its logs there.
WORKERS = "workers"
# Renames on the lake at a time.
_KEEP_THREADS = 4
# A rank without parts is stopped if it does not end by itself within this time.
_END_SECONDS = 10.0
_MAX_ERROR_CHARACTERS = 16 * 1024


class ScoreLoop(PlacementLoop):
    """The loop of a score, whose items are parts; the methods of `ScoringEvents` are for its ranks.

    Args:
        kept_parts: numbers of the parts that an earlier run of the score has kept.
        first: number of its first rank.
    """

    def __init__(
        self,
        arguments: ScoreArguments,
        active: ActiveRun[ScoreBoard],
        plan: ScorePlan,
        output: TableOutput,
        function: PackedFunction,
        kept_parts: frozenset[int],
        python_env: PythonEnv | None,
        first: int = 0,
    ) -> None:
        terms = replace(arguments.terms, items=len(plan.parts))
        placement = Placement(terms, ended=len(kept_parts))
        for part in plan.parts:
            if part.number not in kept_parts:
                placement.requested += 1
                placement.add_item(part.number)
        super().__init__(active, placement, arguments.timeout, python_env)
        self._board = active.board
        self._plan = plan
        self._output = output
        self._function = function
        self._predict = arguments.options.predict
        self._skips = arguments.options.on_error == "skip"
        self._ranks: dict[int, ScoringRank] = {}
        # Ranks that end after their parts, and since when.
        self._ending_ranks: dict[ScoringRank, float] = {}
        self._busy: set[int] = set()
        self._next_number = first
        # Processes that failed one after the other before they were ready.
        self._unready_count = 0
        self._keeping_count = 0
        self._keep_threads: ThreadPoolExecutor | None = None
        self._setting = ScoringSetting(active.board, active.background, active.bounds, self)

    def on_rank_started(self, rank: ScoringRank) -> None:
        self.post(rank.send_unsent)

    def on_report(self, rank: ScoringRank, report: PartReport) -> None:
        self.post(functools.partial(self._take_report, rank, report))

    def on_rank_ended(self, rank: ScoringRank) -> None:
        self.post(functools.partial(self._end, rank))

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Provide the threads that keep parts; the loop runs within this context."""
        with ThreadPoolExecutor(_KEEP_THREADS, "hopsgpu-score-keep") as self._keep_threads:
            yield

    @property
    def _running(self) -> Iterable[RankGroupRun]:
        return [*self._ranks.values(), *self._ending_ranks]

    def _is_ending(self) -> bool:
        return bool(self._ending_ranks or self._keeping_count)

    def _start(self, start: Start, now: float) -> None:
        executor = start.slots[0].executor
        rank = self._ranks.get(executor) or self._start_rank(executor)
        log.debug("%s: worker %d gets part %d", self.run_id, rank.number, start.item)
        rank.add_part(start.item)
        self._note_busy(rank)

    def _start_rank(self, executor: int) -> ScoringRank:
        number, self._next_number = self._next_number, self._next_number + 1
        call = self._make_call(self._function, "worker", number)
        rank = ScoringRank(
            number, executor, self.allocator.allocation_of([executor]), call, self._setting
        )
        self._ranks[executor] = rank
        self._record_first_start()
        log.info("%s: worker %d started on %s", self.run_id, number, rank.hosts)
        rank.start()
        return rank

    def _note_busy(self, rank: ScoringRank) -> None:
        if bool(rank.parts) == (rank.executor in self._busy):
            return
        if rank.parts:
            self._busy.add(rank.executor)
            self._board.record_busy(1)
        else:
            self._busy.remove(rank.executor)
            self._board.record_busy(-1)

    def _release(self, keys: Collection[int]) -> None:
        """Release executors without parts; those that have a rank once it has ended."""
        for key in keys:
            if (rank := self._ranks.pop(key, None)) is not None:
                rank.end_after_parts()
                self._ending_ranks[rank] = time.monotonic()
        if idle := set(keys) - {rank.executor for rank in self._ending_ranks}:
            super()._release(idle)

    def _on_poll(self) -> None:
        now = time.monotonic()
        for rank, since in self._ending_ranks.items():
            if now >= since + _END_SECONDS:
                rank.stop()
        super()._on_poll()

    def _on_timeout(self, timeout: float) -> None:
        self._fail(
            HopsGpuError(
                f"score_timeout={timeout:g} s has passed: the score was stopped, with"
                f" {self._board.rows_kept:,} rows on the lake; resume={self.run_id!r} continues it"
            )
        )

    def _take_report(self, rank: ScoringRank, report: PartReport) -> None:
        rank.record_report(report)
        if report.event == READY:
            self._unready_count = 0
        if report.number not in rank.parts:
            return
        self._board.record_rows(report.number, report.rows)
        if report.event != DONE:
            return
        part = self._plan.parts[report.number]
        try:
            self._plan.check(part, report.rows, report.schema)
        except HopsGpuError as error:
            self._fail(error)
            return
        log.debug("%s: worker %d has scored part %d", self.run_id, rank.number, part.number)
        rank.parts.remove(part.number)
        self._note_busy(rank)
        self._placement.record_end(part.number, ItemEnd.COMPLETE, time.monotonic())
        self._keep(part, report.file)

    def _keep(self, part: Part, draft: str) -> None:
        """Have a part's file kept, in another thread."""
        assert self._keep_threads is not None, "the loop runs within keeping()"
        self._keeping_count += 1
        kept = self._keep_threads.submit(self._output.keep, part.number, draft)
        kept.add_done_callback(
            lambda future: self.post(lambda: self._record_kept(part, future.exception()))
        )

    def _record_kept(self, part: Part, error: BaseException | None) -> None:
        self._keeping_count -= 1
        if error is None:
            self._board.record_kept(part.number, part.rows)
        else:
            self._fail(error)

    def _end(self, rank: ScoringRank) -> None:
        """Handle the end of a rank: put its parts back, or count one of them as failed."""
        outcome, failed_part = rank.outcome, rank.failed_part
        log.info(
            "%s: worker %d on %s ended: %s%s",
            self.run_id,
            rank.number,
            rank.hosts,
            outcome.how.value,
            f", with {count_of(len(rank.parts), 'part')}" if rank.parts else "",
        )
        if self._ranks.get(rank.executor) is rank:
            del self._ranks[rank.executor]
        self._take_end(rank)
        if not rank.is_ready and outcome.how in (ItemEnd.FAILED, ItemEnd.LOST):
            self._count_unready(outcome.error)
        if rank.is_unfit and outcome.how is ItemEnd.FAILED:
            self._fail_unfit(outcome.error)
        # The last part first: each part that is put back is the next to start.
        for number in reversed(rank.parts):
            self._board.record_rows(number, 0)
            how = outcome.how if number == failed_part else ItemEnd.STOPPED
            if self._placement.record_end(number, how, time.monotonic()) is ItemEnd.FAILED:
                self._fail_part(self._plan.parts[number], outcome.error)
        rank.parts = []
        self._note_busy(rank)
        self._board.add_losses(rank.losses(self._active.plan.shape.gpus))
        if self._ending_ranks.pop(rank, None) is not None:
            self.allocator.release_executors([rank.executor])

    def _count_unready(self, error: str) -> None:
        """Count a process that failed before it could score: none of the rows is to blame."""
        self._unready_count += 1
        if self._unready_count < TRIES:
            return
        name = name_of(self._predict)
        self._fail(
            HopsGpuError(
                f"no row was at fault: {TRIES} processes, one after the other, failed before they"
                f" could call {name}, while it was imported or made, or its model was fetched; the"
                f" last time: {error[-_MAX_ERROR_CHARACTERS:]}\nThe rows that were scored are kept:"
                f" resume={self.run_id!r} continues the score"
            )
        )

    def _fail_unfit(self, error: str) -> None:
        """End the score, because each process would fail with some part's last batch."""
        self._fail(
            HopsGpuError(
                f"no row was at fault: {name_of(self._predict)} does not take batches of all sizes"
                f" that the table has: {error[-_MAX_ERROR_CHARACTERS:]}\nThe rows that were scored"
                f" are kept: resume={self.run_id!r} continues the score"
            )
        )

    def _fail_part(self, part: Part, error: str) -> None:
        place = place_of(self._plan.source, part)
        failed = FailedPart(part.first, part.rows, place, TRIES, error[-_MAX_ERROR_CHARACTERS:])
        self._board.record_left_out(part.number, failed)
        if self._skips:
            self._board.warn(f"{place} failed {TRIES} times, and are left out of the output")
            return
        self._fail(
            HopsGpuError(
                f"{place} failed {TRIES} times; the last time: {failed.error}\nThe other rows that"
                f" were scored are kept: resume={self.run_id!r} continues the score"
            )
        )
