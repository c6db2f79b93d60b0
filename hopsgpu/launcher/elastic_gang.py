"""An elastic gang: executors that arrive and leave, and the worlds that train on them in turn.

One thread handles events and performs what `elastic_policy` decides. Another one runs the present
world, which is an attempt of the run.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from hopsgpu.attempts.attempt import AttemptRunner
from hopsgpu.attempts.failures import RankExit
from hopsgpu.attempts.outcome import AttemptFailure
from hopsgpu.attempts.publisher import EXECUTOR_LOST
from hopsgpu.attempts.rank_table import FunctionEntry
from hopsgpu.attempts.retry_policy import was_preempted
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.gang_request import Request
from hopsgpu.control.events import Event
from hopsgpu.core.gang import GangExecutor, GangState
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.errors import Cancelled, HopsGpuError, StoreError
from hopsgpu.executors.executor_loop import ExecutorLoop
from hopsgpu.launcher.arguments import Arguments
from hopsgpu.launcher.elastic_board import ElasticBoard
from hopsgpu.launcher.elastic_policy import (
    MAX_LOSSES_IN_A_ROW,
    DurableCheckpoints,
    ElasticDecision,
    ElasticPolicy,
    ElasticTerms,
    WorldEnd,
    outlook,
)
from hopsgpu.launcher.gang_run import BoardListener, GangRun
from hopsgpu.launcher.retries import Retries
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.recorder import Recording
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

# Makes an attempt on a world's executors: with a listener, an event that stops the attempt, and
# what runs its ranks; returns why the attempt failed, or None.
MakeAttempt = Callable[
    [GangAllocation, BoardListener, threading.Event, Callable[[AttemptRunner], object]],
    AttemptFailure | None,
]


def terms_of(plan: LaunchPlan, application: GangApplication) -> ElasticTerms:
    """Return what the elastic gang of a plan may do.

    Raises:
        ConfigError: an option of the application is invalid.
    """
    return ElasticTerms(
        min_executors=plan.least_executors,
        max_executors=plan.executors,
        interval=application.elastic_interval,
        should_give_way=application.should_give_way,
        is_spread=plan.spec.placement == "spread",
        run_timeout=plan.spec.run_timeout,
    )


class ElasticGangRun(GangRun):
    """The run of a launch on an elastic gang."""

    def __init__(self, arguments: Arguments, active: ActiveRun[ElasticBoard]) -> None:
        super().__init__(arguments, active)
        self._elastic = active
        self._terms = terms_of(active.plan, arguments.application)

    def work(self, recording: Recording) -> None:
        with (
            self._prepare(recording) as request,
            self._arguments.application.allocate_elastic(request) as allocator,
        ):
            self._board.state(GangState.WAITING)
            make_attempt = functools.partial(self._make_attempt, recording)
            loop = ElasticLoop(
                self._elastic, self._terms, request, self._arguments, make_attempt, self._retries
            )
            loop.run(allocator)
        self._record_values()


class _WorldThread:
    """The thread of a world, which is an attempt.

    Attributes:
        error: the error that ends the run, or None.
        runner: its attempt, once its ranks are started.
    """

    def __init__(self, keys: tuple[int, ...]) -> None:
        self.keys = keys
        self.stopped = threading.Event()
        self.failure: AttemptFailure | None = None
        self.error: BaseException | None = None
        self.stop_reason: WorldEnd | None = None
        self.runner: AttemptRunner | None = None
        self._lock = threading.Lock()
        self._has_returned = False

    def start(self, name: str, run: Callable[[_WorldThread], None]) -> None:
        self._thread = threading.Thread(target=run, args=(self,), name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def stop(self, reason: WorldEnd) -> bool:
        """Stop the ranks at a complete checkpoint, from which the next world continues.

        Later checkpoints that are not on the lake yet are abandoned.

        Returns:
            False if all ranks have returned; then nothing is stopped.
        """
        with self._lock:
            if self._has_returned:
                return False
            self.stop_reason = self.stop_reason or reason
            if self.runner is not None:
                self.runner.should_drop_saves = True
            self._stop()
            return True

    def cancel(self) -> None:
        """Stop the ranks, or what follows their return."""
        with self._lock:
            self.stop_reason = WorldEnd.CANCELLED
            self._stop()

    def _stop(self) -> None:
        self.stopped.set()
        if self.runner is not None:
            self.runner.wake()

    def record_return(self) -> None:
        """Record that all ranks have returned, so that a resize comes too late."""
        with self._lock:
            if self.stop_reason is not WorldEnd.CANCELLED:
                self._has_returned, self.stop_reason = True, None
                self.stopped.clear()


class _WorldListener(BoardListener):
    """Writes the progress of a world to the run's board, and notifies the gang's loop."""

    def __init__(self, board: ElasticBoard, loop: ElasticLoop) -> None:
        super().__init__(board)
        self._elastic = board
        self._loop = loop

    def on_entry(self, entered: FunctionEntry) -> None:
        super().on_entry(entered)
        if entered.is_complete:
            self._elastic.record_entry(entered.at)
            self._loop.post(self._loop.record_entry)

    def on_save(self, rank: int, step: int, complete: bool, agreed: int | None) -> None:
        """Handle that a rank's part of a checkpoint is on the lake."""
        if complete:
            self._loop.post(functools.partial(self._loop.record_save, step, agreed))

    def on_checkpoint_agreed(self, step: int) -> None:
        self._loop.post(functools.partial(self._loop.record_agreement, step))

    def on_checkpoint_passed(self, step: int) -> None:
        self._loop.post(self._loop.record_passed)

    def on_checkpoint_given_up(self, reason: str) -> None:
        self._loop.post(functools.partial(self._loop.record_refusal, reason))

    def on_end(self, end: RankExit) -> None:
        if not end.has_returned:
            self._elastic.record_stop()


