"""A run from its plan to its result: data, environment, gang, attempts, publishing, release."""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from hopsgpu.agent.script_files import ScriptFiles
from hopsgpu.artifacts.checkpoint_positions import latest_positions
from hopsgpu.artifacts.checkpoints import Checkpoints
from hopsgpu.artifacts.kept_files import conflict_error, read_kept
from hopsgpu.artifacts.manifest import VersionDescription
from hopsgpu.attempts.attempt import AttemptListener, AttemptResult, AttemptRunner, open_attempt
from hopsgpu.attempts.outcome import AttemptFailure
from hopsgpu.attempts.publisher import check_writable, discard
from hopsgpu.attempts.rank_call import Call, script_name
from hopsgpu.attempts.rank_table import FunctionEntry, RankTable
from hopsgpu.backends.gang_allocation import GangAllocation, provide_allocations
from hopsgpu.backends.gang_request import Request
from hopsgpu.core.end_reason import EndReason, reason_of_error
from hopsgpu.core.gang import Exclusions, GangState, assign_ranks
from hopsgpu.core.wait_reasons import starting_ranks, storing_script
from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.frameworks.cuda import nccl_conflict
from hopsgpu.launcher.arguments import Arguments
from hopsgpu.launcher.data_staging import StagedData
from hopsgpu.launcher.preflight import prepare_request
from hopsgpu.launcher.retries import Retries
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.packaging.script import StoredScript
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.recorder import Recording
from hopsgpu.runs.run_details import RunDetails
from hopsgpu.runs.run_end import RunBody
from hopsgpu.runs.status_board import GangBoard
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.root import join_url
from hopsgpu.tracking import mlflow
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

# Provides a function that returns the whole gang, without excluded nodes and GPUs; a run calls the
# function once for each attempt.
AllocationProvider = Callable[
    [Request], AbstractContextManager[Callable[[Exclusions], GangAllocation]]
]
# The packages that can produce a model, of those whose import the scan of a function foresees.
_FRAMEWORKS = ("torch", "tensorflow", "jax", "sklearn")
# Prefix of the metrics that hopsgpu adds to those that ranks report.
_GPU_PREFIX = "gpu."
_STEP = "step"
_CHECKPOINT_DIR = "checkpoint_dir"


class BoardListener(AttemptListener):
    """Writes the progress of an attempt to the run's status board."""

    def __init__(self, board: GangBoard) -> None:
        self._board = board

    def on_placement(self, ranks: RankTable) -> None:
        self._board.record_placement(ranks)

    def on_entry(self, entered: FunctionEntry) -> None:
        if entered.is_complete:
            self._board.mark("started", entered.at)
            self._board.state(GangState.RUNNING)
        else:
            why = starting_ranks(entered.of, entered.ranks)
            self._board.state(GangState.STARTING, why=why)

    def on_metrics(self, metrics: Sequence[Mapping[str, float]]) -> None:
        self._board.record_metrics(metrics)

    def on_warning(self, text: str) -> None:
        self._board.warn_of_attempt(text)


