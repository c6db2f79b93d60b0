"""A run from its plan to its result: environment and data, lease, attempts, publishing, release."""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from hopsgpu.artifacts.manifest import VersionDescription
from hopsgpu.artifacts.models import ModelVersion
from hopsgpu.backends.grant import Lease
from hopsgpu.backends.lease_request import Request
from hopsgpu.core.gang import Exclusions, GangState, assign_ranks
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.errors import Cancelled, CapacityError, HopsGpuError, RankFailed, StoreError
from hopsgpu.launcher.arguments import Arguments
from hopsgpu.launcher.attempt import Trained, Training, train_on
from hopsgpu.launcher.background import Background
from hopsgpu.launcher.data_staging import StagedData
from hopsgpu.launcher.gang_result import GangResult
from hopsgpu.launcher.preflight import asked_of_executors, python_of
from hopsgpu.launcher.publisher import check_writable
from hopsgpu.launcher.rank_call import Call, script_name
from hopsgpu.launcher.recorder import Recording
from hopsgpu.launcher.retry_policy import avoid_next, may_retry
from hopsgpu.launcher.run import Board
from hopsgpu.launcher.run_record import environment
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.storage.lake import Lake
from hopsgpu.storage.root import join_url
from hopsgpu.tracking import mlflow
from hopsgpu.units import counted

log = logging.getLogger(__name__)

# A context that provides a function, which returns the whole gang for a request, without the nodes
# and GPUs to avoid; a run calls it once for each attempt.
Leasing = Callable[[Request], AbstractContextManager[Callable[[Exclusions], Lease]]]
_KEEP_SECONDS = 120.0
# Those of the packages that are slow to import that can produce a model.
_FRAMEWORKS = ("torch", "tensorflow", "jax", "sklearn")
# Prefix of the metrics that hopsgpu adds to those that ranks report.
_OF_GPUS = "gpu."
_STEP = "step"


def execute(
    given: Arguments,
    plan: LaunchPlan,
    board: Board,
    cancelled: threading.Event,
    leasing: Leasing,
    background: Background,
    *,
    keeps: bool = False,
) -> GangResult:
    """Run a plan and return its result; the lease has ended before this returns or raises.

    When this returns or raises, record and logs are on the lake. The exception is a run that
    succeeded on a held gang: its record and logs follow soon, and the gang reports problems with
    them.

    Args:
        given: the launch's arguments.
        plan: the launch's plan.
        board: the run's status board, which is kept up to date.
        cancelled: event that cancels the run.
        leasing: provides the gang.
        background: writes record and logs to the lake.
        keeps: whether the gang is held for other launches.

    Raises:
        HopsGpuError: the error that ended the run, with `error.result`.
    """
    execution = Execution(given, plan, board, cancelled, leasing, background, keeps=keeps)
    try:
        execution.run()
        result = execution.result(with_values=True)
    except BaseException as error:
        ended = state_of_failure(error)
        log.info("%s: %s by %s", board.run_id, ended.value, type(error).__name__)
        execution.end(ended, given.application.words_of(error))
        background.flush(_KEEP_SECONDS)
        for problem in background.problems():
            error.add_note(problem)
        if isinstance(error, HopsGpuError):
            error.result = execution.result_of_failure(isinstance(error, StoreError))
        board.state(ended)
        raise
    execution.end(GangState.SUCCEEDED, None)
    if not keeps:
        background.flush(_KEEP_SECONDS)
        result = replace(result, warnings=(*result.warnings, *background.problems()))
    board.state(GangState.SUCCEEDED)
    return result


def state_of_failure(error: BaseException) -> GangState:
    """Return the state in which this error ends a run."""
    return GangState.CANCELLED if isinstance(error, Cancelled) else GangState.FAILED


