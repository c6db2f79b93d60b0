"""The end of a run, the same for launches and searches: record, release, result, warnings."""

from __future__ import annotations

import logging
from typing import Any, Protocol, TypeVar

from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import GangState
from hopsgpu.errors import Cancelled, HopsGpuError
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.recorder import Recording
from hopsgpu.runs.run_details import RunDetails
from hopsgpu.runs.status_board import StatusBoard

log = logging.getLogger(__name__)

R = TypeVar("R", covariant=True)

# How long the lake may take nothing until the end of a run waits no longer.
KEEP_SECONDS = 120.0


class RunBody(Protocol[R]):
    """The work of a run: a launch, a search or a score."""

    def work(self, recording: Recording) -> None:
        """Do what the run is for; return or raise once its executors are released."""

    def details(self) -> RunDetails:
        """Return what the record shows that the status board does not know; at any time."""

    def queue_final_work(self) -> None:
        """Queue what follows the final record: what the lake or MLflow gets of a run that ended."""

    def result(self) -> R:
        """Return the result of a run that has succeeded."""

    def end_reason(self, error: BaseException) -> EndReason:
        """Return why this error ended the run."""

    def result_of_failure(self, error: HopsGpuError) -> Any:
        """Return the result so far of a run that this error ended; None if there is none."""


def run_to_end(
    body: RunBody[R], active: ActiveRun[StatusBoard], *, waits_for_lake: bool = True
) -> R:
    """Do a run's work, and end the run, whether the work succeeds or fails.

    When this returns or raises, the executors are released, and record and logs are on the lake.
    Problems with record and logs are warnings of the result, or notes of the error.
    `StatusBoard.executors_fate` says what is known of the release.

    Args:
        waits_for_lake: whether a run that succeeds waits for the lake. If not, its record and logs
            follow soon, and the owner of the background work reports problems with them.

    Raises:
        HopsGpuError: the error that ended the run, with `error.result`.
    """
    recording = Recording(active, body.details)
    board, background = active.board, active.background
    try:
        body.work(recording)
    except BaseException as error:
        ended = state_of_failure(error)
        log.info("%s: %s with %s", active.run_id, ended.value, type(error).__name__)
        recording.put(ended.value, active.application.error_text(error), body.end_reason(error))
        body.queue_final_work()
        background.flush(KEEP_SECONDS)
        for problem in background.problems():
            error.add_note(problem)
        if isinstance(error, HopsGpuError):
            error.result = body.result_of_failure(error)
        board.state(ended)
        raise
    log.info("%s: succeeded", active.run_id)
    recording.put(GangState.SUCCEEDED.value, reason=EndReason.SUCCEEDED)
    body.queue_final_work()
    if waits_for_lake:
        background.flush(KEEP_SECONDS)
        for problem in background.problems():
            board.warn(problem)
    board.state(GangState.SUCCEEDED)
    return body.result()


def state_of_failure(error: BaseException) -> GangState:
    """Return the state in which this error ends a run."""
    return GangState.CANCELLED if isinstance(error, Cancelled) else GangState.FAILED
