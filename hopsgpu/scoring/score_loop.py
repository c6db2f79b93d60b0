"""The main loop of a score: hands parts to workers, and keeps what they have scored."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hopsgpu.attempts.rank_call import Call, PackedFunction, script_name
from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.core.scores import FailedPart
from hopsgpu.errors import HopsGpuError
from hopsgpu.packaging.pickling import name_of
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.scoring.part_reports import DONE, READY, PartReport
from hopsgpu.scoring.part_worker import Opened, PartWorker, Told, WorkerSetting
from hopsgpu.scoring.parts import Part, place_of
from hopsgpu.scoring.score_board import ScoreBoard
from hopsgpu.scoring.score_options import TRIES, ScoreArguments
from hopsgpu.scoring.score_plan import ScorePlan
from hopsgpu.scoring.table_output import TableOutput
from hopsgpu.tuning.scheduler import Placement, Start, TrialEnd
from hopsgpu.tuning.slot_run import SlotRun
from hopsgpu.tuning.trial_loop import TrialLoop
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

# Directory of the run's directory, with one for the logs of each worker.
WORKERS = "workers"
# Renames on the lake at a time.
_KEEPERS = 4
# In which a worker without parts ends by itself.
_LEAVE_SECONDS = 10.0
_MOST_ERROR = 16 * 1024


@dataclass(frozen=True)
class _Kept:
    """News of the output: a part's file is kept, or could not be."""

    part: Part
    error: BaseException | None


_News = Opened | Told | PartWorker | _Kept