class _BoardListener:
    """Writes the progress of a run's ranks to the run's status board."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def entered(self, ranks: int, of: int, at: float) -> None:
        if ranks < of:
            self._board.state(GangState.STARTING, why=f"{ranks} of {counted(of, 'rank')} run")
            return
        self._board.mark("started", at)
        self._board.state(GangState.RUNNING)

    def metrics(self, metrics: Sequence[Mapping[str, float]]) -> None:
        self._board.metrics(metrics)


class Execution:
    """One run in progress."""

    def __init__(
        self,
        given: Arguments,
        plan: LaunchPlan,
        board: Board,
        cancelled: threading.Event,
        leasing: Leasing,
        background: Background,
        *,
        keeps: bool,
    ) -> None:
        self._given = given
        self._leasing = leasing
        self._plan = plan
        self._board = board
        self._cancelled = cancelled
        # Whether the gang is held for other launches.
        self._keeps = keeps
        self._background = background
        self._directory = Lake(plan.paths["run"])
        self._trained = Trained()
        self._model: ModelVersion | None = None
        self._warnings = list(plan.warnings)
        self._attempt = 0
        self._avoid = Exclusions()
        self._lost: list[str] = []
        self._feed = StagedData(given.data, plan, given.application, board, cancelled)
        self._python_env: PythonEnv | None = None
        # A strong reference would make a cycle, which would keep connections to the lake open until
        # a garbage collection.
        told = weakref.proxy(self)
        self._recording = Recording(
            plan,
            board,
            self._directory,
            application=given.application.id,
            user=given.application.user,
            environment=functools.partial(environment, given.application),
            result=lambda: told.result(with_values=False),
            background=background,
            cancelled=cancelled,
            data=lambda: told._feed.reference,
            python_env=lambda: told._python_env,
        )

    def run(self) -> None:
        """Prepare environment and data, acquire the gang, train, publish and release.

        Raises:
            HopsGpuError: as `launcher.api.launch`.
        """
        # A lake that refuses writes is detected before any GPU is requested.
        self._directory.make()
        (self._directory / "logs").make()
        spec = self._plan.spec
        if spec.model is not None:
            # On a held gang, GPUs would be idle while HDFS writes a block.
            check_writable(self._models, spec.model, self._board.run_id, blocks=not self._keeps)
        self.record(GangState.REQUESTED, None)
        with self._recording.watching():
            # The step that fails soonest comes first.
            self._python_env = python_of(
                self._given.python_env, self._plan.paths["root"], self._board, self._cancelled
            )
            # The agents of a held gang already run, and report missing modules themselves.
            asked = None if self._keeps else self._given.application
            imports = asked_of_executors(self._given.function.needs, self._python_env, asked)
            request = Request(
                self._board.run_id,
                self._plan,
                self._cancelled,
                self._board,
                frameworks=self._given.function.foreseen.imports,
                python_env=self._python_env,
                imports=imports,
                has_data=self._given.data is not None,
            )
            log.debug("%s: prepared; waits for the gang", self._board.run_id)
            with self._feed.ready(), self._leasing(request) as whole:
                while not self._attempted(whole(self._avoid)):
                    self._attempt += 1
                    self._board.attempt(self._attempt)

    def _attempted(self, lease: Lease) -> bool:
        """Make one attempt; return False if it failed and another one follows."""
        spec = self._plan.spec
        world = assign_ranks(
            lease.containers, self._plan.ranks_per_executor, spec.parameter_servers
        )
        with train_on(
            lease,
            world,
            self._call(),
            self._given.progress,
            _BoardListener(self._board),
            self._cancelled,
        ) as training:
            self._trained = training.trained
            log.info(
                "%s: attempt %d starts %s on %s",
                self._board.run_id,
                self._attempt,
                counted(len(world.processes), "rank"),
                counted(len(lease.containers), "executor"),
            )
            self._board.state(GangState.STARTING)
            try:
                with self._recording.following(training):
                    training.run()
            finally:
                self._board.mark("returned")
                self._board.ranks([report for _, report in sorted(self._trained.reports.items())])
                training.keep_logs(self._background)
            failure = self._trained.failure
            if failure is None:
                if spec.model is not None:
                    self._publish(training, lease, spec.model)
                return True
        if not self._is_tried_again(failure):
            raise failure
        return False

    def _call(self) -> Call:
        return Call(
            self._plan,
            self._given.function,
            self._board.run_id,
            self._directory,
            self._attempt,
            interface=self._given.application.interface,
            data=self._feed.parts,
            python_env=self._python_env,
            script=script_name(),
        )

    def _is_tried_again(self, failure: RankFailed) -> bool:
        fault, retries = self._trained.fault, self._plan.spec.retries
        code_too = self._given.application.retries_code_too
        if self._cancelled.is_set() or not may_retry(
            fault, attempt=self._attempt, retries=retries, code_too=code_too
        ):
            log.info(
                "%s: attempt %d is not tried again: fault %s, %d of %d retries used",
                self._board.run_id,
                self._attempt,
                fault.value,
                self._attempt,
                retries,
            )
            return False
        if self._trained.suspect is not None:
            self._lost.append(self._trained.suspect)
        self._avoid = avoid_next(self._avoid | self._trained.avoid, self._lost)
        if not self._is_left(failure):
            return False
        log.info(
            "%s: attempt %d is tried again: fault %s of rank %s on %s, without %s",
            self._board.run_id,
            self._attempt,
            fault.value,
            failure.rank,
            failure.host,
            self._avoid if self._avoid.is_any else "leaving anything out",
        )
        told = str(failure).splitlines()[0]
        told = f"attempt {self._attempt} failed ({fault.value}): {told}"
        self._warnings.append(told)
        line = f"hopsgpu: {told}; trying again"
        self._given.progress.line(failure.rank or 0, failure.host or "?", line)
        return True

    def _is_left(self, failure: RankFailed) -> bool:
        """Return whether the gang still fits without what is to blame; if not, note why."""
        try:
            if self._avoid.is_any:
                self._given.application.check_again(self._plan, self._avoid)
        except CapacityError as error:
            log.info(
                "%s: not tried again: the gang does not fit without %s",
                self._board.run_id,
                self._avoid,
            )
            failure.add_note(f"not tried again without {self._avoid}, which is to blame: {error}")
            return False
        except HopsGpuError as error:
            self._warnings.append(f"whether the gang still fits was not known: {error}")
        return True

    @property
    def _models(self) -> str:
        return join_url(self._plan.paths["root"], "models")

    def _publish(self, training: Training, lease: Lease, name: str) -> None:
        publisher = training.publisher(name)
        left = publisher.left()
        idle = set() if self._keeps or not left else publisher.idle(left)
        staying = [c.host for c in lease.containers if c.key not in idle]
        self._board.state(GangState.PUBLISHING, staying)
        if not left:
            log.info("%s: no version of %s published: no files", self._board.run_id, name)
            self._warnings.append(
                f"no version of {name!r} was published: the ranks left nothing in"
                " context().model_dir"
            )
            return
        if idle and lease.let_go(idle):
            self._board.departed([time.time()] * len(idle))
        began = time.monotonic()
        self._model = publisher.publish(self._models, left, self._about())
        log.info(
            "%s: model published: %s version %d after %.1f s",
            self._board.run_id,
            name,
            self._model.version,
            time.monotonic() - began,
        )
        self._warnings += publisher.warnings
        self._board.mark("published")

    def _about(self) -> VersionDescription:
        """Return what the manifest says besides the files."""
        application, provenance = self._given.application, self._given.provenance
        assert provenance is not None, "there is one where a model is to be published"
        reported = next(iter(self._board.status().metrics), {})
        return VersionDescription(
            metrics={
                n: v for n, v in reported.items() if n != _STEP and not n.startswith(_OF_GPUS)
            },
            run_id=self._board.run_id,
            application=application.id,
            user=application.user,
            framework=next(
                (f for f in self._given.function.foreseen.imports if f in _FRAMEWORKS), None
            ),
            code_digest=provenance.code_digest,
            parameters=provenance.parameters,
            data=self._feed.reference,
        )

    def result(self, *, with_values: bool) -> GangResult:
        """Return the result, as far as there is one yet."""
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
        """Return the partial result of a failed run, without values that cannot be unpickled."""
        try:
            return self.result(with_values=with_values)
        except HopsGpuError:  # a second problem must not hide the first
            return self.result(with_values=False)

    def _values(self) -> tuple[Any, ...]:
        values = []
        for rank, value in sorted(self._trained.values.items()):
            # Safe to unpickle: it comes from an agent that proved to know the run's secret, and a
            # file on the lake is checked against the digest that the agent sent.
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
        """Have the run's state written to its record, in the background."""
        self._recording.put(state.value, error)

    def end(self, state: GangState, error: str | None) -> None:
        """Have the run's final state recorded, and the run logged to MLflow if requested."""
        self.record(state, error)
        tracking, code = self._given.tracking, self._given.provenance
        if tracking is not None:
            # It logs what is on the lake, so it comes after all that was put before.
            self._background.put_behind(
                f"{self._board.run_id} in MLflow",
                functools.partial(mlflow.log, tracking, self._directory.url, code),
            )
