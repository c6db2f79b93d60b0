"""A run from its plan to its result: data, environment, gang, attempts, publishing, release."""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from hopsgpu.artifacts.checkpoint_positions import latest_positions
from hopsgpu.artifacts.checkpoints import Checkpoints
from hopsgpu.artifacts.manifest import VersionDescription
from hopsgpu.attempts.attempt import AttemptListener, AttemptResult, AttemptRunner, open_attempt
from hopsgpu.attempts.outcome import Conclusion
from hopsgpu.attempts.publisher import check_writable, discard
from hopsgpu.attempts.rank_call import Call, script_name
from hopsgpu.attempts.rank_table import Entered, RankTable
from hopsgpu.attempts.retry_policy import avoid_next, may_retry
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.backends.gang_request import Request
from hopsgpu.core.end_reason import EndReason, reason_of_error
from hopsgpu.core.gang import Exclusions, GangState, assign_ranks
from hopsgpu.errors import CapacityError, HopsGpuError, RankFailed, StoreError
from hopsgpu.launcher.arguments import Arguments
from hopsgpu.launcher.data_staging import StagedData
from hopsgpu.launcher.preflight import modules_to_check, python_of
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.recorder import Recording
from hopsgpu.runs.run_details import RunDetails
from hopsgpu.runs.run_end import run_to_end
from hopsgpu.runs.status_board import Board
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.root import join_url
from hopsgpu.tracking import mlflow
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

# A context that provides a function, which returns the whole gang for a request, without the nodes
# and GPUs to avoid; a run calls it once for each attempt.
Leasing = Callable[[Request], AbstractContextManager[Callable[[Exclusions], GangAllocation]]]
# Those of the packages that are slow to import that can produce a model.
_FRAMEWORKS = ("torch", "tensorflow", "jax", "sklearn")
# Prefix of the metrics that hopsgpu adds to those that ranks report.
_OF_GPUS = "gpu."
_STEP = "step"


def execute(
    arguments: Arguments, active: ActiveRun[Board], leasing: Leasing, *, keeps: bool = False
) -> GangResult:
    """Run a plan and return its result; the allocation has ended before this returns or raises.

    When this returns or raises, record and logs are on the lake. The exception is a run that
    succeeded on a held gang: its record and logs follow soon, and the gang reports problems with
    them.

    Args:
        arguments: the launch's arguments.
        active: the launch's run.
        leasing: provides the gang.
        keeps: whether the gang is held for other launches.

    Raises:
        HopsGpuError: the error that ended the run, with `error.result`.
    """
    execution = GangExecution(arguments, active, leasing, keeps=keeps)
    return run_to_end(execution, active, waits=not keeps)


