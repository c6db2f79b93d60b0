"""`score`: a table scored on executors that come and go, from the first granted GPU on."""

from __future__ import annotations

import functools
import logging
import threading
import time
from dataclasses import replace

from hopsgpu.artifacts.runs import RunStore, parts_elsewhere
from hopsgpu.core.gang import GangState
from hopsgpu.core.run_record import ScoreRecord
from hopsgpu.data.argument import DEFAULT_NAME, Data, Datasets
from hopsgpu.data.lake_file import open_lake_file
from hopsgpu.data.parquet import read_footer
from hopsgpu.data.source import ParquetSource
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.launcher.data_staging import StagedSources
from hopsgpu.launcher.interrupts import takes, wait_for
from hopsgpu.launcher.planner import new_run_id, plan_of
from hopsgpu.launcher.preflight import prepare_request
from hopsgpu.launcher.running import refuse_running
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.recorder import Recording
from hopsgpu.runs.run import Handle
from hopsgpu.runs.run_details import RunDetails
from hopsgpu.runs.run_end import RunBody
from hopsgpu.runs.run_start import start_run
from hopsgpu.scoring.part_scorer import ScoreTask
from hopsgpu.scoring.score_board import ScoreBoard
from hopsgpu.scoring.score_loop import WORKERS, ScoreLoop
from hopsgpu.scoring.score_options import ScoreArguments, ScoreOptions, score_arguments
from hopsgpu.scoring.score_plan import (
    EarlierPlan,
    ScorePlan,
    arrow_schema,
    chosen_columns,
    new_score_plan,
)
from hopsgpu.scoring.score_results import ScoreResult
from hopsgpu.scoring.table_output import TableOutput
from hopsgpu.storage.error_messages import ABSENT
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.root import join_url

log = logging.getLogger(__name__)

_OUTPUT = "output"
# Characters of a part's error in the record, which may have many of them.
_MAX_ERROR_CHARACTERS = 2000


@takes(ScoreOptions)
def score(options: ScoreOptions, interrupted: threading.Event) -> ScoreResult:
    """Score a table, on GPUs that arrive and leave one by one.

    The table is divided into parts: row groups, or pieces of large ones. The first part is scored
    when the first executor is granted; each further executor gets parts as soon as it arrives, and
    is released when no part is left for it. A part whose executor is lost is repeated by another
    one. The output is Parquet with the kept columns and the predictions, in the table's order and
    with each row once; it is there completely or not at all.

    Raises:
        ConfigError: an argument or setting is invalid, the output exists, the data cannot be read
            in place or written, or the score to resume does not exist, is still running or was of
            other data; no GPU was requested.
        CapacityError: YARN can never grant an executor; nothing was requested.
        GangTimeout: no executor arrived in time.
        StoreError: there is no such model or version, or the lake refused.
        HopsGpuError: a part failed three times: the message has the place of its rows and the
            user's traceback; or `score_timeout` has passed. As with the other errors of a score
            that has begun, `error.result` has what there is, and `resume=` continues.
        KeyboardInterrupt: the user pressed Ctrl-C; the score's GPUs are back.
    """
    arguments = score_arguments(options, interrupted)
    options, application = arguments.options, arguments.application
    run_id = options.resume or new_run_id(arguments.spec.name)
    run = LakePath(join_url(LakePath(application.root).url, f"runs/{run_id}"))
    earlier = None if options.resume is None else _earlier(run, run_id, arguments)
    output = _output(run, run_id, arguments, earlier)
    datasets = arguments.datasets if earlier is None else _written_before(arguments.datasets, run)
    plan = plan_of(arguments, run_id, datasets)
    board = ScoreBoard(run_id, arguments.terms, plan.shape.gpus, arguments.progress)
    log.info(
        "%s: scores on at most %d executors with %d GPUs each",
        run_id,
        arguments.terms.max_running,
        plan.shape.gpus,
    )
    make_body = functools.partial(
        _ScoreRun, arguments, datasets=datasets, output=output, earlier=earlier
    )
    handle = start_run(Handle[ScoreResult], plan, application, board, make_body)
    return wait_for(handle, interrupted)


def _earlier(run: LakePath, run_id: str, arguments: ScoreArguments) -> EarlierPlan:
    """Return the plan of the score to resume.

    Raises:
        ConfigError: there is no such score, or it is still running.
        StoreError: its plan cannot be read.
    """
    try:
        earlier = EarlierPlan(run)
    except StoreError as error:
        if error.kind != ABSENT:
            raise
        raise ConfigError(
            f"resume={run_id!r}: {run.url} is not a score that began; `hopsgpu runs` lists the runs"
        ) from None
    refuse_running(run, run_id, arguments.application, "score")
    return earlier


