"""An elastic gang: executors that arrive and leave, and the worlds that train on them in turn.

One thread handles what arrives and does what `elastic_policy` decides; another one runs the present
world, which is an attempt of the run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import random
import threading
import time
from dataclasses import dataclass, replace

from hopsgpu.attempts.attempt import AttemptListener, AttemptRunner
from hopsgpu.attempts.failures import EndedRank
from hopsgpu.attempts.outcome import Conclusion
from hopsgpu.attempts.publisher import EXECUTOR_LOST
from hopsgpu.attempts.rank_table import Entered
from hopsgpu.attempts.retry_policy import was_preempted
from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.gang_request import Request
from hopsgpu.control.events import Event
from hopsgpu.core.gang import Exclusions, GangState
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.errors import Cancelled, HopsGpuError, RankFailed, StoreError
from hopsgpu.launcher.arguments import Arguments
from hopsgpu.launcher.controller import Execution, OnBoard
from hopsgpu.launcher.elastic_board import ElasticBoard
from hopsgpu.launcher.elastic_policy import (
    MOST_LOSSES,
    DurableCheckpoints,
    ElasticDecision,
    ElasticPolicy,
    ElasticTerms,
    WorldEnd,
    outlook,
)
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.recorder import Recording
from hopsgpu.runs.run_end import run_to_end
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25


def execute_elastic(
    arguments: Arguments, active: ActiveRun[ElasticBoard], terms: ElasticTerms
) -> GangResult:
    """Run the plan of an elastic gang, as `controller.execute` runs a plan."""
    return run_to_end(ElasticExecution(arguments, active, terms), active)


def terms_of(plan: LaunchPlan, application: GangApplication) -> ElasticTerms:
    """Return what the elastic gang of a plan may do.

    Raises:
        ConfigError: an option of the application is invalid.
    """
    return ElasticTerms(
        least=plan.least_executors,
        most=plan.executors,
        interval=application.elastic_interval,
        gives_way=application.should_give_way,
        spread=plan.spec.placement == "spread",
        run_timeout=plan.spec.run_timeout,
    )


@dataclass(frozen=True)
class _Entered:
    """News of a world: the function runs in all of its ranks."""


@dataclass(frozen=True)
class _Saved:
    """News of a world: a checkpoint is complete on the lake.

    Attributes:
        step: the step that it was saved under.
        agreed: the last step at which its ranks had been told that all of them save, or None.
    """

    step: int
    agreed: int | None


@dataclass(frozen=True)
class _Agreed:
    """News of a world: all ranks save at a step, or have passed it."""

    step: int
    passed: bool = False


@dataclass(frozen=True)
class _Refused:
    """News of a world: its ranks do not agree on a checkpoint."""

    reason: str


@dataclass(frozen=True)
class _Returned:
    """News of a world: all ranks have returned."""


class _World:
    """One world: an attempt in a thread of its own, which tells its news and its end.

    Args:
        keys: keys of the agents of its executors.

    Attributes:
        keys: as given.
        stopped: event that stops its ranks.
        conclusion: why it failed, or None.
        error: the error that ends the run, or None.
        how: why it was stopped, or None.
        training: its attempt, once it has begun.
    """

    def __init__(self, keys: tuple[int, ...]) -> None:
        self.keys = keys
        self.stopped = threading.Event()
        self.conclusion: Conclusion | None = None
        self.error: BaseException | None = None
        self.how: WorldEnd | None = None
        self.training: AttemptRunner | None = None
        self._lock = threading.Lock()
        self._has_returned = False

    def stop(self, how: WorldEnd) -> bool:
        """Stop the ranks at a complete checkpoint, from which the next world goes on.

        What they saved since is not waited for.

        Returns:
            False if all ranks have returned; then nothing is stopped.
        """
        with self._lock:
            if self._has_returned:
                return False
            self.how = self.how or how
            if self.training is not None:
                self.training.drops_saves = True
            self._stop()
            return True

    def cancel(self) -> None:
        """Stop the ranks, or what follows their return."""
        with self._lock:
            self.how = WorldEnd.CANCELLED
            self._stop()

    def _stop(self) -> None:
        self.stopped.set()
        if self.training is not None:
            self.training.wake()

    def returned(self) -> None:
        """Record that all ranks have returned: what was to stop them came too late."""
        with self._lock:
            if self.how is not WorldEnd.CANCELLED:
                self._has_returned, self.how = True, None
                self.stopped.clear()


# What the gang's thread handles: an executor that arrives or leaves, news of a world, and its end.
_Item = Event | _Entered | _Saved | _Agreed | _Refused | _Returned | _World


class _WorldListener(OnBoard):
    """Writes the progress of a world to the run's board, and tells the gang's thread."""

    def __init__(self, board: ElasticBoard, inbox: queue.SimpleQueue[_Item]) -> None:
        super().__init__(board)
        self._elastic = board
        self._inbox = inbox

    def entered(self, entered: Entered) -> None:
        super().entered(entered)
        if entered.all:
            self._elastic.entered(entered.at)
            self._inbox.put(_Entered())

    def saved(self, rank: int, step: int, complete: bool, agreed: int | None) -> None:
        """Handle that a rank's part of a checkpoint is on the lake."""
        if complete:
            self._inbox.put(_Saved(step, agreed))

    def checkpoint_agreed(self, step: int) -> None:
        self._inbox.put(_Agreed(step))

    def checkpoint_passed(self, step: int) -> None:
        self._inbox.put(_Agreed(step, passed=True))

    def checkpoint_given_up(self, reason: str) -> None:
        self._inbox.put(_Refused(reason))

    def ended(self, end: EndedRank) -> None:
        if not end.has_returned:
            self._elastic.stops()