class OnBoard(AttemptListener):
    """Writes the progress of an attempt to the run's status board."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def placed(self, ranks: RankTable) -> None:
        self._board.placed(ranks)

    def entered(self, entered: Entered) -> None:
        if entered.all:
            self._board.mark("started", entered.at)
            self._board.state(GangState.RUNNING)
        else:
            why = f"{entered.ranks} of {count_of(entered.of, 'rank')} run"
            self._board.state(GangState.STARTING, why=why)

    def metrics(self, metrics: Sequence[Mapping[str, float]]) -> None:
        self._board.metrics(metrics)

    def warn(self, text: str) -> None:
        self._board.warn_of_attempt(text)


class Execution(ABC):
    """One launch in progress; `Endable` describes its public methods.

    Args:
        arguments: the launch's arguments.
        active: the launch's run.
        keeps: whether the gang is held for other launches.
    """

    def __init__(self, arguments: Arguments, active: ActiveRun[Board], *, keeps: bool) -> None:
        self._arguments = arguments
        self._active = active
        self._keeps = keeps
        self._plan = active.plan
        self._board = active.board
        self._cancelled = active.cancelled
        self._directory = active.directory()
        self._trained = AttemptResult()
        self._values: tuple[Any, ...] = ()
        self._avoid = Exclusions()
        self._suspects: list[str] = []
        # Attempts that failed and were retried.
        self._retried = 0
        self._publishes = False
        # What earlier attempts uploaded and could not publish.
        self._kept_uploads: list[LakePath] = []
        self._feed = StagedData(
            arguments.data, self._plan, arguments.application, self._board, self._cancelled
        )
        self._python_env: PythonEnv | None = None
        for text in self._plan.warnings:
            self._board.warn(text)

    def work(self, recording: Recording) -> None:
        """Prepare environment and data, acquire the gang, train, publish and release.

        Raises:
            HopsGpuError: as `launcher.api.launch`.
        """
        # A lake that refuses writes is detected before any GPU is requested.
        self._directory.make_writable()
        (self._directory / "logs").make()
        spec = self._plan.spec
        if spec.model is not None:
            # On a held gang, GPUs would be idle while HDFS writes a block.
            check_writable(self._models, spec.model, self._board.run_id, blocks=not self._keeps)
        recording.put(GangState.REQUESTED.value)
        with recording.watching():
            # The step that fails soonest comes first.
            self._python_env = python_of(
                self._arguments.python_env, self._plan.paths["root"], self._board, self._cancelled
            )
            # The agents of a held gang already run, and report missing modules themselves.
            application = None if self._keeps else self._arguments.application
            imports = modules_to_check(
                self._arguments.function.needs, self._python_env, application
            )
            request = Request(
                self._board.run_id,
                self._plan,
                self._cancelled,
                self._board,
                frameworks=self._arguments.function.foreseen.imports,
                python_env=self._python_env,
                imports=imports,
                has_data=self._arguments.data is not None,
            )
            log.debug("%s: prepared; waits for its executors", self._board.run_id)
            with self._feed.ready():
                self._on_gang(request, recording)
        self._values = self._unpickled()

    @abstractmethod
    def _on_gang(self, request: Request, recording: Recording) -> None:
        """Acquire executors, and make attempts on them until one succeeds; release them."""

    def _attempt(
        self,
        allocation: GangAllocation,
        recording: Recording,
        listener: AttemptListener,
        stopped: threading.Event,
        begun: Callable[[AttemptRunner], None] = lambda _: None,
    ) -> Conclusion | None:
        """Make one attempt; return why it failed, or None.

        Args:
            allocation: the gang.
            recording: follows the attempt's logs.
            listener: is notified of the attempt's progress.
            stopped: event that stops the attempt.
            begun: called with the attempt before it starts its ranks.

        Raises:
            Cancelled: `stopped` was set; the ranks have been stopped.
        """
        spec = self._plan.spec
        # An earlier attempt may have lost what it published.
        self._publishes = False
        world = assign_ranks(
            allocation.containers, self._plan.ranks_per_executor, spec.parameter_servers
        )
        with open_attempt(
            allocation,
            world,
            self._call(world.size),
            self._arguments.progress,
            listener,
            stopped,
            self._active.bounds,
        ) as training:
            self._trained = training.result
            begun(training)
            log.info(
                "%s: attempt %d starts %s on %s",
                self._board.run_id,
                self._board.attempt,
                count_of(len(world.processes), "rank"),
                count_of(len(allocation.containers), "executor"),
            )
            self._board.state(GangState.STARTING)
            try:
                with recording.following(training):
                    self._run(training)
            finally:
                self._board.mark("returned")
                training.keep_logs(self._active.background)
            conclusion = self._trained.conclusion
            if conclusion is None and spec.model is not None:
                self._publish(training, allocation, spec.model)
        return conclusion

    def _run(self, training: AttemptRunner) -> None:
        """Run the ranks of an attempt to their end."""
        training.run()

    def _shards(self, ranks: int) -> Sequence[bytes]:
        """Return the serialized shards for each of the ranks of an attempt; empty without data.

        An attempt that continues at a checkpoint first gets the rest of the checkpoint's epoch.

        Raises:
            ConfigError: there are fewer rows than ranks.
            StoreError: the lake failed, or a checkpoint there is damaged.
        """
        resumed = self._plan.paths.get("resume")
        if self._arguments.data is None or not (self._board.attempt or resumed):
            return self._feed.parts_for(ranks)
        urls = [self._plan.paths["run"], *([resumed] if resumed else [])]
        places = [Checkpoints(LakePath(join_url(url, "checkpoints")), rank=0) for url in urls]
        return self._feed.parts_for(ranks, latest_positions(places))

    def _call(self, ranks: int) -> Call:
        return Call(
            self._plan,
            self._arguments.function,
            self._board.run_id,
            self._directory,
            self._board.attempt,
            interface=self._arguments.application.interface,
            data=self._shards(ranks),
            python_env=self._python_env,
            script=script_name(),
        )

    def _is_retried(self, conclusion: Conclusion) -> bool:
        attempt, retries = self._board.attempt, self._plan.spec.retries
        failure, fault = conclusion.failure, conclusion.fault
        code_too = self._arguments.application.should_retry_user_errors
        if self._cancelled.is_set() or not may_retry(
            fault, retried=self._retried, retries=retries, code_too=code_too
        ):
            log.info(
                "%s: attempt %d is not retried: fault: %s; %d of %d retries used",
                self._board.run_id,
                attempt,
                fault.value,
                self._retried,
                retries,
            )
            return False
        self._note_causes(conclusion)
        if not self._still_fits(failure):
            return False
        self._retried += 1
        log.info(
            "%s: retries after attempt %d: fault: %s, rank %s on %s; excludes: %s",
            self._board.run_id,
            attempt,
            fault.value,
            failure.rank,
            failure.host,
            self._avoid if self._avoid.is_any else "nothing",
        )
        problem = f"attempt {attempt} failed ({fault.value}): {str(failure).splitlines()[0]}"
        self._board.warn(problem)
        line = f"hopsgpu: {problem}; the gang starts again"
        self._arguments.progress.line(failure.rank or 0, failure.host or "?", line)
        return True

    def _note_causes(self, conclusion: Conclusion) -> None:
        """Have later attempts avoid what caused a failure."""
        if conclusion.suspect is not None:
            self._suspects.append(conclusion.suspect)
        self._avoid = avoid_next(self._avoid | conclusion.avoid, self._suspects)

    def _still_fits(self, failure: RankFailed) -> bool:
        """Return whether the gang still fits without what caused the failure; if not, note why."""
        problem = self._misfit()
        if problem is None:
            return True
        log.info(
            "%s: not retried: the gang does not fit without %s",
            self._board.run_id,
            self._avoid,
        )
        failure.add_note(f"not retried without {self._avoid}, which caused the failure: {problem}")
        return False

    def _misfit(self) -> CapacityError | None:
        """Return why the gang can never be granted without what it avoids, or None."""
        try:
            if self._avoid.is_any:
                least = replace(self._plan, executors=self._plan.least_executors)
                self._arguments.application.check_again(least, self._avoid)
        except CapacityError as error:
            return error
        except HopsGpuError as error:
            self._board.warn(f"cannot determine whether the gang still fits: {error}")
        return None

    @property
    def _models(self) -> str:
        return join_url(self._plan.paths["root"], "models")

    def _publish(self, training: AttemptRunner, allocation: GangAllocation, name: str) -> None:
        publisher = training.publisher(name)
        left = publisher.left()
        idle = set() if self._keeps or not left else publisher.idle(left)
        staying = [c.host for c in allocation.containers if c.key not in idle]
        self._board.state(GangState.PUBLISHING, staying)
        if not left:
            log.info(
                "%s: publishes no version of %s: the ranks left no files", self._board.run_id, name
            )
            self._board.warn(
                f"no version of {name!r} was published: the ranks left nothing in"
                " context().model_dir"
            )
            return
        if idle and allocation.release_part(idle):
            self._board.departed([time.time()] * len(idle))
        began = time.monotonic()
        self._publishes = True
        try:
            model = publisher.publish(self._models, left, self._about())
        finally:
            if publisher.kept is not None:
                self._kept_uploads.append(publisher.kept)
        self._publishes = False
        log.info(
            "%s: model published: %s version %d after %.1f s",
            self._board.run_id,
            name,
            model.version,
            time.monotonic() - began,
        )
        for warning in filter(None, map(discard, self._kept_uploads)):
            self._board.warn(warning)
        self._board.published(model)

    def _about(self) -> VersionDescription:
        """Return what the manifest says besides the files."""
        application, provenance = self._arguments.application, self._arguments.provenance
        assert provenance is not None, "a launch with a model has one"
        reported = next(iter(self._board.status().metrics), {})
        return VersionDescription(
            metrics={
                n: v for n, v in reported.items() if n != _STEP and not n.startswith(_OF_GPUS)
            },
            run_id=self._board.run_id,
            application=application.id,
            user=application.user,
            framework=next(
                (f for f in self._arguments.function.foreseen.imports if f in _FRAMEWORKS), None
            ),
            code_digest=provenance.code_digest,
            parameters=provenance.parameters,
            data=None
            if self._feed.reference is None
            else {name: vars(data) for name, data in self._feed.reference.items()},
        )

    def details(self) -> RunDetails:
        return RunDetails(self._feed.reference, self._python_env)

    def put_rest(self) -> None:
        tracking, code = self._arguments.tracking, self._arguments.provenance
        if tracking is not None:
            # It logs what is on the lake, so it comes after all that was put before.
            self._active.background.put_after_all(
                f"{self._board.run_id} in MLflow",
                functools.partial(mlflow.log, tracking, self._directory.url, code),
            )

    def result(self) -> GangResult:
        return replace(self._board.result(), values=self._values)

    def end_reason(self, error: BaseException) -> EndReason:
        conclusion = self._trained.conclusion
        if conclusion is not None and error is conclusion.failure:
            return conclusion.reason
        return reason_of_error(error, publishing=self._publishes)

    def result_of_failure(self, error: HopsGpuError) -> GangResult:
        if isinstance(error, StoreError):
            # The ranks may have returned before the model could not be published.
            with contextlib.suppress(HopsGpuError):  # a second problem must not hide the first
                self._values = self._unpickled()
        return self.result()

    def _unpickled(self) -> tuple[Any, ...]:
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


class GangExecution(Execution):
    """One launch of a gang of one size in progress.

    Args:
        arguments: the launch's arguments.
        active: the launch's run.
        leasing: provides the gang.
        keeps: whether the gang is held for other launches.
    """

    def __init__(
        self, arguments: Arguments, active: ActiveRun[Board], leasing: Leasing, *, keeps: bool
    ) -> None:
        super().__init__(arguments, active, keeps=keeps)
        self._leasing = leasing

    def _on_gang(self, request: Request, recording: Recording) -> None:
        with self._leasing(request) as whole:
            while True:
                allocation, listener = whole(self._avoid), OnBoard(self._board)
                conclusion = self._attempt(allocation, recording, listener, self._cancelled)
                if conclusion is None:
                    return
                if not self._is_retried(conclusion):
                    raise conclusion.failure
                self._board.retry()