class GangRun(RunBody[GangResult]):
    """The run of a launch on a gang of one size.

    Args:
        provide_gang: provides the gang; None to acquire and release it for this run alone.
    """

    def __init__(
        self,
        arguments: Arguments,
        active: ActiveRun[GangBoard],
        provide_gang: AllocationProvider | None = None,
        *,
        is_held_gang: bool = False,
    ) -> None:
        self._arguments = arguments
        self._active = active
        self._provide_gang = provide_gang or functools.partial(
            provide_allocations, arguments.application.allocate
        )
        self._is_held_gang = is_held_gang
        self._plan = active.plan
        self._board = active.board
        self._cancelled = active.cancelled
        self._directory = active.directory()
        self._result = AttemptResult()
        self._values: tuple[Any, ...] = ()
        self._retries = Retries(active, arguments.progress)
        self._is_publishing = False
        # Uploads of earlier attempts that could not be published.
        self._kept_uploads: list[LakePath] = []
        self._staged = StagedData(
            arguments.data, self._plan, arguments.application, self._board, self._cancelled
        )
        self._python_env: PythonEnv | None = None
        self._script: StoredScript | None = None

    def work(self, recording: Recording) -> None:
        """Prepare environment and data, acquire the gang, train, publish and release.

        Raises:
            HopsGpuError: as `launcher.api.launch`.
        """
        with self._prepare(recording) as request, self._provide_gang(request) as allocate:
            while True:
                failure = self._make_attempt(
                    recording,
                    allocate(self._retries.exclusions),
                    BoardListener(self._board),
                    self._cancelled,
                )
                if failure is None:
                    break
                if not self._retries.prepare_retry(failure):
                    raise failure.error
                self._board.record_retry()
        self._record_values()

    def _record_values(self) -> None:
        self._values = self._unpickle_values()
        # The value of a script is its exit code, which says no more than that it succeeded.
        if self._arguments.script is None:
            self._board.record_value(self._values[0])

    @contextlib.contextmanager
    def _prepare(self, recording: Recording) -> Iterator[Request]:
        """Prepare environment and data, and provide the request for the gang's executors.

        The record is kept up to date until the exit.
        """
        # A lake that refuses writes is detected before any GPU is requested.
        self._directory.make_writable()
        (self._directory / "logs").make()
        spec = self._plan.spec
        if spec.model is not None:
            # On a held gang, GPUs would be idle while HDFS writes a block.
            blocks = not self._is_held_gang
            check_writable(self._models, spec.model, self._active.run_id, should_write_block=blocks)
        recording.put(GangState.REQUESTED.value)
        with recording.watching():
            request = prepare_request(
                self._active,
                self._arguments.function,
                self._arguments.python_env,
                has_data=self._arguments.data is not None,
                is_held_gang=self._is_held_gang,
            )
            self._python_env = request.python_env
            if (script := self._arguments.script) is not None:
                root, why = LakePath(self._plan.paths["root"]), storing_script(script.call.target)
                self._board.state(GangState.PREPARING, why=why)
                self._script = script.store(root, self._cancelled)
            log.debug("%s: prepared; waits for its executors", self._active.run_id)
            with self._staged.ready():
                yield request

    def _make_attempt(
        self,
        recording: Recording,
        allocation: GangAllocation,
        listener: AttemptListener,
        stopped: threading.Event,
        run_ranks: Callable[[AttemptRunner], object] = AttemptRunner.run,
    ) -> AttemptFailure | None:
        """Make one attempt; return why it failed, or None.

        Raises:
            Cancelled: `stopped` was set; the ranks have been stopped.
        """
        spec = self._plan.spec
        # An earlier attempt may have lost what it published.
        self._is_publishing = False
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
        ) as runner:
            self._result = runner.result
            log.info(
                "%s: attempt %d starts %s on %s",
                self._active.run_id,
                self._board.attempt,
                count_of(len(world.processes), "rank"),
                count_of(len(allocation.containers), "executor"),
            )
            env = "" if self._python_env is None else self._python_env.name
            why = starting_ranks(len(world.processes), python_env=env)
            # Only the function chooses its backend. If it is NCCL, the ranks refuse it.
            conflict = "" if spec.independent_ranks else nccl_conflict(world, spec.env_vars)
            self._board.state(GangState.STARTING, why=why.with_details(conflict))
            try:
                with recording.following(runner):
                    run_ranks(runner)
            finally:
                self._board.mark("returned")
                # Without a wait: the lake may hang, and the gang has its GPUs until they return.
                runner.queue_log_uploads(self._active.background, seconds=0.0)
            if runner.result.failure is None:
                self._check_kept_files()
            if runner.result.failure is None and spec.model is not None:
                self._publish(runner, allocation, spec.model)
        return runner.result.failure

    def _shards(self, ranks: int) -> Sequence[bytes]:
        """Return the serialized shards for each of the ranks of an attempt; empty without data.

        An attempt that continues at a checkpoint first gets the rest of the checkpoint's epoch.

        Raises:
            ConfigError: there are fewer rows than ranks.
            StoreError: the lake failed, or a checkpoint there is damaged.
        """
        resumed = self._plan.paths.get("resume")
        if self._arguments.data is None or not (self._board.attempt or resumed):
            return self._staged.shards_for(ranks)
        urls = [self._plan.paths["run"], *([resumed] if resumed else [])]
        places = [Checkpoints(LakePath(join_url(url, "checkpoints")), rank=0) for url in urls]
        return self._staged.shards_for(ranks, latest_positions(places))

    def _call(self, ranks: int) -> Call:
        return Call(
            self._plan,
            self._arguments.function,
            self._active.run_id,
            self._directory,
            self._board.attempt,
            interface=self._arguments.application.interface,
            data=self._shards(ranks),
            python_env=self._python_env,
            script=script_name(),
            log_limit=self._arguments.application.log_limit,
            script_files=self._script_files(),
        )

    def _script_files(self) -> ScriptFiles | None:
        """Return what agents need of the script, with the files that are put back; None without.

        Raises:
            StoreError: the lake failed, or ranks wrote different files of one name.
        """
        if self._script is None:
            return None
        kept, runs = self._arguments.kept, [self._directory]
        if kept.checkpoints is None:
            return ScriptFiles(self._script, kept, (), self._directory.url)
        if (resumed := self._plan.paths.get("resume")) is not None:
            runs.append(LakePath(resumed))
        for run in runs:
            files = read_kept(run).below([kept.checkpoints])
            if files.conflicts:
                raise conflict_error(files.conflicts, _CHECKPOINT_DIR, run)
            if files.files:
                log.info("%s: puts back %d files of %s", self._active.run_id, len(files.files), run)
                return ScriptFiles(self._script, kept, tuple(files.files.values()), run.url)
        return ScriptFiles(self._script, kept, (), self._directory.url)

    def _check_kept_files(self) -> None:
        """Raise StoreError if ranks wrote different checkpoint files of one name."""
        kept = self._arguments.kept.checkpoints
        if kept is not None:
            conflicts = read_kept(self._directory).below([kept]).conflicts
            if conflicts:
                raise conflict_error(conflicts, _CHECKPOINT_DIR, self._directory)

    @property
    def _models(self) -> str:
        return join_url(self._plan.paths["root"], "models")

    def _publish(self, runner: AttemptRunner, allocation: GangAllocation, name: str) -> None:
        publisher = runner.publisher(name)
        files = publisher.find_files()
        idle = set() if self._is_held_gang or not files else publisher.idle_agents(files)
        staying = [c.host for c in allocation.containers if c.key not in idle]
        self._board.state(GangState.PUBLISHING, staying)
        if not files:
            log.info(
                "%s: publishes no version of %s: the ranks left no files", self._active.run_id, name
            )
            self._board.warn(
                f"no version of {name!r} was published: the ranks left nothing in"
                " context().model_dir"
            )
            return
        if idle and allocation.release_part(idle):
            self._board.record_departures([time.time()] * len(idle))
        began = time.monotonic()
        self._is_publishing = True
        try:
            model = publisher.publish(self._models, files, self._describe_version())
        finally:
            if publisher.kept is not None:
                self._kept_uploads.append(publisher.kept)
        self._is_publishing = False
        log.info(
            "%s: model published: %s version %d after %.1f s",
            self._active.run_id,
            name,
            model.version,
            time.monotonic() - began,
        )
        for warning in filter(None, map(discard, self._kept_uploads)):
            self._board.warn(warning)
        self._board.record_model(model)

    def _describe_version(self) -> VersionDescription:
        """Return what the manifest says besides the files."""
        application, provenance = self._arguments.application, self._arguments.provenance
        reported = next(iter(self._board.status().metrics), {})
        return VersionDescription(
            metrics={
                n: v for n, v in reported.items() if n != _STEP and not n.startswith(_GPU_PREFIX)
            },
            run_id=self._active.run_id,
            application=application.id,
            user=application.user,
            framework=next(
                (f for f in self._arguments.function.foreseen.imports if f in _FRAMEWORKS), None
            ),
            code_digest=provenance.code_digest,
            parameters=provenance.parameters,
            data=None
            if self._staged.reference is None
            else {name: vars(data) for name, data in self._staged.reference.items()},
        )

    def details(self) -> RunDetails:
        return RunDetails(
            call=self._arguments.provenance.as_record(),
            data=self._staged.reference,
            python_env=self._python_env,
        )

    def queue_final_work(self) -> None:
        tracking, code = self._arguments.tracking, self._arguments.provenance
        if tracking is not None:
            # MLflow gets what is on the lake, so the work follows all earlier work.
            self._active.background.put_after_all(
                f"{self._active.run_id} in MLflow",
                functools.partial(mlflow.log, tracking, self._directory.url, code),
            )

    def result(self) -> GangResult:
        return replace(self._board.result(), values=self._values)

    def end_reason(self, error: BaseException) -> EndReason:
        failure = self._result.failure
        if failure is not None and error is failure.error:
            return failure.reason
        return reason_of_error(error, is_publishing=self._is_publishing)

    def result_of_failure(self, error: HopsGpuError) -> GangResult:
        if isinstance(error, StoreError):
            # The ranks may have returned before the model could not be published.
            with contextlib.suppress(HopsGpuError):  # a second problem must not hide the first
                self._values = self._unpickle_values()
        return self.result()

    def _unpickle_values(self) -> tuple[Any, ...]:
        values = []
        for rank, value in sorted(self._result.values.items()):
            # Safe to unpickle: the agent has proved to know the run's secret, and `content` checks
            # a file on the lake against the agent's digest.
            pickled = value.content(self._directory)
            try:
                values.append(pickle.loads(pickled))
            except Exception as error:
                raise HopsGpuError(
                    f"the value of rank {rank} cannot be unpickled at the driver"
                    f" ({type(error).__name__}: {error}); return plain data"
                ) from error
        return tuple(values)
