"""A run from its plan to its result: lease, training, publishing, release."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

from hopsgpu.arguments import Arguments
from hopsgpu.errors import Cancelled, HopsGpuError, StoreError
from hopsgpu.gang import GangState, assign_ranks
from hopsgpu.results import GangResult
from hopsgpu.run import Board
from hopsgpu.spark.lease import Lease
from hopsgpu.spark.request import Request
from hopsgpu.spec import LaunchPlan, redacted
from hopsgpu.stores.lake import Lake
from hopsgpu.stores.models import ModelVersion
from hopsgpu.training import Call, Trained, Training

# Gives a lease for a request while inside.
Leasing = Callable[[Request], AbstractContextManager[Lease]]


def execute(
    given: Arguments,
    plan: LaunchPlan,
    board: Board,
    cancelled: threading.Event,
    leasing: Leasing,
    ended_well: GangState = GangState.RELEASED,
) -> GangResult:
    """Runs a plan; however it ends, the lease is over first.

    Args:
        given: the launch's arguments.
        plan: of it.
        board: on which it writes how it stands.
        cancelled: set when it is no longer wanted.
        leasing: gives the gang.
        ended_well: the state of a run that returned.

    Raises:
        HopsGpuError: what ended the run, with `error.result`.
    """
    execution = Execution(given, plan, board, cancelled, leasing)
    try:
        execution.run()
        result = execution.result(with_values=True)
    except BaseException as error:
        ended = state_of_failure(error)
        if isinstance(error, HopsGpuError):
            error.result = execution.result_of_failure(isinstance(error, StoreError))
        if (problem := execution.record(ended, str(error))) is not None:
            error.add_note(problem)
        board.state(ended)
        raise
    problem = execution.record(ended_well, None)
    board.state(ended_well)
    return replace(result, warnings=(*result.warnings, problem)) if problem else result


def state_of_failure(error: BaseException) -> GangState:
    """The state in which a run ends by this."""
    return GangState.CANCELLED if isinstance(error, Cancelled) else GangState.FAILED


def request_of(plan: LaunchPlan, board: Board, cancelled: threading.Event) -> Request:
    """What a plan asks of YARN."""
    return Request(
        run_id=board.run_id,
        shape=plan.shape,
        executors=plan.executors,
        placement=plan.spec.placement,
        timeout=plan.spec.acquire_timeout,
        cancelled=cancelled,
        watcher=board,
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
    ) -> None:
        self._given = given
        self._leasing = leasing
        self._plan = plan
        self._board = board
        self._cancelled = cancelled
        self._directory = Lake(plan.paths["run"])
        self._trained = Trained()
        self._model: ModelVersion | None = None
        self._warnings = list(plan.warnings)

    def run(self) -> None:
        """Acquires, trains, publishes and releases.

        Raises:
            HopsGpuError: as `launcher.launch`.
        """
        # A lake that refuses is found before any GPU is asked for.
        (self._directory / "logs").make()
        self._write(GangState.REQUESTED, None)
        request = request_of(self._plan, self._board, self._cancelled)
        with self._leasing(request) as lease:
            self._train(lease)

    def _train(self, lease: Lease) -> None:
        call = Call(
            function=self._given.call,
            modules=self._given.modules,
            environment=self._plan.environment,
            run_id=self._board.run_id,
            run_url=self._directory.url,
            attempt=0,
            memory=self._plan.spec.memory_per_worker,
        )
        world = assign_ranks(lease.containers, self._plan.ranks_per_executor)
        training = Training(lease, world, call, self._given.progress, self._cancelled)
        self._trained = training.trained
        self._board.mark("started")
        self._board.state(GangState.TRAINING)
        try:
            training.run()
        finally:
            self._board.mark("returned")
            self._board.ranks([report for _, report in sorted(self._trained.reports.items())])
        if self._trained.failure is not None:
            raise self._trained.failure
        if self._plan.spec.model is not None:
            self._publish(training, self._plan.spec.model)

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
        for rank, pickled in sorted(self._trained.values.items()):
            try:
                # From an agent that proved the run's secret, as was checked frame by frame.
                values.append(pickle.loads(pickled))
            except Exception as error:
                raise HopsGpuError(
                    f"the value of rank {rank} cannot be unpickled at the driver"
                    f" ({type(error).__name__}: {error}); return plain data"
                ) from error
        return tuple(values)

    def record(self, state: GangState, error: str | None) -> str | None:
        """Writes how the run ended to its directory; what went wrong with that, or None."""
        try:
            self._write(state, error)
        except StoreError as problem:
            return f"the run's record is not on the lake: {problem}"
        return None

    def _write(self, state: GangState, error: str | None) -> None:
        result = self.result(with_values=False)
        spec = self._plan.spec
        content: Mapping[str, Any] = {
            "schema": 1,
            "run_id": result.run_id,
            "application": self._given.application.id,
            "state": state.value,
            "error": error,
            "spec": {
                "name": spec.name,
                "workers": spec.workers,
                "gpus_per_worker": spec.gpus.per_worker,
                "cores_per_worker": spec.cores_per_worker,
                "memory_per_worker": spec.memory_per_worker,
                "placement": spec.placement,
                "model": spec.model,
                "acquire_timeout": spec.acquire_timeout,
                "env_vars": redacted(spec.env_vars),
            },
            "queue": self._plan.queue,
            "executor": asdict(self._plan.shape),
            "timeline": asdict(result.timeline),
            "gpu_seconds": asdict(result.gpu_seconds),
            "ranks": [asdict(rank) for rank in result.ranks],
            "warnings": result.warnings,
            "model": result.model.url if result.model is not None else None,
        }
        (self._directory / "run.json").write(json.dumps(content, indent=1).encode())
