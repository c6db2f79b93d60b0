"""A run from its plan to its result: lease, attempts, publishing, release."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from hopsgpu import records
from hopsgpu.arguments import Arguments
from hopsgpu.background import Background
from hopsgpu.call import Call
from hopsgpu.errors import Cancelled, CapacityError, HopsGpuError, RankFailed, StoreError
from hopsgpu.gang import Avoid, GangState, assign_ranks
from hopsgpu.planning import check_again
from hopsgpu.results import GangResult
from hopsgpu.retries import avoid_next, may_retry
from hopsgpu.run import Board
from hopsgpu.spark.lease import Lease
from hopsgpu.spark.request import Request
from hopsgpu.spec import LaunchPlan
from hopsgpu.stores.lake import Lake
from hopsgpu.stores.models import ModelVersion
from hopsgpu.training import Trained, Training, train_on
from hopsgpu.worker.holder import Warm

# While inside, what gives the whole gang for a request, again and again, without what is avoided.
Leasing = Callable[[Request], AbstractContextManager[Callable[[Avoid], Lease]]]
_KEEP_SECONDS = 120.0


def execute(
    given: Arguments,
    plan: LaunchPlan,
    board: Board,
    cancelled: threading.Event,
    leasing: Leasing,
    background: Background,
    ended_well: GangState = GangState.RELEASED,
) -> GangResult:
    """Runs a plan; however it ends, the lease is over first.

    Record and logs are on the lake when it returns or raises; but those of a run that ended as
    kept come there soon after, and what goes wrong with them is told by the gang.

    Args:
        given: the launch's arguments.
        plan: of it.
        board: on which it writes how it stands.
        cancelled: set when it is no longer wanted.
        leasing: gives the gang.
        background: brings record and logs to the lake.
        ended_well: the state of a run that returned.

    Raises:
        HopsGpuError: what ended the run, with `error.result`.
    """
    execution = Execution(given, plan, board, cancelled, leasing, background)
    try:
        execution.run()
        result = execution.result(with_values=True)
    except BaseException as error:
        ended = state_of_failure(error)
        execution.record(ended, str(error))
        background.flush(_KEEP_SECONDS)
        for problem in background.problems():
            error.add_note(problem)
        if isinstance(error, HopsGpuError):
            error.result = execution.result_of_failure(isinstance(error, StoreError))
        board.state(ended)
        raise
    execution.record(ended_well, None)
    if ended_well is not GangState.KEPT:
        background.flush(_KEEP_SECONDS)
        result = replace(result, warnings=(*result.warnings, *background.problems()))
    board.state(ended_well)
    return result


def state_of_failure(error: BaseException) -> GangState:
    """The state in which a run ends by this."""
    return GangState.CANCELLED if isinstance(error, Cancelled) else GangState.FAILED


def request_of(
    plan: LaunchPlan, frameworks: tuple[str, ...], board: Board, cancelled: threading.Event
) -> Request:
    """What a plan asks of YARN, and what its executors import while they wait."""
    return Request(
        run_id=board.run_id,
        shape=plan.shape,
        executors=plan.executors,
        placement=plan.spec.placement,
        gpu_type=plan.spec.gpu_type,
        hosts=plan.hosts,
        timeout=plan.spec.acquire_timeout,
        cancelled=cancelled,
        watcher=board,
        warm=Warm(frameworks, plan.environment),
    )


class Execution:
    """One run on its way."""

    def __init__(
        self,
        given: Arguments,
        plan: LaunchPlan,
        board: Board,
        cancelled: threading.Event,
        leasing: Leasing,
        background: Background,
    ) -> None:
        self._given = given
        self._leasing = leasing
        self._plan = plan
        self._board = board
        self._cancelled = cancelled
        self._background = background
        self._directory = Lake(plan.paths["run"])
        self._trained = Trained()
        self._model: ModelVersion | None = None
        self._warnings = list(plan.warnings)
        self._attempt = 0
        self._avoid = Avoid()
        self._lost: list[str] = []

    def run(self) -> None:
        """Acquires, trains, publishes and releases.

        Raises:
            HopsGpuError: as `launcher.launch`.
        """
        # A lake that refuses is found before any GPU is asked for.
        self._directory.make()
        (self._directory / "logs").make()
        self.record(GangState.REQUESTED, None)
        request = request_of(self._plan, self._given.frameworks, self._board, self._cancelled)
        with self._leasing(request) as whole:
            while not self._attempted(whole(self._avoid)):
                self._attempt += 1
                self._board.attempt(self._attempt)

    def _attempted(self, lease: Lease) -> bool:
        """One attempt; False where it failed and another is to follow."""
        spec = self._plan.spec
        world = assign_ranks(
            lease.containers, self._plan.ranks_per_executor, spec.parameter_servers
        )
        with train_on(
            lease, world, self._call(), self._given.progress, self._board.metrics, self._cancelled
        ) as training:
            self._trained = training.trained
            self._board.mark("started")
            self._board.state(GangState.TRAINING)
            try:
                training.run()
            finally:
                self._board.mark("returned")
                self._board.ranks([report for _, report in sorted(self._trained.reports.items())])
                training.keep_logs(self._background)
            failure = self._trained.failure
            if failure is None:
                if spec.model is not None:
                    self._publish(training, spec.model)
                return True
        if not self._is_tried_again(failure):
            raise failure
        return False

    def _call(self) -> Call:
        plan, application = self._plan, self._given.application
        return Call(
            function=self._given.call,
            modules=self._given.modules,
            environment=plan.environment,
            run_id=self._board.run_id,
            directory=self._directory,
            attempt=self._attempt,
            memory=plan.spec.memory_per_worker,
            timeout=plan.spec.run_timeout,
            visible=plan.spec.visible,
            frameworks=self._given.frameworks,
            interface=application.interface,
        )

    def _is_tried_again(self, failure: RankFailed) -> bool:
        fault, retries = self._trained.fault, self._plan.spec.retries
        code_too = self._given.application.retries_code_too
        if self._cancelled.is_set() or not may_retry(
            fault, attempt=self._attempt, retries=retries, code_too=code_too
        ):
            return False
        if self._trained.suspect is not None:
            self._lost.append(self._trained.suspect)
        self._avoid = avoid_next(self._avoid | self._trained.avoid, self._lost)
        if not self._is_left(failure):
            return False
        told = str(failure).splitlines()[0]
        self._warnings.append(f"attempt {self._attempt} failed ({fault.value}): {told}")
        return True

    def _is_left(self, failure: RankFailed) -> bool:
        """Whether the gang can be had again without what is to blame; tells why where it cannot."""
        try:
            if self._avoid.is_any:
                check_again(self._plan, self._given.application, self._avoid)
        except CapacityError as error:
            failure.add_note(f"not tried again without {self._avoid}, which is to blame: {error}")
            return False
        except HopsGpuError as error:
            self._warnings.append(f"whether the gang still fits was not known: {error}")
        return True

    def _publish(self, training: Training, name: str) -> None:
        self._board.state(GangState.PUBLISHING)
        models = f"{self._plan.paths['root']}/models"
        self._model = training.publish(models, name)
        if self._model is None:
            self._warnings.append(
                f"no version of {name!r} was published: rank 0 left nothing in context().model_dir"
            )
        else:
            self._board.mark("published")

    def result(self, *, with_values: bool) -> GangResult:
        """What there is of a result."""
        noted = self._board.result()
        problem = self._given.progress.problem
        unseen = () if problem is None else (problem,)
        return replace(
            noted,
            values=self._values() if with_values else (),
            warnings=(*self._warnings, *self._trained.warnings, *noted.warnings, *unseen),
            model=self._model,
        )

    def result_of_failure(self, with_values: bool) -> GangResult:
        """What there is of a failed run's result, without values that cannot be unpickled."""
        try:
            return self.result(with_values=with_values)
        except HopsGpuError:  # a second problem must not hide the first
            return self.result(with_values=False)

    def _values(self) -> tuple[Any, ...]:
        values = []
        for rank, value in sorted(self._trained.values.items()):
            # From an agent that proved the run's secret; what lay on the lake bears its digest.
            pickled = value.content(self._directory)
            try:
                values.append(pickle.loads(pickled))
            except Exception as error:
                raise HopsGpuError(
                    f"the value of rank {rank} cannot be unpickled at the driver"
                    f" ({type(error).__name__}: {error}); return plain data"
                ) from error
        return tuple(values)

    def record(self, state: GangState, error: str | None) -> None:
        """Has it written to the run's directory how the run stands."""
        content = records.content(
            self._plan,
            self.result(with_values=False),
            application=self._given.application.id,
            state=state.value,
            attempt=self._attempt,
            error=error,
        )
        self._background.put(
            f"the record of {self._board.run_id}",
            lambda: records.write(self._directory, content),
        )
