"""The main loop of a search: one thread performs what `scheduler` decides."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import queue
import random
import sys
import time
from collections.abc import Iterator

from hopsgpu.backends.elastic_executors import ElasticLease
from hopsgpu.control.events import Event
from hopsgpu.core.gang import Exclusions, GangState, backoff_seconds
from hopsgpu.core.trials import COMPLETE, FAILED, PRUNED
from hopsgpu.errors import Cancelled, HopsGpuError
from hopsgpu.launcher.active_run import ActiveRun
from hopsgpu.launcher.function_shipping import PackedFunction
from hopsgpu.launcher.rank_call import Call, script_name
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.rank.trial import Trial
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
from hopsgpu.tuning.trial_run import Begun, RendezvousCache, Reported, TrialRun, TrialSetting
from hopsgpu.units import counted

log = logging.getLogger(__name__)

# How often the loop checks for what no event announces: that executors can no longer arrive, that
# the search was cancelled, or that its time is over.
_LOOK_SECONDS = 0.25
# A thread that has an event waits one interval for each other thread that computes. Python's
# default, 5 ms, is several times what the driver needs to start a trial.
_SWITCH_SECONDS = 0.0005
_LOGS_SECONDS = 60.0
_MOST_TAKEN = 256
_STATES = {TrialEnd.COMPLETE: COMPLETE, TrialEnd.PRUNED: PRUNED, TrialEnd.FAILED: FAILED}
_MOST_ERROR = 16 * 1024


# What the search's thread handles: an executor that arrives or leaves, news of a trial (a TrialRun
# is over), and news of Optuna (None).
_Item = Event | Begun | Reported | TrialRun | None


@contextlib.contextmanager
def quick_switching() -> Iterator[None]:
    """Let threads that start trials interrupt threads that compute sooner, within the context."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        if before > _SWITCH_SECONDS:  # else another search set the interval, and resets it
            sys.setswitchinterval(before)


