"""The main loop of a search: one thread starts trials, and exchanges them with Optuna."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Sequence

from hopsgpu.attempts.rank_call import Call, PackedFunction
from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED
from hopsgpu.errors import HopsGpuError
from hopsgpu.executors.item_placement import Decision, ItemEnd, Placement, Start
from hopsgpu.executors.placement_loop import PlacementLoop
from hopsgpu.executors.rank_group_run import RankGroupRun
from hopsgpu.packaging.python_env.environment import PythonEnv
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
from hopsgpu.tuning.search_board import SearchBoard, about
from hopsgpu.tuning.search_options import SearchArguments
from hopsgpu.tuning.trial_run import RendezvousCache, TrialRun, TrialSetting
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

_STATES = {ItemEnd.COMPLETE: COMPLETE, ItemEnd.PRUNED: PRUNED, ItemEnd.FAILED: FAILED}
_MAX_ERROR_CHARACTERS = 16 * 1024


class SearchLoop(PlacementLoop):
    """The loop of a search; the methods of `TrialEvents` are those that trials call.

    Args:
        ended: number of the study's trials that ended earlier.
    """

    def __init__(
        self,
        arguments: SearchArguments,
        active: ActiveRun[SearchBoard],
        sampler_thread: SamplerThread,
        journal: Journal,
        ended: int,
        python_env: PythonEnv | None,
    ) -> None:
        placement = Placement(arguments.terms, ended=ended)
        super().__init__(active, placement, arguments.timeout, python_env)
        self._arguments = arguments
        self._board = active.board
        self._sampler_thread = sampler_thread
        self._journal = journal
        self._proposed: dict[int, Proposed] = {}
        self._functions: dict[int, PackedFunction] = {}
        self._tries: dict[int, TrialRun] = {}
        self._deferred = DeferredWork()
        self._setting = TrialSetting(
            active.board,
            active.background,
            active.bounds,
            arguments.options.metric,
            RendezvousCache(),
            self,
        )

    def on_trial_started(self, number: int) -> None:
        self.post(functools.partial(self._deferred.record_started, number))

    def on_report(self, number: int, values: Sequence[tuple[int, float]]) -> None:
        self.post(functools.partial(self._report, number, values))

    def on_trial_ended(self, trial: TrialRun) -> None:
        self.post(functools.partial(self._end, trial))

    def on_sampler_news(self) -> None:
        """Handle that Optuna's thread has news; may be called from any thread."""
        self.post(self._handle_news)

    @property
    def _running(self) -> Iterable[RankGroupRun]:
        return self._tries.values()

    def _seconds_until_due(self, now: float) -> float:
        return self._deferred.seconds_until_due(now)

    def _close(self) -> None:
        self._do_deferred(time.monotonic(), is_urgent=True)
        super()._close()

    def _on_decision(self, decision: Decision, now: float) -> None:
        if decision.proposals:
            log.debug("%s: requests %d proposals from Optuna", self.run_id, decision.proposals)
            self._placement.requested += decision.proposals
            # Queued behind the results that Optuna should know before it proposes.
            ask = functools.partial(self._sampler_thread.ask, decision.proposals)
            self._deferred.add(ask, now)
        self._do_deferred(now, is_urgent=not self._placement.waiting)

    def _start(self, start: Start, now: float) -> None:
        proposed = self._proposed[start.item]
        call = self._call(proposed, start)
        executors = self.allocator.allocation_of([slot.executor for slot in start.slots])
        trial = TrialRun(proposed, start.slots, executors, call, self._setting)
        self._tries[start.item] = trial
        self._deferred.record_starting(start.item)
        record_start = functools.partial(
            self._sampler_thread.record_start, start.item, call.attempt + 1
        )
        self._deferred.add(record_start, now)
        self._board.record_start(trial.report(), len(start.slots))
        self._record_first_start()
        log.info(
            "%s: trial %d started on %s (try %d)",
            self.run_id,
            start.item,
            trial.hosts,
            call.attempt + 1,
        )
        trial.start()

    def _call(self, proposed: Proposed, start: Start) -> Call:
        number = proposed.number
        return self._make_call(
            self._functions[number],
            "trial",
            number,
            proposed.tries + self._placement.count_tries(number) - 1,
            slots={slot.executor: slot.index for slot in start.slots},
            trial=Trial(number, proposed.params),
            memory_share=self._arguments.memory_share,
        )

    def _on_timeout(self, timeout: float) -> None:
        log.info("%s: search_timeout has passed: stops the trials", self.run_id)
        self._board.warn(
            f"search_timeout={timeout:g} s has passed: the running trials were stopped; resume="
            " continues the search"
        )

    def _on_poll(self) -> None:
        super()._on_poll()
        self._follow_journal()

    def _follow_journal(self) -> None:
        self._active.background.try_put(f"the journal of {self.run_id}", self._journal.try_follow)

    def _report(self, number: int, values: Sequence[tuple[int, float]]) -> None:
        self._board.record_report(number, *values[-1])
        # Queued behind the ends of other trials, which the pruner compares with.
        report = functools.partial(self._sampler_thread.report, number, values)
        self._deferred.add(report, time.monotonic())

    def _handle_news(self) -> None:
        for news in self._sampler_thread.take_news():
            self._handle_one(news)

    def _handle_one(self, news: News) -> None:
        if isinstance(news, Proposed):
            try:
                self._functions[news.number] = self._arguments.function_with(news.arguments)
            except HopsGpuError as error:
                self._fail(error)
                return
            log.debug("%s: Optuna proposed trial %d", self.run_id, news.number)
            self._proposed[news.number] = news
            self._placement.add_item(news.number)
        elif isinstance(news, Declined):
            log.info("%s: the space rejected trial %d", self.run_id, news.number)
            self._placement.record_decline()
        elif isinstance(news, SamplerExhausted):
            log.info("%s: the sampler has no more trials", self.run_id)
            self._placement.record_exhaustion()
        elif isinstance(news, SamplerFailed):
            self._fail(as_user_error(news.error))
        elif isinstance(news, PruneRequested) and news.number in self._tries:
            trial = self._tries[news.number]
            log.info("%s: the pruner ends trial %d", self.run_id, news.number)
            for key in trial.keys:
                self.allocator.server.send(key, "prune", run_id=trial.call.run_id)

    def _end(self, trial: TrialRun) -> None:
        """Handle the end of a try: record the end of its trial, or put the trial back."""
        number, outcome = trial.number, trial.outcome
        del self._tries[number]
        self._deferred.record_started(number)
        self._deferred.add(trial.next_trial_started.set, time.monotonic())
        self._take_end(trial)
        how = self._placement.record_end(number, outcome.how, time.monotonic())
        log.info(
            "%s: trial %d on %s ended: %s%s",
            self.run_id,
            number,
            trial.hosts,
            outcome.how.value,
            "" if how in _STATES else "; it is put back and will start again",
        )
        terms, gpus = self._arguments.terms, self._active.plan.shape.gpus
        losses = trial.losses(gpus / terms.slots)
        if how not in _STATES:
            self._board.record_end(number, len(trial.slots), None, losses)
            return
        del self._functions[number], self._proposed[number]
        last = self._board.find_running(number)
        assert last is not None, "_start recorded it"
        value = {ItemEnd.COMPLETE: trial.value, ItemEnd.PRUNED: last.value}.get(how)
        report = dataclasses.replace(
            last,
            state=_STATES[how],
            value=value,
            metrics=trial.metrics,
            ended=time.time(),
            error=outcome.error[-_MAX_ERROR_CHARACTERS:],
        )
        self._board.record_end(number, len(trial.slots), report, losses)
        if self._placement.has_failed:
            failed = count_of(self._placement.failures, "trial")
            self._fail(
                HopsGpuError(
                    f"{failed} failed, but max_failures={terms.max_failures}; the last error:"
                    f" {report.error}"
                )
            )
        result = value if how is ItemEnd.COMPLETE else None
        record_end = functools.partial(
            self._sampler_thread.record_end, number, how, result, about(report)
        )
        self._deferred.add(record_end, time.monotonic())

    def _do_deferred(self, now: float, *, is_urgent: bool) -> None:
        if works := self._deferred.take_due(now, is_urgent=is_urgent):
            for work in works:
                work()
            self._follow_journal()