class ElasticExecution(Execution):
    """One launch of an elastic gang in progress.

    Args:
        arguments: the launch's arguments.
        active: the launch's run.
        terms: what the gang may do.
    """

    def __init__(
        self, arguments: Arguments, active: ActiveRun[ElasticBoard], terms: ElasticTerms
    ) -> None:
        super().__init__(arguments, active, keeps=False)
        self._elastic = active.board
        self._terms = terms
        self._policy = ElasticPolicy(terms, time.monotonic())
        self._durable = DurableCheckpoints()
        self._wanted = terms.most
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._world: _World | None = None
        self._error: BaseException | None = None
        # Why no more executors can arrive.
        self._problem: HopsGpuError | None = None
        self._over = False
        # Worlds that lost what they were about to publish: a checkpoint is no progress of these.
        self._lost_uploads = 0

    def _on_gang(self, request: Request, recording: Recording) -> None:
        """Acquire executors, and run worlds on them until one returns; release the executors."""
        with (
            self._arguments.application.allocate_elastic(request) as allocator,
            allocator.server.listening(self._inbox.put),
        ):
            self._board.state(GangState.WAITING)
            try:
                while not self._step(allocator, request, recording):
                    pass
            finally:
                self._end_world()
        if self._error is not None:
            raise self._error

    def _step(self, allocator: ElasticAllocator, request: Request, recording: Recording) -> bool:
        """Decide, do it, and handle what arrives; return whether all is over."""
        self._look(allocator)
        if self._world is None and (self._over or self._error is not None):
            return True
        if self._error is None and not self._over:
            now, chance = time.monotonic(), random.random()  # noqa: S311
            if (at := self._durable.due(now)) is not None:
                self._saved(at)
            decision = self._policy.decide(now, chance)
            if self._problem is not None:
                # What is here goes on; the gang ends once that is too little.
                decision = replace(decision, wanted=self._policy.here)
            self._perform(decision, allocator, request, recording)
            if self._problem and not self._world and self._policy.here < self._terms.least:
                self._fail(self._problem)
        with contextlib.suppress(queue.Empty):
            self._take(self._inbox.get(timeout=_LOOK_SECONDS), allocator, request)
            while True:
                self._take(self._inbox.get_nowait(), allocator, request)
        return False

    def _perform(
        self,
        decision: ElasticDecision,
        allocator: ElasticAllocator,
        request: Request,
        recording: Recording,
    ) -> None:
        self._wanted = decision.wanted
        allocator.set_wanted(decision.wanted, decision.at_once, least=self._terms.least)
        if decision.release:
            log.info(
                "%s: gives back %s",
                self._board.run_id,
                count_of(len(decision.release), "executor"),
            )
            allocator.release_executors(decision.release)
        if decision.start:
            self._start(decision.start, allocator, recording)
        world = self._world
        if world is None:
            if self._board.status().state != GangState.WAITING.value:
                self._board.state(GangState.WAITING)
            return
        if decision.ask and world.training is not None:
            log.info("%s: asks the ranks for a checkpoint, to be resized", self._board.run_id)
            world.training.request_checkpoint()
        if decision.stop is not None and world.stop(decision.stop):
            log.info(
                "%s: the world of %s %s: stops it at a checkpoint",
                self._board.run_id,
                count_of(len(world.keys), "executor"),
                "gives way" if decision.stop is WorldEnd.GAVE_WAY else "grows",
            )
            self._elastic.stops()

    def _start(
        self, keys: tuple[int, ...], allocator: ElasticAllocator, recording: Recording
    ) -> None:
        gang = allocator.allocation_of(keys)
        hosts = [container.host for container in gang.containers]
        ranks = len(keys) * self._plan.ranks_per_executor
        self._elastic.begins(hosts, ranks)
        if self._board.status().state == GangState.WAITING.value:
            self._board.mark("granted")
            self._board.state(GangState.GRANTED)
        self._board.state(GangState.READY)
        world = self._world = _World(keys)
        log.info(
            "%s: world %d: %s on %s",
            self._board.run_id,
            self._board.attempt,
            count_of(ranks, "rank"),
            ", ".join(sorted(set(hosts))),
        )
        thread = threading.Thread(
            target=functools.partial(self._train, world, gang, recording),
            name=f"{self._board.run_id}-world-{self._board.attempt}",
            daemon=True,
        )
        thread.start()

    def _train(self, world: _World, gang: GangAllocation, recording: Recording) -> None:
        """Run a world to its end, in its own thread; tell the end."""

        def begun(training: AttemptRunner) -> None:
            world.training = training

        listener: AttemptListener = _WorldListener(self._elastic, self._inbox)
        try:
            world.conclusion = self._attempt(gang, recording, listener, world.stopped, begun)
        except Cancelled as error:
            if world.how in (None, WorldEnd.CANCELLED):
                world.error = error
        except BaseException as error:  # noqa: BLE001 - raised again in the run's thread
            world.error = error
        finally:
            self._inbox.put(world)

    def _run(self, training: AttemptRunner) -> None:
        assert self._world is not None, "it runs this"
        try:
            training.run()
        except Cancelled:
            # All may have returned before the order to stop arrived.
            if not training.has_returned:
                raise
        if training.result.conclusion is None:
            self._world.returned()
            self._inbox.put(_Returned())
        self._elastic.returned()

    def _take(self, item: _Item, allocator: ElasticAllocator, request: Request) -> None:
        now = time.monotonic()
        if isinstance(item, _Entered):
            self._policy.entered(now)
        elif isinstance(item, _Saved):
            log.info("%s: the checkpoint of step %d is complete", self._board.run_id, item.step)
            if self._durable.saved(item.agreed, now):
                self._saved(now)
        elif isinstance(item, _Agreed):
            if not item.passed:
                self._durable.agreed(item.step)
            elif self._durable.passed():
                self._saved(now)
        elif isinstance(item, _Refused):
            log.info("%s: no checkpoint to be resized at: %s", self._board.run_id, item.reason)
            self._durable.refused()
            self._policy.refused(now)
        elif isinstance(item, _Returned):
            self._policy.returned()
        elif isinstance(item, _World):
            self._end(item, allocator)
        else:
            self._hear(item, allocator, request)

    def _saved(self, at: float) -> None:
        """Record that a checkpoint counts: what was lost before it had other causes."""
        self._policy.saved(at)
        self._suspects.clear()

    def _hear(self, event: Event, allocator: ElasticAllocator, request: Request) -> None:
        now = time.monotonic()
        try:
            container = allocator.handle_event(event)
        except HopsGpuError as error:
            self._note_problem(error)
            return
        if event.message is None:
            # The world there gets this event itself.
            self._policy.gone(event.peer)
            if self._world is not None and event.peer in self._world.keys:
                self._elastic.lost_executor()
        elif event.message.kind == "warmed":
            log.debug("%s: agent %d is warm", self._board.run_id, event.peer)
            self._policy.warmed(event.peer, now)
        if container is not None:
            self._policy.came(container.key, container.host, now)
            env = request.python_env
            modules = self._arguments.function.modules
            allocator.server.keep(container.key, modules.digest, modules.archive)
            allocator.server.send(
                container.key,
                "warm",
                run_url=self._plan.paths["run"],
                frameworks=request.frameworks,
                shared=dict(request.plan.environment),
                python_env=None if env is None else env.as_fields(),
                modules=modules.digest,
            )

    def _end(self, world: _World, allocator: ElasticAllocator) -> None:
        """Handle the end of a world: the run's end, or what the next world is to avoid."""
        self._world = None
        conclusion = world.conclusion
        if isinstance(world.error, StoreError) and world.error.kind == EXECUTOR_LOST:
            self._train_again_after(world.error)
        elif world.error is not None:
            how = WorldEnd.CANCELLED if isinstance(world.error, Cancelled) else WorldEnd.FAILED
            self._conclude(how, str(world.error).partition("\n")[0])
            self._fail(world.error)
        elif conclusion is not None:
            self._resume_after(conclusion, allocator)
        elif world.how is not None:
            self._conclude(world.how, "")
        else:
            self._over = True
            self._conclude(WorldEnd.RETURNED, "")

    def _conclude(self, how: WorldEnd, why: str, *, preempted: bool = False) -> None:
        log.info("%s: world %d %s", self._board.run_id, self._board.attempt, how.value)
        self._policy.ended(how, time.monotonic(), preempted=preempted)
        self._durable.ended()
        self._elastic.ended(how, why)

    def _resume_after(self, conclusion: Conclusion, allocator: ElasticAllocator) -> None:
        """Have another world follow one that failed, or end the run."""
        why = str(conclusion.failure).partition("\n")[0]
        if not conclusion.is_loss:
            if not self._is_retried(conclusion):
                self._conclude(WorldEnd.FAILED, why)
                self._fail(conclusion.failure)
                return
            self._conclude(WorldEnd.FAILED, why)
        else:
            self._note_causes(conclusion)
            self._lose(why, preempted=conclusion.was_preempted)
            if self._cancelled.is_set():
                return
            if self._policy.losses >= MOST_LOSSES:
                conclusion.failure.add_note(
                    f"{self._policy.losses} worlds in a row were lost, and saved no checkpoint"
                )
                self._fail(conclusion.failure)
                return
            if not self._still_fits(conclusion.failure):
                self._fail(conclusion.failure)
                return
            self._tell_loss(why, conclusion.failure.rank, conclusion.failure.host)
        self._exclude(allocator)

    def _train_again_after(self, error: StoreError) -> None:
        """Have another world follow one that lost what it was about to publish, or end the run."""
        why = str(error).partition("\n")[0]
        self._lost_uploads += 1
        self._lose(why, preempted=was_preempted(why))
        if self._cancelled.is_set():
            return
        if self._lost_uploads >= MOST_LOSSES:
            error.add_note(f"{self._lost_uploads} worlds were lost while they published")
            self._fail(error)
            return
        self._tell_loss(why, None, None)

    def _lose(self, why: str, *, preempted: bool) -> None:
        self._conclude(WorldEnd.LOST, why, preempted=preempted)
        self._board.warn(f"world {self._board.attempt} lost something: {why}")

    def _tell_loss(self, why: str, rank: int | None, host: str | None) -> None:
        line = f"hopsgpu: {why}; the gang goes on from the latest checkpoint"
        self._arguments.progress.line(rank or 0, host or "?", line)

    def _still_fits(self, failure: RankFailed) -> bool:
        # Losses on a node that may be to blame are better than the end of the run, and bounded.
        if self._avoid.hosts and (problem := self._misfit()) is not None:
            log.info("%s: does not avoid %s: %s", self._board.run_id, self._avoid, problem)
            self._avoid = Exclusions(gpus=self._avoid.gpus)
            self._suspects.clear()
        return super()._still_fits(failure)

    def _exclude(self, allocator: ElasticAllocator) -> None:
        try:
            excluded = allocator.exclude(self._avoid)
        except HopsGpuError as error:
            self._fail(error)
            return
        for key in excluded:
            self._policy.gone(key)

    def _look(self, allocator: ElasticAllocator) -> None:
        """Check for what no event announces, and update the display."""
        if self._error is None:
            try:
                allocator.check()
            except HopsGpuError as error:
                self._note_problem(error)
        if self._cancelled.is_set() and self._error is None:
            self._fail(Cancelled(f"{self._board.run_id} was cancelled; its ranks were stopped"))
        hosts = [container.host for container in allocator.ready_executors.values()]
        why = outlook(self._policy, self._wanted, self._plan.shape.gpus, allocator.wait_reason)
        self._elastic.executors(
            allocator.held_count, hosts, self._wanted, why, self._policy.warming
        )
        self._policy.coming = allocator.starting_count
        if self._terms.gives_way:
            self._policy.reclaimed_count = allocator.reclaimed_count
            allocator.offer(self._policy.above_least, self._policy.giving)
        self._board.show()

    def _note_problem(self, error: HopsGpuError) -> None:
        """Record that no more executors can arrive; a world that runs goes on."""
        if self._problem is None:
            self._problem = error
            log.info("%s: no more executors: %s", self._board.run_id, type(error).__name__)
            self._board.warn(f"the gang gets no more executors: {error}")

    def _fail(self, error: BaseException) -> None:
        """End the run by an error; only the first one counts."""
        if self._error is None:
            log.info("%s: ends: %s", self._board.run_id, type(error).__name__)
            self._error = error
        if self._world is not None:
            self._world.cancel()

    def _end_world(self) -> None:
        """Wait for the end of a world that an error of this thread left."""
        if self._world is None:
            return
        self._world.cancel()
        while not isinstance(item := self._inbox.get(), _World):
            log.debug("ignores %r", item)
