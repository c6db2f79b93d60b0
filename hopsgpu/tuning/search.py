"""`search`: runs trials from the first granted GPU on, and more at a time as GPUs arrive."""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from hopsgpu.artifacts.runs import RECORD
from hopsgpu.core.gang import GangState
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.launcher.interrupts import takes, wait_for
from hopsgpu.launcher.planner import new_run_id, plan_of
from hopsgpu.launcher.preflight import prepare_request
from hopsgpu.launcher.running import refuse_running
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.recorder import Recording
from hopsgpu.runs.run import Handle
from hopsgpu.runs.run_details import RunDetails
from hopsgpu.runs.run_end import KEEP_SECONDS, RunBody
from hopsgpu.runs.run_start import start_run
from hopsgpu.storage.lake import LakePath
from hopsgpu.tuning.search_board import SearchBoard
from hopsgpu.tuning.search_options import SearchArguments, SearchOptions, search_arguments
from hopsgpu.tuning.search_results import SearchResult
from hopsgpu.units import count_of

if TYPE_CHECKING:
    import optuna

    from hopsgpu.tuning.journal import Journal
    from hopsgpu.tuning.sampler_thread import SamplerThread

log = logging.getLogger(__name__)

JOURNAL = "journal.log"
PAGE = "search.html"


@takes(SearchOptions)
def search(options: SearchOptions, interrupted: threading.Event) -> SearchResult:
    """Search for the parameters with the best metric, on GPUs that arrive and leave one by one.

    The first trial runs when the first executor is granted. Each further executor gets a trial as
    soon as it arrives, and is released when fewer trials are left than executors. Each trial is a
    fresh process that runs `train_fn(**kwargs, **parameters)` and returns the metric. The call
    returns once the ResourceManager shows the GPUs gone.

    Raises:
        ConfigError: an argument or setting is invalid, Optuna is not installed at the driver, or
            the search to resume does not exist or is still running; no GPU was requested.
        CapacityError: YARN can never grant the executors; nothing was requested.
        GangTimeout: no executor arrived in time.
        StoreError: the lake refused the search's directory.
        HopsGpuError: more trials failed than `max_failures`, or Optuna could not continue. As with
            the other errors of a search that has begun, `error.result` has the results so far.
        KeyboardInterrupt: the user pressed Ctrl-C; the search's GPUs are back.
    """
    return run_search(search_arguments(options, interrupted), interrupted)


def run_search(arguments: SearchArguments, interrupted: threading.Event) -> SearchResult:
    """Run a search, as `search` does, with checked arguments."""
    run_id = arguments.resume or arguments.named or new_run_id(arguments.spec.name)
    plan = _plan(arguments, run_id)
    _check_before(arguments, LakePath(plan.paths["run"]), run_id)
    options = arguments.options
    board = SearchBoard(
        run_id,
        arguments.terms,
        plan.shape.gpus,
        options.direction,
        options.metric,
        arguments.progress,
    )
    log.info(
        "%s: search of %d trials, at most %d at a time, on executors with %d GPUs",
        run_id,
        arguments.terms.items,
        arguments.terms.max_running,
        plan.shape.gpus,
    )
    make_body = functools.partial(_SearchRun, arguments)
    handle = start_run(Handle[SearchResult], plan, arguments.application, board, make_body)
    return wait_for(handle, interrupted)


def _plan(arguments: SearchArguments, run_id: str) -> LaunchPlan:
    """Return the plan of an executor, if enough executors for `min_concurrent` trials can fit.

    Raises:
        ConfigError, CapacityError: as `planner.plan_of` raises them.
    """
    terms = arguments.terms
    least = terms.count_executors(terms.min_running) * terms.slots
    fitting = arguments.application.fit(replace(arguments.spec, workers=least))
    plan = plan_of(arguments, run_id)
    warnings = dict.fromkeys((*arguments.warnings, *fitting.warnings, *plan.warnings))
    return replace(plan, warnings=tuple(warnings))


def _check_before(arguments: SearchArguments, run: LakePath, run_id: str) -> None:
    """Check that a search can begin in its directory, or can be resumed from it.

    Raises:
        ConfigError: the search to resume does not exist, is a run of another kind, or is still
            running.
    """
    if not (run / JOURNAL).exists():
        if arguments.resume is not None:
            raise ConfigError(
                f"resume={run_id!r}: the search to resume does not exist: {run.url}; `hopsgpu runs`"
                " lists the runs, and name= starts a search that can be resumed"
            )
        if (run / RECORD).exists():
            raise ConfigError(
                f"name={run_id!r}: {run.url} is a run, but not a search; use another name"
            )
        return
    refuse_running(run, run_id, arguments.application, "search")