class Scoring(TrialLoop[_News]):
    """A running score; a part is a trial of the scheduler.

    Args:
        arguments: the score's arguments.
        active: the score's run.
        plan: the parts.
        output: where they are kept.
        function: what the workers run.
        done: numbers of the parts that an earlier run of the score has kept.
        first: number of its first worker.
    """

    def __init__(
        self,
        arguments: ScoreArguments,
        active: ActiveRun[ScoreBoard],
        plan: ScorePlan,
        output: TableOutput,
        function: PackedFunction,
        done: frozenset[int],
        first: int = 0,
    ) -> None:
        terms = replace(arguments.terms, trials=len(plan.parts))
        placement = Placement(terms, ended=len(done))
        for part in plan.parts:
            if part.number not in done:
                placement.asking += 1
                placement.proposed(part.number)
        super().__init__(active, placement, arguments.timeout)
        self._board = active.board
        self._plan = plan
        self._output = output
        self._function = function
        self._predict = arguments.options.predict
        self._skips = arguments.options.on_error == "skip"
        self._workers: dict[int, PartWorker] = {}
        self._leaving: dict[PartWorker, float] = {}
        self._busy: set[int] = set()
        self._started = first
        # Processes that failed one after the other before they were ready.
        self._unready = 0
        self._keeping = 0
        self._keepers: ThreadPoolExecutor | None = None
        self._setting = WorkerSetting(self._board, self._background, active.bounds, self._inbox.put)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Have the threads that keep parts, within the context; the loop runs in it."""
        with ThreadPoolExecutor(_KEEPERS, "hopsgpu-score-keep") as self._keepers:
            yield

    @property
    def _running(self) -> Iterable[SlotRun]:
        return [*self._workers.values(), *self._leaving]

    def _awaits_more(self) -> bool:
        return bool(self._leaving or self._keeping)

    def _start(self, start: Start, allocator: ElasticAllocator, now: float) -> None:
        executor = start.slots[0].executor
        worker = self._workers.get(executor)
        if worker is None:
            worker = self._begun(executor, allocator)
        log.debug("%s: worker %d gets part %d", self.run_id, worker.number, start.trial)
        worker.give(start.trial)
        self._note_busy(worker)

    def _begun(self, executor: int, allocator: ElasticAllocator) -> PartWorker:
        number, self._started = self._started, self._started + 1
        call = Call(
            self._active.plan,
            self._function,
            f"{self.run_id}-worker-{number}",
            self._directory / WORKERS / str(number),
            0,
            interface=self._interface,
            python_env=self._python_env,
            script=script_name(),
        )
        worker = PartWorker(
            number, executor, allocator.allocation_of([executor]), call, self._setting
        )
        self._workers[executor] = worker
        self._begin()
        log.info("%s: worker %d started on %s", self.run_id, number, worker.hosts)
        worker.start()
        return worker

    def _note_busy(self, worker: PartWorker) -> None:
        if bool(worker.parts) == (worker.executor in self._busy):
            return
        if worker.parts:
            self._busy.add(worker.executor)
            self._board.busy(1)
        else:
            self._busy.remove(worker.executor)
            self._board.busy(-1)

    def _let_go(self, keys: tuple[int, ...], allocator: ElasticAllocator) -> None:
        for key in keys:
            worker = self._workers.pop(key, None)
            if worker is None:
                allocator.release_executors([key])
            else:
                worker.leave()
                self._leaving[worker] = time.monotonic()

    def _observe(self, allocator: ElasticAllocator) -> None:
        now = time.monotonic()
        for worker, since in self._leaving.items():
            if now >= since + _LEAVE_SECONDS:
                worker.stop()

    def _late(self, timeout: float) -> None:
        self._fail(
            HopsGpuError(
                f"score_timeout={timeout:g} s has passed: the score was stopped, with"
                f" {self._board.rows_kept:,} rows on the lake; resume={self.run_id!r} continues it"
            )
        )

    def _handle(self, news: _News, allocator: ElasticAllocator) -> None:
        if isinstance(news, Opened):
            news.worker.opened()
        elif isinstance(news, Told):
            self._take_report(news.worker, news.report)
        elif isinstance(news, _Kept):
            self._keeping -= 1
            if news.error is None:
                self._board.kept(news.part.number, news.part.rows)
            else:
                self._fail(news.error)
        else:
            self._worker_ended(news, allocator)

    def _take_report(self, worker: PartWorker, report: PartReport) -> None:
        worker.reported(report)
        if report.event == READY:
            self._unready = 0
        if report.number not in worker.parts:
            return
        self._board.scored(report.number, report.rows)
        if report.event != DONE:
            return
        part = self._plan.parts[report.number]
        try:
            self._plan.check(part, report.rows, report.schema)
        except HopsGpuError as error:
            self._fail(error)
            return
        log.debug("%s: worker %d has scored part %d", self.run_id, worker.number, part.number)
        worker.parts.remove(part.number)
        self._note_busy(worker)
        self._placement.left(part.number, TrialEnd.COMPLETE, time.monotonic())
        self._keep(part, report.file)

    def _keep(self, part: Part, draft: str) -> None:
        """Have a part's file kept, in another thread."""
        assert self._keepers is not None, "the loop runs within keeping()"
        self._keeping += 1
        kept = self._keepers.submit(self._output.keep, part.number, draft)

        def tell(future: Future[None]) -> None:
            self._inbox.put(_Kept(part, future.exception()))

        kept.add_done_callback(tell)

    def _worker_ended(self, worker: PartWorker, allocator: ElasticAllocator) -> None:
        """Handle the end of a worker: put its parts back, or count one of them as failed."""
        outcome, blamed = worker.outcome, worker.blamed
        log.info(
            "%s: worker %d on %s ended: %s%s",
            self.run_id,
            worker.number,
            worker.hosts,
            outcome.how.value,
            f", with {count_of(len(worker.parts), 'part')}" if worker.parts else "",
        )
        if self._workers.get(worker.executor) is worker:
            del self._workers[worker.executor]
        self._ended(worker, allocator)
        if not worker.is_ready and outcome.how in (TrialEnd.FAILED, TrialEnd.LOST):
            self._not_ready(outcome.error)
        if worker.is_unfit and outcome.how is TrialEnd.FAILED:
            self._unfit(outcome.error)
        # The last one first: each of those that are put back is the next to start.
        for number in reversed(worker.parts):
            self._board.scored(number, 0)
            how = outcome.how if number == blamed else TrialEnd.STOPPED
            if self._placement.left(number, how, time.monotonic()) is TrialEnd.FAILED:
                self._part_failed(self._plan.parts[number], outcome.error)
        worker.parts = []
        self._note_busy(worker)
        self._board.lost(worker.losses(self._active.plan.shape.gpus))
        if self._leaving.pop(worker, None) is not None:
            allocator.release_executors([worker.executor])

    def _not_ready(self, error: str) -> None:
        """Count a process that failed before it could score: none of the rows is to blame."""
        self._unready += 1
        if self._unready < TRIES:
            return
        name = name_of(self._predict)
        self._fail(
            HopsGpuError(
                f"no row was at fault: {TRIES} processes, one after the other, failed before they"
                f" could call {name}, while it was imported or made, or its model was fetched; the"
                f" last time: {error[-_MOST_ERROR:]}\nThe rows that were scored are kept:"
                f" resume={self.run_id!r} continues the score"
            )
        )

    def _unfit(self, error: str) -> None:
        """End the score, because each process would fail with some part's last batch."""
        self._fail(
            HopsGpuError(
                f"no row was at fault: {name_of(self._predict)} does not take batches of all sizes"
                f" that the table has: {error[-_MOST_ERROR:]}\nThe rows that were scored are kept:"
                f" resume={self.run_id!r} continues the score"
            )
        )

    def _part_failed(self, part: Part, error: str) -> None:
        place = place_of(self._plan.source, part)
        failed = FailedPart(part.first, part.rows, place, TRIES, error[-_MOST_ERROR:])
        self._board.left_out(part.number, failed)
        if self._skips:
            self._board.warn(f"{place} failed {TRIES} times, and are left out of the output")
            return
        self._fail(
            HopsGpuError(
                f"{place} failed {TRIES} times; the last time: {failed.error}\nThe other rows that"
                f" were scored are kept: resume={self.run_id!r} continues the score"
            )
        )