class Searching:
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
        self._arguments = arguments
        self._active = active
        self._board = active.board
        self._background = active.background
        self._directory = active.directory()
        self._sampler_thread = sampler_thread
        self._journal = journal
        # Read once, because Spark takes a millisecond to return it.
        self._interface = arguments.application.interface
        self._placement = Placement(arguments.terms, ended=ended)
        self._proposed: dict[int, Proposed] = {}
        self._calls: dict[int, PackedFunction] = {}
        self._tries: dict[int, TrialRun] = {}
        self._ending: list[TrialRun] = []
        self._later = DeferredWork()
        self._error: BaseException | None = None
        self._given_back = 0
        self._has_begun = False
        self._looked = float("-inf")
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._setting = TrialSetting(
            self._board,
            self._background,
            arguments.options.metric,
            RendezvousCache(),
            self._inbox.put,
        )
        self._deadline: float | None = None
        self._python_env: PythonEnv | None = None

    def wake(self) -> None:
        """Have the search handle Optuna's news; may be called from any thread."""
        self._inbox.put(None)

    def run(self, lease: ElasticLease, python_env: PythonEnv | None) -> None:
        """Run all trials on executors that arrive and leave.

        Args:
            lease: acquires and releases the executors.
            python_env: Python environment of the ranks, or None.

        Raises:
            HopsGpuError: an error ended the search; raised once no trial runs.
        """
        self._python_env = python_env
        if self._arguments.timeout is not None:
            self._deadline = time.monotonic() + self._arguments.timeout
        with quick_switching(), lease.server.listening(self._inbox.put):
            try:
                while not self._step(lease):
                    pass
            finally:
                # No trial is left here, unless an error of this loop ended it.
                for running in self._tries.values():
                    running.stop()
                self._do_later(time.monotonic(), hurry=True)
        for ending in self._ending:
            ending.join(_LOGS_SECONDS)
        self._board.mark("returned")
        if self._error is not None:
            raise self._error

    def _step(self, lease: ElasticLease) -> bool:
        """Decide, perform the decision, and handle what arrives; return whether all is over."""
        now = time.monotonic()
        decision = self._placement.decide(now)
        self._perform(decision, lease, now)
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look(lease, decision)
        if decision.over:
            return True
        with contextlib.suppress(queue.Empty):
            patience = min(_LOOK_SECONDS, self._later.patience(time.monotonic()))
            self._take(self._inbox.get(timeout=patience), lease)
            # One decision for all that arrived together.
            for _ in range(_MOST_TAKEN):
                self._take(self._inbox.get_nowait(), lease)
        return False

    def _perform(self, decision: Decision, lease: ElasticLease, now: float) -> None:
        for start in decision.starts:
            self._placement.started(start, now)
            self._start(start, lease, now)
        if decision.release:
            log.info(
                "%s: gives back %d executors; needs %d",
                self._board.run_id,
                len(decision.release),
                decision.wanted,
            )
            self._given_back += 1
            lease.want(decision.wanted, decision.at_once)
            lease.let_go(decision.release)
            pause = backoff_seconds(self._given_back, random.random())  # noqa: S311
            self._placement.released(decision.release, now, pause)
        else:
            lease.want(decision.wanted, decision.at_once)
        if decision.ask:
            log.debug("%s: requests %d proposals from Optuna", self._board.run_id, decision.ask)
            self._placement.asking += decision.ask
            # Queued behind the results that Optuna should know before it proposes.
            self._later.put(functools.partial(self._sampler_thread.ask, decision.ask), now)
        self._do_later(now, hurry=not self._placement.waiting)
        if decision.stop:
            for running in self._tries.values():
                running.stop()

    def _start(self, start: Start, lease: ElasticLease, now: float) -> None:
        proposed = self._proposed[start.trial]
        call = self._call(proposed, start)
        gang = lease.of([slot.executor for slot in start.slots])
        running = TrialRun(proposed, start.slots, gang, call, self._setting)
        self._tries[start.trial] = running
        self._later.started(start.trial)
        record_start = functools.partial(
            self._sampler_thread.started, start.trial, call.attempt + 1
        )
        self._later.put(record_start, now)
        self._board.started(running.report(), len(start.slots))
        if not self._has_begun:
            self._has_begun = True
            for state in (GangState.GRANTED, GangState.READY, GangState.STARTING):
                self._board.state(state)
        log.info(
            "%s: trial %d started on %s (try %d)",
            self._board.run_id,
            start.trial,
            ", ".join(sorted({container.host for container in gang.containers})),
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

    def _look(self, lease: ElasticLease, decision: Decision) -> None:
        """Check for what no event announces, and update the display."""
        try:
            lease.check()
        except HopsGpuError as error:
            self._fail(error)
        if self._active.cancelled.is_set():
            self._fail(Cancelled(f"{self._board.run_id} was cancelled; its trials were stopped"))
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self._placement.closing = True
            log.info("%s: search_timeout has passed: stops the trials", self._board.run_id)
            self._board.warn(
                f"search_timeout={self._arguments.timeout:g} s has passed: the running trials were"
                " stopped; resume= continues the search"
            )
        self._board.executors(lease, len(lease.here), max(decision.wanted, len(lease.here)))
        self._background.offer(f"the journal of {self._board.run_id}", self._journal.try_follow)
        self._board.show()

    def _fail(self, error: BaseException) -> None:
        """End the search by an error; only the first error counts."""
        if self._error is None:
            log.info("%s: ends the search: %s", self._board.run_id, type(error).__name__)
            self._error = error
        self._placement.closing = True

    def _take(self, item: _Item, lease: ElasticLease) -> None:
        if item is None:
            for news in self._sampler_thread.news():
                self._learn(news, lease)
        elif isinstance(item, Begun):
            self._later.begun(item.number)
        elif isinstance(item, TrialRun):
            self._end(item, lease)
        elif isinstance(item, Reported):
            self._report(item)
        else:
            self._hear(item, lease)

    def _hear(self, event: Event, lease: ElasticLease) -> None:
        now = time.monotonic()
        try:
            container = lease.take(event)
        except HopsGpuError as error:
            self._fail(error)
            return
        if event.message is None:
            # The trials there get this event themselves.
            self._placement.gone(event.peer, now)
        if container is not None:
            self._board.mark("granted")
            self._placement.came(container.key, container.host, now)
        self._looked = float("-inf")

    def _report(self, reported: Reported) -> None:
        """Report a trial's metrics to Optuna."""
        step, value = reported.values[-1]
        self._board.reported(reported.number, step, value)
        # Queued behind the ends of other trials, which the pruner compares with.
        report = functools.partial(self._sampler_thread.report, reported.number, reported.values)
        self._later.put(report, time.monotonic())

    def _learn(self, news: News, lease: ElasticLease) -> None:
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
                lease.server.send(key, "prune", run_id=running.call.run_id)

    def _end(self, running: TrialRun, lease: ElasticLease) -> None:
        """Handle the end of a try: record the end of its trial, or put the trial back."""
        number, outcome = running.proposed.number, running.outcome
        del self._tries[number]
        self._later.begun(number)
        self._later.put(running.followed.set, time.monotonic())
        self._ending = [trial for trial in (*self._ending, running) if trial.goes_on]
        if running.fatal is not None:
            self._fail(running.fatal)
        if running.avoid.is_any:
            self._avoid(running.avoid, lease)
        how = self._placement.left(number, outcome.how, time.monotonic())
        log.info(
            "%s: trial %d on %s ended: %s%s",
            self._board.run_id,
            number,
            ", ".join(sorted({container.host for container in running.containers})),
            outcome.how.value,
            "" if how in _STATES else "; it is put back and will start again",
        )
        if how not in _STATES:
            self._board.left(number, len(running.slots), None)
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
        self._board.left(number, len(running.slots), report)
        if self._placement.has_failed:
            failed = counted(self._placement.failures, "trial")
            bound = self._arguments.terms.max_failures
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
            self._background.offer(f"the journal of {self._board.run_id}", self._journal.try_follow)

    def _avoid(self, blamed: Exclusions, lease: ElasticLease) -> None:
        """Start no more trials on a GPU or node that failed, where they would fail too."""
        log.info("%s: excludes %s", self._board.run_id, blamed)
        try:
            excluded = lease.avoid(blamed)
        except HopsGpuError as error:
            self._fail(error)
            return
        for key in excluded:
            # Running trials that share the executor are not stopped.
            self._placement.gone(key, time.monotonic())