class _SearchRun(RunBody[SearchResult]):
    def __init__(self, arguments: SearchArguments, active: ActiveRun[SearchBoard]) -> None:
        self._arguments = arguments
        self._active = active
        self._board = active.board
        self._directory = active.directory()
        self._study: optuna.Study | None = None

    def work(self, recording: Recording) -> None:
        self._directory.make_writable()
        # Imported here because Optuna takes long to import and is needed only from here on.
        from hopsgpu.tuning.journal import Journal
        from hopsgpu.tuning.sampler_thread import (
            SamplerThread,
            check_same_space,
            count_ended,
            open_study,
            record_code,
        )
        from hopsgpu.tuning.search_loop import SearchLoop
        from hopsgpu.tuning.search_record import reports_of

        arguments, terms = self._arguments, self._arguments.terms
        journal = Journal(self._directory / JOURNAL)
        study = self._study = open_study(
            journal,
            self._board.run_id,
            arguments.options.direction,
            arguments.sampler,
            arguments.pruner,
        )
        check_same_space(study, arguments.options.space)
        self._board.add_ended_trials(r for r in reports_of(study) if r.ended is not None)
        ended, is_other = count_ended(study), record_code(study, arguments.provenance.code_digest)
        if ended and (is_other or arguments.named):
            other = ", whose code or modules were different" if is_other else ""
            self._board.warn(
                f"the search {self._board.run_id!r} resumes after {count_of(ended, 'ended trial')}"
                f"{other}; use another name= for a new search"
            )
        space = arguments.options.space
        sampler_thread = SamplerThread(study, space, lambda: loop.on_sampler_news())
        recording.put(GangState.REQUESTED.value)
        sampler_thread.start()
        try:
            with recording.watching():
                request = prepare_request(self._active, arguments.function, arguments.python_env)
                request = request.of_executors(terms.count_executors(terms.max_running))
                loop = SearchLoop(
                    arguments, self._active, sampler_thread, journal, ended, request.python_env
                )
                with (
                    loop.queuing_logs(),
                    arguments.application.allocate_elastic(request) as allocator,
                ):
                    self._board.state(GangState.WAITING)
                    loop.run(allocator)
        finally:
            self._conclude(sampler_thread, journal)

    def _conclude(self, sampler_thread: SamplerThread, journal: Journal) -> None:
        """Wait until Optuna has recorded all trials, and the journal is on the lake."""
        from hopsgpu.tuning.sampler_thread import as_user_error

        log.debug("%s: waits until Optuna has recorded all trials", self._board.run_id)
        if not sampler_thread.close(KEEP_SECONDS):
            self._board.warn(f"Optuna did not record all trials within {KEEP_SECONDS:g} s")
        elif (error := sampler_thread.failure) is not None:
            # The loop, which would have raised it, has ended.
            self._board.warn(f"Optuna did not record all trials: {as_user_error(error)}")
        try:
            journal.follow()
        except StoreError as problem:
            self._board.warn(f"the search's journal on the lake is incomplete: {problem}")

    def queue_final_work(self) -> None:
        if self._study is not None:
            self._active.background.put(f"{PAGE} of {self._board.run_id}", self._write_page)

    def _write_page(self) -> None:
        from hopsgpu.display.search_page import page

        (self._directory / PAGE).replace(page(self.result()).encode())

    def result(self) -> SearchResult:
        from hopsgpu.tuning.search_record import reports_of

        study, board = self._study, self._board
        assert study is not None, "work() opened it"
        return SearchResult(
            run_id=board.run_id,
            best=board.best,
            trials=tuple(reports_of(study)),
            study=study,
            direction=self._arguments.options.direction,
            metric=self._arguments.options.metric,
            gpu_seconds=board.gpu_seconds(),
            timeline=board.timeline,
            moments=board.moments,
            warnings=board.warnings,
            application=board.application,
            queue=board.queue,
        )

    def result_of_failure(self, error: HopsGpuError) -> SearchResult | None:
        return None if self._study is None else self.result()

    def details(self) -> RunDetails:
        from hopsgpu.tuning.search_record import search_record

        return RunDetails(
            call=self._arguments.provenance.as_record(),
            search=search_record(self._arguments, self._study, self._board.best),
        )
