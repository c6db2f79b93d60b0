"""`search`: runs trials from the first granted GPU on, and more at a time as GPUs arrive."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hopsgpu.artifacts.runs import RECORD, parse
from hopsgpu.backends.lease_request import Request
from hopsgpu.backends.spark.jvm_threads import start_daemon
from hopsgpu.core.gang import GangState
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.launcher.background import Background
from hopsgpu.launcher.controller import state_of_failure
from hopsgpu.launcher.gang_result import GangResult
from hopsgpu.launcher.interrupts import takes, wait_for
from hopsgpu.launcher.planner import new_run_id, plan_of
from hopsgpu.launcher.preflight import asked_of_executors, python_of
from hopsgpu.launcher.recorder import Recording
from hopsgpu.launcher.run import Handle
from hopsgpu.launcher.run_record import environment
from hopsgpu.storage.lake import Lake
from hopsgpu.tuning.search_options import SearchArguments, SearchOptions, search_arguments
from hopsgpu.tuning.search_results import SearchResult
from hopsgpu.tuning.status_board import SearchBoard
from hopsgpu.units import counted

if TYPE_CHECKING:
    import optuna

    from hopsgpu.tuning.journal import Journal
    from hopsgpu.tuning.sampler_thread import SamplerThread
    from hopsgpu.tuning.search_loop import Searching

log = logging.getLogger(__name__)

JOURNAL = "journal.log"
PAGE = "search.html"
_KEEP_SECONDS = 120.0


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
    return run_search(search_arguments(options), interrupted)


def run_search(given: SearchArguments, interrupted: threading.Event) -> SearchResult:
    """Run a search, as `search` does, with checked arguments."""
    run_id = given.resume or given.named or new_run_id(given.spec.name)
    plan = _plan(given, run_id)
    _check_before(given, Lake(plan.paths["run"]), run_id)
    options = given.options
    board = SearchBoard(
        run_id, given.terms, plan.shape.gpus, options.direction, options.metric, given.progress
    )
    log.info(
        "search asked for: %s of %d trials, %d at a time at most, on executors of %d GPUs",
        run_id,
        given.terms.trials,
        given.terms.most,
        plan.shape.gpus,
    )
    cancelled = threading.Event()
    work = _Search(given, plan, board, cancelled).run
    start = functools.partial(start_daemon, f"hopsgpu-{run_id}")
    return wait_for(Handle(board, cancelled, work, start), interrupted)


def _plan(given: SearchArguments, run_id: str) -> LaunchPlan:
    """Return the plan of an executor, if enough executors for `min_concurrent` trials can fit.

    Raises:
        ConfigError, CapacityError: as `planner.plan_of` raises them.
    """
    terms = given.terms
    least = terms.executors(terms.least) * terms.slots
    fitting = given.application.fit(replace(given.spec, workers=least))
    plan = plan_of(given, run_id)
    warnings = dict.fromkeys((*given.warnings, *fitting.warnings, *plan.warnings))
    return replace(plan, warnings=tuple(warnings))


def _check_before(given: SearchArguments, run: Lake, run_id: str) -> None:
    """Check that a search can begin in its directory, or can be resumed from it.

    Raises:
        ConfigError: the search to resume does not exist, is a run of another kind, or is still
            running.
    """
    if not (run / JOURNAL).exists():
        if given.resume is not None:
            raise ConfigError(
                f"resume={run_id!r}: there is no search in {run.url}; `hopsgpu runs` lists what"
                " there is, and name= begins one that can be resumed"
            )
        if (run / RECORD).exists():
            raise ConfigError(f"name={run_id!r}: {run.url} is a run that is no search")
        return
    try:
        record = parse((run / RECORD).read(), (run / RECORD).url)
    except StoreError:  # the driver died before it wrote a record
        return
    own = given.application.id
    other = str(record.content.get("application") or "")
    if not record.goes_on(time.time()) or other == own:
        return
    try:
        goes_on = given.application.goes_on(other)
    except HopsGpuError:  # YARN no longer knows the application
        goes_on = False
    if goes_on:
        raise ConfigError(
            f"the search {run_id!r} goes on in {other}: wait for its end, or end it with"
            f" `hopsgpu runs cancel {run_id}`"
        )


class _Search:
    """One run of a search: its study, record and executors."""

    def __init__(
        self,
        given: SearchArguments,
        plan: LaunchPlan,
        board: SearchBoard,
        cancelled: threading.Event,
    ) -> None:
        self._given = given
        self._plan = plan
        self._board = board
        self._cancelled = cancelled
        self._directory = Lake(plan.paths["run"])
        self._background = Background(f"hopsgpu-{board.run_id}-record")
        self._study: optuna.Study | None = None

    def run(self) -> SearchResult:
        """Run the search; return or raise only after its executors are gone.

        Raises:
            HopsGpuError: an error ended the search; `error.result` has the results so far.
        """
        for text in self._plan.warnings:
            self._board.warn(text)
        recording = self._recording()
        try:
            self._directory.make()
            self._searched(recording)
        except BaseException as error:
            ended = state_of_failure(error)
            self._end(recording, ended, self._given.application.words_of(error))
            for problem in self._background.problems():
                error.add_note(problem)
            if isinstance(error, HopsGpuError) and self._study is not None:
                error.result = self._result()
            self._board.state(ended)
            raise
        self._end(recording, GangState.SUCCEEDED, None)
        for problem in self._background.problems():
            self._board.warn(problem)
        self._board.state(GangState.SUCCEEDED)
        return self._result()

    def _searched(self, recording: Recording) -> None:
        # Imported here because Optuna takes long to import and is needed only from here on.
        from hopsgpu.tuning.journal import Journal
        from hopsgpu.tuning.sampler_thread import SamplerThread, count_ended, note_code, open_study
        from hopsgpu.tuning.search_loop import Searching
        from hopsgpu.tuning.search_record import reports_of

        given = self._given
        journal = Journal(self._directory / JOURNAL)
        study = self._study = open_study(
            journal, self._board.run_id, given.options.direction, given.sampler, given.pruner
        )
        self._board.before(r for r in reports_of(study) if r.ended is not None)
        ended, is_other = count_ended(study), note_code(study, given.code)
        if ended and (is_other or given.named):
            search_record = (
                f"the search {self._board.run_id!r} goes on with {counted(ended, 'trial')}"
            )
            other = ", of other code or with other modules" if is_other else ""
            self._board.warn(
                f"{search_record} that had ended{other}; another name= begins a new search"
            )
        asker = SamplerThread(study, given.options.space, lambda: searching.wake())
        searching = Searching(
            given,
            self._plan,
            self._board,
            self._cancelled,
            self._background,
            asker,
            journal,
            ended,
        )
        recording.put(GangState.REQUESTED.value)
        asker.start()
        try:
            with recording.watching():
                self._on_executors(searching)
        finally:
            self._conclude(asker, journal)

    def _on_executors(self, searching: Searching) -> None:
        given, board = self._given, self._board
        root = self._plan.paths["root"]
        python_env = python_of(given.python_env, root, board, self._cancelled)
        imports = asked_of_executors(given.function.needs, python_env, given.application)
        board.state(GangState.WAITING)
        request = Request(
            board.run_id,
            self._plan,
            self._cancelled,
            board,
            frameworks=given.function.foreseen.imports,
            python_env=python_env,
            imports=imports,
        )
        most = given.terms.executors(given.terms.most)
        with given.application.elastic(request.of_executors(most)) as lease:
            searching.run(lease, python_env)

    def _conclude(self, asker: SamplerThread, journal: Journal) -> None:
        """Wait until Optuna has recorded all trials, and the journal is on the lake."""
        if not asker.close(_KEEP_SECONDS):
            self._board.warn(f"Optuna did not take in all trials within {_KEEP_SECONDS:g} s")
        try:
            journal.follow()
        except StoreError as error:
            self._board.warn(f"the search's journal did not come to the lake whole: {error}")

    def _end(self, recording: Recording, state: GangState, error: str | None) -> None:
        recording.put(state.value, error)
        if self._study is not None:
            self._background.put(f"{PAGE} of {self._board.run_id}", self._write_page)
        self._background.flush(_KEEP_SECONDS)

    def _write_page(self) -> None:
        from hopsgpu.display.search_page import page

        (self._directory / PAGE).replace(page(self._result()).encode())

    def _result(self) -> SearchResult:
        from hopsgpu.tuning.search_record import reports_of

        study, board = self._study, self._board
        assert study is not None, "it was opened"
        return SearchResult(
            run_id=board.run_id,
            best=board.best,
            trials=tuple(reports_of(study)),
            study=study,
            direction=self._given.options.direction,
            metric=self._given.options.metric,
            gpu_seconds=board.gpu_seconds(),
            timeline=board.timeline,
            moments=board.moments,
            warnings=board.warnings,
        )

    def _recording(self) -> Recording:
        application, board = self._given.application, self._board
        return Recording(
            self._plan,
            board,
            self._directory,
            application=application.id,
            user=application.user,
            environment=functools.partial(environment, application),
            result=self._as_run,
            background=self._background,
            cancelled=self._cancelled,
            search=self._told,
        )

    def _as_run(self) -> GangResult:
        """Return the part of the search's result that the record of any run has."""
        board = self._board
        return GangResult(
            run_id=board.run_id,
            warnings=board.warnings,
            timeline=board.timeline,
            gpu_seconds=board.gpu_seconds(),
        )

    def _told(self) -> Mapping[str, Any]:
        from hopsgpu.tuning.search_record import search_record

        return search_record(self._given, self._study, self._board.best)
