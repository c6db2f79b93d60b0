"""The end of a run, the same for launches and searches: record, release, result, warnings."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from hopsgpu.core.end_reason import EndReason, reason_of_error
from hopsgpu.core.gang import GangState
from hopsgpu.core.run_record import FailureRecord
from hopsgpu.errors import Cancelled, HopsGpuError, RankFailed
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.recorder import Recording
from hopsgpu.runs.run_details import RunDetails
from hopsgpu.runs.status_board import StatusBoard

log = logging.getLogger(__name__)

R = TypeVar("R")

# The end of a run gives up writing after this time without progress.
KEEP_SECONDS = 120.0
# Reasons for which hopsgpu stops all ranks; none of them failed first.
_ENDS_OF_ALL_RANKS = (EndReason.TIMEOUT, EndReason.GPUS_IDLE)


class RunBody(ABC, Generic[R]):
    """The work of a run: a launch, a search or a score."""

    @abstractmethod
    def work(self, recording: Recording) -> None:
        """Do what the run is for; return or raise once its executors are released."""

    @abstractmethod
    def details(self) -> RunDetails:
        """Return what the record shows that the status board does not know; called at any time."""

    @abstractmethod
    def result(self) -> R:
        """Return the result so far."""

    def queue_final_work(self) -> None:
        """Queue what is written after the final record, on the lake or in MLflow."""
        return

    def end_reason(self, error: BaseException) -> EndReason:
        return reason_of_error(error)

    def result_of_failure(self, error: HopsGpuError) -> R | None:
        """Return the result so far of a run that this error ended; None if there is none."""
        return self.result()


def run_to_end(body: RunBody[R], active: ActiveRun[StatusBoard], *, should_flush: bool = True) -> R:
    """Do a run's work and end the run; on return or error, its executors are released.

    Problems with record and logs are warnings of the result, or notes of the error.

    Args:
        should_flush: whether a run that succeeds waits until record and logs are on the lake. If
            not, the owner of the background work reports problems with them.

    Raises:
        HopsGpuError: the error that ended the run, with `error.result`.
    """
    recording = Recording(active, body.details)
    board, background = active.board, active.background
    try:
        body.work(recording)
    except BaseException as error:
        ended, reason = state_of_failure(error), body.end_reason(error)
        log.info("%s: %s with %s", active.run_id, ended.value, type(error).__name__)
        text = active.application.error_text(error)
        failure = failure_record(error, text, reason)
        board.failed_rank = failure.rank
        recording.put(ended.value, text, reason, failure)
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
    if should_flush:
        background.flush(KEEP_SECONDS)
        for problem in background.problems():
            board.warn(problem)
    board.state(GangState.SUCCEEDED)
    return body.result()


def failure_record(error: BaseException, text: str, reason: EndReason) -> FailureRecord:
    """Return the error that ended a run in short.

    Args:
        text: the whole error.
    """
    first = text.partition("\n")[0]
    if isinstance(error, RankFailed):
        rank = None if reason in _ENDS_OF_ALL_RANKS else error.rank
        return FailureRecord(error.summary, rank)
    if isinstance(error, HopsGpuError) and not isinstance(error, Cancelled):
        return FailureRecord(f"{type(error).__name__}: {first}")
    return FailureRecord(first)


def state_of_failure(error: BaseException) -> GangState:
    return GangState.CANCELLED if isinstance(error, Cancelled) else GangState.FAILED