def _output(
    run: LakePath, run_id: str, arguments: ScoreArguments, earlier: EarlierPlan | None
) -> TableOutput:
    """Return the output, whose directory does not exist yet.

    Raises:
        ConfigError: the directory exists, it is on an object store, or the score to resume has
            another output.
    """
    url = arguments.output
    if earlier is not None:
        if url not in (None, earlier.output):
            raise ConfigError(
                f"output={url!r} differs from that of the score to resume: {earlier.output}"
            )
        url = earlier.output
    output = TableOutput(run / _OUTPUT if url is None else LakePath(url), run_id)
    output.target.check_renames("the outputs of scores", "output=")
    if earlier is not None and output.target.exists():
        raise ConfigError(
            f"resume={run_id!r}: {output.target.url} exists: that score is complete, or something"
            " else was written there"
        )
    output.check()
    return output


def _written_before(datasets: Datasets, run: LakePath) -> Datasets:
    """Return the data; as the Parquet files that an earlier run wrote of it, if they exist."""
    written = run / DEFAULT_NAME / DEFAULT_NAME
    if not any(datasets.frames) or not written.exists():
        return datasets
    return Datasets({DEFAULT_NAME: Data(written.url)}, is_single=True)


class _ScoreRun(RunBody[ScoreResult]):
    def __init__(
        self,
        arguments: ScoreArguments,
        active: ActiveRun[ScoreBoard],
        datasets: Datasets,
        output: TableOutput,
        earlier: EarlierPlan | None,
    ) -> None:
        self._arguments = arguments
        self._active = active
        self._board = active.board
        self._directory = active.directory()
        self._datasets = datasets
        self._output = output
        self._earlier = earlier
        self._staged = StagedSources(
            datasets, active.plan, active.application, active.board, active.cancelled
        )
        self._plan: ScorePlan | None = None
        self._python_env: PythonEnv | None = None
        self._is_published = False
        self._has_parts = True

    def work(self, recording: Recording) -> None:
        self._directory.make_writable()
        recording.put(GangState.REQUESTED.value)
        with recording.watching(), self._staged.ready():
            try:
                self._score(self._staged.sources[DEFAULT_NAME])
            except BaseException:
                # A second write of the DataFrame might order its rows differently.
                self._staged.keep()
                self._remove_unneeded()
                raise
        is_from_earlier_run = self._datasets is not self._arguments.datasets
        if is_from_earlier_run and not self._active.application.should_keep_data:
            (self._directory / DEFAULT_NAME).remove()

    def _score(self, source: ParquetSource) -> None:
        plan = self._plan = self._make_plan(source)
        # A run can be resumed once its plan is on the lake.
        plan.write(self._directory)
        self._output.prepare()
        kept_parts = self._output.kept_parts()
        rows = sum(plan.parts[number].rows for number in kept_parts)
        self._board.set_parts(source.num_rows, len(plan.parts), len(kept_parts), rows)
        if kept_parts:
            log.info(
                "%s: %d of %d parts are kept", self._board.run_id, len(kept_parts), len(plan.parts)
            )
            plan.schema = _schema_of(self._output.part(min(kept_parts)))
        self._board.mark("prepared")
        if len(kept_parts) < len(plan.parts):
            self._on_executors(plan, kept_parts)
        else:
            self._board.state(GangState.RELEASING)
            self._board.mark("released")
        if not plan.schema:
            raise HopsGpuError("no part could be scored; error.result.failed_parts says why")
        failed = {part.first for part in self._board.failed_parts}
        self._output.publish([part.number for part in plan.parts if part.first not in failed])
        self._is_published = True
        self._board.mark("published")
        self._sweep()

    def _remove_unneeded(self) -> None:
        """Remove all that the score has written, except what a run that resumes it needs."""
        if self._is_published:
            return
        try:
            self._has_parts = self._output.remove_unneeded()
        except StoreError as error:
            self._board.warn(f"{self._output.where} is left: {error}")

    def _sweep(self) -> None:
        """Remove the parts that earlier scores with the same output have left."""
        runs = RunStore(LakePath(self._active.application.root))
        try:
            for run_id, url in self._output.others().items():
                record = runs.load(run_id).record
                parts = None if record is None else parts_elsewhere(record)
                if record is None or parts is None or parts.url != url:
                    log.info("%s is left: it is of no score below this root", url)
                elif not runs.is_own(run_id):
                    log.info("%s is left: the record of its score is another user's", url)
                elif record.is_running(time.time()):
                    log.info("%s is left: its score goes on", url)
                else:
                    log.info("removes %s, which a score has left that ended early", url)
                    parts.remove()
        except HopsGpuError as error:
            self._board.warn(f"what earlier scores have left beside the output stays: {error}")

    def _make_plan(self, source: ParquetSource) -> ScorePlan:
        arguments, options = self._arguments, self._arguments.options
        model = None if arguments.model is None else arguments.model.url
        names = chosen_columns(source, options.columns, options.keep, options.shapes or {})
        if self._earlier is None:
            output = self._output.target.url
            most = arguments.terms.max_running
            return new_score_plan(
                source, names, model, arguments.provenance.code_digest, output, most
            )
        plan = self._earlier.resume(source, names, model)
        if plan.code != arguments.provenance.code_digest:
            self._board.warn(
                "predict or its modules differ from those of the score that is resumed: its parts"
                " were scored with the former code"
            )
        return plan

    def _on_executors(self, plan: ScorePlan, kept_parts: frozenset[int]) -> None:
        arguments, board, run = self._arguments, self._board, self._active
        options = arguments.options
        request = prepare_request(run, arguments.function, arguments.python_env, has_data=True)
        python_env = self._python_env = request.python_env
        task = ScoreTask(
            plan.source,
            plan.bounds,
            plan.columns,
            options.shapes or {},
            plan.keep,
            options.batch_size,
            arguments.model,
            self._output.drafts.url,
        )
        function = arguments.function_with({"task": task})
        loop = ScoreLoop(
            arguments, run, plan, self._output, function, kept_parts, python_env, self._workers()
        )
        most = min(arguments.terms.max_running, len(plan.parts) - len(kept_parts))
        with (
            loop.keeping(),
            loop.queuing_logs(),
            arguments.application.allocate_elastic(request.of_executors(most)) as allocator,
        ):
            board.state(GangState.WAITING)
            loop.run(allocator)

    def _workers(self) -> int:
        """Return the first number that no worker of an earlier run has; their logs stay."""
        names = () if self._earlier is None else (self._directory / WORKERS).names()
        return max((int(name) + 1 for name in names if name.isdecimal()), default=0)

    def result(self) -> ScoreResult:
        board, plan = self._board, self._plan
        return ScoreResult(
            run_id=board.run_id,
            url=self._output.target.url if self._is_published else "",
            rows=board.rows_kept,
            schema=arrow_schema(plan.schema) if plan is not None and plan.schema else None,
            failed_parts=board.failed_parts,
            gpu_seconds=board.gpu_seconds(),
            timeline=board.timeline,
            moments=board.moments,
            warnings=board.warnings,
            application=board.application,
            queue=board.queue,
        )

    def details(self) -> RunDetails:
        return RunDetails(
            call=self._arguments.provenance.as_record(),
            data=self._staged.reference,
            python_env=self._python_env,
            score=self._score_record(),
        )

    def _score_record(self) -> ScoreRecord:
        arguments, plan, status = self._arguments, self._plan, self._board.status()
        options = arguments.options
        kept_in = self._output.where if self._has_parts and not self._is_published else None
        return ScoreRecord(
            output=self._output.target.url,
            is_complete=self._is_published,
            kept_in=kept_in,
            model=None if arguments.model is None else arguments.model.url,
            columns=None if plan is None else tuple(plan.columns),
            keep=tuple(options.keep),
            batch_size=options.batch_size,
            max_concurrent=options.max_concurrent,
            gpus_per_worker=options.gpus_per_worker,
            on_error=options.on_error,
            rows=status.rows,
            scored=self._board.rows_kept,
            parts=status.parts,
            done=status.done,
            rate=status.rate,
            seconds_left=status.seconds_left,
            failed_parts=tuple(
                replace(part, error=part.error[-_MAX_ERROR_CHARACTERS:])
                for part in self._board.failed_parts
            ),
        )


def _schema_of(file: LakePath) -> bytes:
    with open_lake_file(file) as (handle, _):
        schema = read_footer(file, handle).schema.to_arrow_schema().remove_metadata()
    serialized: bytes = schema.serialize().to_pybytes()
    return serialized