class ElasticLoop(ExecutorLoop):
    """Runs the worlds of an elastic gang, one after the other."""

    def __init__(
        self,
        active: ActiveRun[ElasticBoard],
        terms: ElasticTerms,
        request: Request,
        arguments: Arguments,
        make_attempt: MakeAttempt,
        retries: Retries,
    ) -> None:
        super().__init__(active)
        self._board = active.board
        self._terms = terms
        self._request = request
        self._arguments = arguments
        self._make_attempt = make_attempt
        self._retries = retries
        self._policy = ElasticPolicy(terms, time.monotonic())
        self._durable = DurableCheckpoints()
        self._wanted = terms.max_executors
        self._world: _WorldThread | None = None
        # Why no more executors can arrive.
        self._shortage: HopsGpuError | None = None
        self._has_returned = False
        # Worlds that lost what they were about to publish. These had saved checkpoints, so the
        # losses in a row that the policy counts do not bound them.
        self._lost_upload_count = 0

    def record_entry(self) -> None:
        self._policy.record_entry(time.monotonic())

    def record_save(self, step: int, agreed: int | None) -> None:
        """Record that a checkpoint is complete on the lake.

        Args:
            agreed: the last step at which its ranks had been told that all of them save, or None.
        """
        now = time.monotonic()
        log.info("%s: the checkpoint of step %d is complete", self.run_id, step)
        if self._durable.record_save(agreed, now):
            self._record_checkpoint(now)

    def record_agreement(self, step: int) -> None:
        self._durable.record_agreement(step)

    def record_passed(self) -> None:
        if self._durable.record_passed():
            self._record_checkpoint(time.monotonic())

    def record_refusal(self, reason: str) -> None:
        log.info("%s: no checkpoint to be resized at: %s", self.run_id, reason)
        self._durable.record_refusal()
        self._policy.record_refusal(time.monotonic())

    def _record_checkpoint(self, at: float) -> None:
        """Record that a checkpoint counts: earlier losses had other causes than later ones."""
        self._policy.record_checkpoint(at)
        self._retries.clear_suspects()

    def _decide(self, now: float) -> bool:
        if self._error is None and not self._has_returned:
            if (at := self._durable.take_due(now)) is not None:
                self._record_checkpoint(at)
            decision = self._policy.decide(now, random.random())  # noqa: S311
            if self._shortage is not None:
                # The gang continues with the executors that it has, until they are too few.
                decision = replace(decision, wanted=self._policy.executor_count)
            self._perform(decision)
            if (
                self._shortage
                and not self._world
                and self._policy.executor_count < self._terms.min_executors
            ):
                self._fail(self._shortage)
        return self._world is None and (self._has_returned or self._error is not None)

    def _perform(self, decision: ElasticDecision) -> None:
        self._wanted = decision.wanted
        self.allocator.set_wanted(
            decision.wanted, decision.at_once, least=self._terms.min_executors
        )
        if decision.release:
            self._release(decision.release)
        if decision.start:
            self._start_world(decision.start)
        world = self._world
        if world is None:
            if self._board.status().state != GangState.WAITING.value:
                self._board.state(GangState.WAITING)
            return
        if decision.needs_checkpoint and world.runner is not None:
            log.info("%s: requests a checkpoint of the ranks, to be resized", self.run_id)
            world.runner.request_checkpoint()
        if decision.stop_reason is not None and world.stop(decision.stop_reason):
            log.info(
                "%s: the world of %s %s: stops it at a checkpoint",
                self.run_id,
                count_of(len(world.keys), "executor"),
                "gives way" if decision.stop_reason is WorldEnd.GAVE_WAY else "grows",
            )
            self._board.record_stop()

    def _start_world(self, keys: tuple[int, ...]) -> None:
        allocation = self.allocator.allocation_of(keys)
        hosts = [executor.host for executor in allocation.containers]
        ranks = len(keys) * self._active.plan.ranks_per_executor
        self._board.start_world(hosts, ranks)
        if self._board.status().state == GangState.WAITING.value:
            self._board.mark("granted")
            self._board.state(GangState.GRANTED)
        self._board.state(GangState.READY)
        log.info(
            "%s: world %d: %s on %s",
            self.run_id,
            self._board.attempt,
            count_of(ranks, "rank"),
            ", ".join(sorted(set(hosts))),
        )
        world = self._world = _WorldThread(keys)
        name = f"{self.run_id}-world-{self._board.attempt}"
        world.start(name, functools.partial(self._run_world, allocation))

    def _run_world(self, allocation: GangAllocation, world: _WorldThread) -> None:
        """Run a world to its end, in its own thread, and notify the loop of the end."""
        try:
            world.failure = self._make_attempt(
                allocation,
                _WorldListener(self._board, self),
                world.stopped,
                functools.partial(self._run_ranks, world),
            )
        except Cancelled as error:
            if world.stop_reason in (None, WorldEnd.CANCELLED):
                world.error = error
        except BaseException as error:  # noqa: BLE001 - raised again in the run's thread
            world.error = error
        finally:
            self.post(functools.partial(self._end_world, world))

    def _run_ranks(self, world: _WorldThread, runner: AttemptRunner) -> None:
        world.runner = runner
        try:
            runner.run()
        except Cancelled:
            # All may have returned before the order to stop arrived.
            if not runner.has_returned:
                raise
        if runner.result.failure is None:
            world.record_return()
            self.post(self._policy.record_return)
        self._board.record_return()

    def _on_arrival(self, executor: GangExecutor, now: float) -> None:
        self._policy.add_executor(executor.key, executor.host, now)
        env, modules = self._request.python_env, self._arguments.function.modules
        self.allocator.server.keep(executor.key, modules.digest, modules.archive)
        self.allocator.server.send(
            executor.key,
            "warm",
            run_url=self._active.plan.paths["run"],
            frameworks=self._request.frameworks,
            shared=dict(self._request.plan.environment),
            python_env=None if env is None else env.as_fields(),
            modules=modules.digest,
        )

    def _on_event(self, event: Event) -> None:
        super()._on_event(event)
        if event.message is not None and event.message.kind == "warmed":
            log.debug("%s: agent %d is warm", self.run_id, event.peer)
            self._policy.record_warm(event.peer, time.monotonic())

    def _on_loss(self, key: int, now: float) -> None:
        self._policy.remove_executor(key)
        if self._world is not None and key in self._world.keys:
            self._board.record_loss()

    def _on_exclusion(self, key: int, now: float) -> None:
        self._policy.remove_executor(key)

    def _on_shortage(self, error: HopsGpuError) -> None:
        if self._shortage is None:
            self._shortage = error
            log.info("%s: no more executors: %s", self.run_id, type(error).__name__)
            self._board.warn(f"the gang gets no more executors: {error}")

    def _on_error(self) -> None:
        if self._world is not None:
            self._world.cancel()

    def _on_poll(self) -> None:
        allocator = self.allocator
        hosts = [executor.host for executor in allocator.ready_executors.values()]
        gpus = self._active.plan.shape.gpus
        why = outlook(self._policy, self._wanted, gpus, allocator.wait_reason)
        self._board.record_executors(
            allocator.held_count, hosts, self._wanted, why, self._policy.warming_count
        )
        self._policy.starting_count = allocator.starting_count
        if self._terms.should_give_way:
            self._policy.reclaimed_count = allocator.reclaimed_count
            allocator.offer(self._policy.surplus_count, self._policy.giving_count)

    def _close(self) -> None:
        if self._world is not None:
            self._world.cancel()
            self._world.join()

    def _end_world(self, world: _WorldThread) -> None:
        """Handle the end of a world: end the run, or exclude what caused a failure."""
        self._world = None
        failure = world.failure
        if isinstance(world.error, StoreError) and world.error.kind == EXECUTOR_LOST:
            self._continue_after_lost_upload(world.error)
        elif world.error is not None:
            how = WorldEnd.CANCELLED if isinstance(world.error, Cancelled) else WorldEnd.FAILED
            self._record_end(how, str(world.error).partition("\n")[0])
            self._fail(world.error)
        elif failure is not None:
            self._continue_after_failure(failure)
        elif world.stop_reason is not None:
            self._record_end(world.stop_reason, "")
        else:
            self._has_returned = True
            self._record_end(WorldEnd.RETURNED, "")

    def _record_end(self, how: WorldEnd, why: str, *, was_preempted: bool = False) -> None:
        log.info("%s: world %d %s", self.run_id, self._board.attempt, how.value)
        self._policy.record_end(how, time.monotonic(), was_preempted=was_preempted)
        self._durable = DurableCheckpoints()
        self._board.record_end(how, why)

    def _continue_after_failure(self, failure: AttemptFailure) -> None:
        """Have another world follow one that failed, or end the run."""
        error = failure.error
        why = str(error).partition("\n")[0]
        if not failure.is_loss:
            is_retried = self._retries.prepare_retry(failure)
            self._record_end(WorldEnd.FAILED, why)
            if not is_retried:
                self._fail(error)
                return
        else:
            self._retries.exclude_causes(failure)
            self._record_loss(why, was_preempted=failure.was_preempted)
            if self._active.cancelled.is_set():
                return
            if self._policy.losses >= MAX_LOSSES_IN_A_ROW:
                error.add_note(
                    f"{self._policy.losses} worlds in a row were lost, and saved no checkpoint"
                )
                self._fail(error)
                return
            if not self._retries.still_fits(error):
                self._fail(error)
                return
            self._show_loss(why, error.rank, error.host)
        self._exclude(self._retries.exclusions)

    def _continue_after_lost_upload(self, error: StoreError) -> None:
        """Have another world follow one that lost what it was about to publish, or end the run."""
        why = str(error).partition("\n")[0]
        self._lost_upload_count += 1
        self._record_loss(why, was_preempted=was_preempted(why))
        if self._active.cancelled.is_set():
            return
        if self._lost_upload_count >= MAX_LOSSES_IN_A_ROW:
            error.add_note(f"{self._lost_upload_count} worlds were lost while they published")
            self._fail(error)
            return
        self._show_loss(why, None, None)

    def _record_loss(self, why: str, *, was_preempted: bool) -> None:
        self._record_end(WorldEnd.LOST, why, was_preempted=was_preempted)
        self._board.warn(f"world {self._board.attempt} lost something: {why}")

    def _show_loss(self, why: str, rank: int | None, host: str | None) -> None:
        line = f"hopsgpu: {why}; the gang goes on from the latest checkpoint"
        self._arguments.progress.line(rank or 0, host or "?", line)
