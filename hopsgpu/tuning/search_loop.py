"""The main loop of a search: one thread performs what `scheduler` decides."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable

from hopsgpu.attempts.rank_call import Call, PackedFunction, script_name
from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED
from hopsgpu.errors import HopsGpuError
from hopsgpu.rank.trial import Trial
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.tuning.deferred_work import DeferredWork
from hopsgpu.tuning.journal import Journal
from hopsgpu.tuning.sampler_thread import (
    Declined,
    News,
    Proposed,
    PruneRequested,
    SamplerExhausted,
    SamplerFailed,
    SamplerThread,
    as_user_error,
)
from hopsgpu.tuning.scheduler import Decision, Placement, Start, TrialEnd
from hopsgpu.tuning.search_board import SearchBoard, about
from hopsgpu.tuning.search_options import SearchArguments
from hopsgpu.tuning.slot_run import SlotRun
from hopsgpu.tuning.trial_loop import TrialLoop
from hopsgpu.tuning.trial_run import Begun, RendezvousCache, Reported, TrialRun, TrialSetting
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

_STATES = {TrialEnd.COMPLETE: COMPLETE, TrialEnd.PRUNED: PRUNED, TrialEnd.FAILED: FAILED}
_MOST_ERROR = 16 * 1024


# News of a trial (a TrialRun is over), and news of Optuna (None).
_News = Begun | Reported | TrialRun | None


class Searching(TrialLoop[_News]):
    """A running search.

    Args:
        arguments: the search's arguments.
        active: the search's run.
        sampler_thread: calls Optuna.
        journal: journal of the study.
        ended: number of the study's trials that ended earlier.
    """

    def __init__(
        self,
        arguments: SearchArguments,
        active: ActiveRun[SearchBoard],
        sampler_thread: SamplerThread,
        journal: Journal,
        ended: int,
    ) -> None:
        super().__init__(active, Placement(arguments.terms, ended=ended), arguments.timeout)
        self._arguments = arguments
        self._board = active.board
        self._sampler_thread = sampler_thread
        self._journal = journal
        self._proposed: dict[int, Proposed] = {}
        self._calls: dict[int, PackedFunction] = {}
        self._tries: dict[int, TrialRun] = {}
        self._later = DeferredWork()
        self._setting = TrialSetting(
            self._board,
            self._background,
            arguments.options.metric,
            RendezvousCache(),
            active.bounds,
            self._inbox.put,
        )

    def wake(self) -> None:
        """Have the search handle Optuna's news; may be called from any thread."""
        self._inbox.put(None)

    @property
    def _running(self) -> Iterable[SlotRun]:
        return self._tries.values()

    def _patience(self, now: float) -> float:
        return self._later.patience(now)

    def _close(self) -> None:
        self._do_later(time.monotonic(), hurry=True)

    def _prepare(self, decision: Decision, now: float) -> None:
        if decision.ask:
            log.debug("%s: requests %d proposals from Optuna", self._board.run_id, decision.ask)
            self._placement.asking += decision.ask
            # Queued behind the results that Optuna should know before it proposes.
            self._later.put(functools.partial(self._sampler_thread.ask, decision.ask), now)
        self._do_later(now, hurry=not self._placement.waiting)

    def _start(self, start: Start, allocator: ElasticAllocator, now: float) -> None:
        proposed = self._proposed[start.trial]
        call = self._call(proposed, start)
        gang = allocator.allocation_of([slot.executor for slot in start.slots])
        running = TrialRun(proposed, start.slots, gang, call, self._setting)
        self._tries[start.trial] = running
        self._later.started(start.trial)
        record_start = functools.partial(
            self._sampler_thread.started, start.trial, call.attempt + 1
        )
        self._later.put(record_start, now)
        self._board.started(running.report(), len(start.slots))
        self._begin()
        log.info(
            "%s: trial %d started on %s (try %d)",
            self._board.run_id,
            start.trial,
            running.hosts,
            call.attempt + 1,
        )
        running.start()

    def _call(self, proposed: Proposed, start: Start) -> Call:
        number = proposed.number
        attempt = proposed.tries + self._placement.tries(number) - 1
        return Call(
            self._active.plan,
            self._calls[number],
            f"{self._board.run_id}-trial-{number}",
            self._directory / "trials" / str(number),
            attempt,
            interface=self._interface,
            python_env=self._python_env,
            slots={slot.executor: slot.index for slot in start.slots},
            trial=Trial(number, proposed.params),
            memory_share=self._arguments.memory_share,
            script=script_name(),
        )

    def _late(self, timeout: float) -> None:
        log.info("%s: search_timeout has passed: stops the trials", self._board.run_id)
        self._board.warn(
            f"search_timeout={timeout:g} s has passed: the running trials were stopped; resume="
            " continues the search"
        )

    def _observe(self, allocator: ElasticAllocator) -> None:
        self._follow_journal()

    def _follow_journal(self) -> None:
        self._background.offer(f"the journal of {self._board.run_id}", self._journal.try_follow)

    def _handle(self, news: _News, allocator: ElasticAllocator) -> None:
        if news is None:
            for told in self._sampler_thread.news():
                self._learn(told, allocator)
        elif isinstance(news, Begun):
            self._later.begun(news.number)
        elif isinstance(news, TrialRun):
            self._end(news, allocator)
        else:
            self._report(news)

    def _report(self, reported: Reported) -> None:
        """Report a trial's metrics to Optuna."""
        step, value = reported.values[-1]
        self._board.reported(reported.number, step, value)
        # Queued behind the ends of other trials, which the pruner compares with.
        report = functools.partial(self._sampler_thread.report, reported.number, reported.values)
        self._later.put(report, time.monotonic())

    def _learn(self, news: News, allocator: ElasticAllocator) -> None:
        if isinstance(news, Proposed):
            try:
                self._calls[news.number] = self._arguments.function_with(news.arguments)
            except HopsGpuError as error:
                self._fail(error)
                return
            log.debug("%s: Optuna proposed trial %d", self._board.run_id, news.number)
            self._proposed[news.number] = news
            self._placement.proposed(news.number)
        elif isinstance(news, Declined):
            log.info("%s: the space rejected trial %d", self._board.run_id, news.number)
            self._placement.declined()
        elif isinstance(news, SamplerExhausted):
            log.info("%s: the sampler has no more trials", self._board.run_id)
            self._placement.unproposed()
        elif isinstance(news, SamplerFailed):
            self._fail(as_user_error(news.error))
        elif isinstance(news, PruneRequested) and news.number in self._tries:
            running = self._tries[news.number]
            log.info("%s: the pruner ends trial %d", self._board.run_id, news.number)
            for key in running.keys:
                allocator.server.send(key, "prune", run_id=running.call.run_id)

    def _end(self, running: TrialRun, allocator: ElasticAllocator) -> None:
        """Handle the end of a try: record the end of its trial, or put the trial back."""
        number, outcome = running.proposed.number, running.outcome
        del self._tries[number]
        self._later.begun(number)
        self._later.put(running.followed.set, time.monotonic())
        self._ended(running, allocator)
        how = self._placement.left(number, outcome.how, time.monotonic())
        log.info(
            "%s: trial %d on %s ended: %s%s",
            self._board.run_id,
            number,
            running.hosts,
            outcome.how.value,
            "" if how in _STATES else "; it is put back and will start again",
        )
        terms, gpus = self._arguments.terms, self._active.plan.shape.gpus
        losses = running.losses(gpus / terms.slots)
        if how not in _STATES:
            self._board.left(number, len(running.slots), None, losses)
            return
        del self._calls[number], self._proposed[number]
        last = self._board.running(number)
        assert last is not None, "_start recorded it"
        value = {TrialEnd.COMPLETE: outcome.value, TrialEnd.PRUNED: last.value}.get(how)
        report = dataclasses.replace(
            last,
            state=_STATES[how],
            value=value,
            metrics=outcome.metrics,
            ended=time.time(),
            error=outcome.error[-_MOST_ERROR:],
        )
        self._board.left(number, len(running.slots), report, losses)
        if self._placement.has_failed:
            failed = count_of(self._placement.failures, "trial")
            bound = terms.max_failures
            self._fail(
                HopsGpuError(
                    f"{failed} failed, but max_failures={bound}; the last error: {report.error}"
                )
            )
        result = value if how is TrialEnd.COMPLETE else None
        record_end = functools.partial(
            self._sampler_thread.tell, number, how, result, about(report)
        )
        self._later.put(record_end, time.monotonic())

    def _do_later(self, now: float, *, hurry: bool) -> None:
        if works := self._later.due(now, hurry=hurry):
            for work in works:
                work()
            self._follow_journal()
