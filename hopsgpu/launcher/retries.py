"""The retries of a launch: whether another attempt follows, and what it excludes."""

from __future__ import annotations

import logging
from dataclasses import replace

from hopsgpu.attempts.outcome import AttemptFailure
from hopsgpu.attempts.retry_policy import next_exclusions, should_retry
from hopsgpu.core.gang import Exclusions
from hopsgpu.display.progress import Progress
from hopsgpu.errors import CapacityError, HopsGpuError, RankFailed
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.status_board import GangBoard

log = logging.getLogger(__name__)


class Retries:
    """Decides whether a launch makes another attempt, without what caused the failures.

    Attributes:
        exclusions: the nodes and GPUs that get no rank in the next attempt.
    """

    def __init__(self, active: ActiveRun[GangBoard], progress: Progress) -> None:
        self.exclusions = Exclusions()
        self._active = active
        self._board = active.board
        self._progress = progress
        self._suspects: list[str] = []
        self._retried_count = 0

    def prepare_retry(self, failure: AttemptFailure) -> bool:
        """Return whether another attempt follows; if so, exclude the causes and report the retry.

        If the gang does not fit without what caused the failure, the failure gets a note.
        """
        attempt, retries = self._board.attempt, self._active.plan.spec.retries
        error, cause = failure.error, failure.cause
        if self._active.cancelled.is_set() or not should_retry(
            cause,
            retried=self._retried_count,
            retries=retries,
            retry_user_errors=self._active.application.should_retry_user_errors,
        ):
            log.info(
                "%s: attempt %d is not retried: cause: %s; %d of %d retries used",
                self._active.run_id,
                attempt,
                cause.value,
                self._retried_count,
                retries,
            )
            return False
        self.exclude_causes(failure)
        if not self.still_fits(error):
            return False
        self._retried_count += 1
        log.info(
            "%s: retries after attempt %d: cause: %s, rank %s on %s; excludes: %s",
            self._active.run_id,
            attempt,
            cause.value,
            error.rank,
            error.host,
            self.exclusions if self.exclusions.is_any else "nothing",
        )
        problem = f"attempt {attempt} failed ({cause.value}): {str(error).splitlines()[0]}"
        self._board.warn(problem)
        line = f"hopsgpu: {problem}; the gang starts again"
        self._progress.line(error.rank or 0, error.host or "?", line)
        return True

    def exclude_causes(self, failure: AttemptFailure) -> None:
        """Exclude what caused a failure from later attempts."""
        if failure.suspect_host is not None:
            self._suspects.append(failure.suspect_host)
        self.exclusions = next_exclusions(self.exclusions | failure.exclusions, self._suspects)

    def clear_suspects(self) -> None:
        """Forget which nodes are suspects, because an attempt made progress since."""
        self._suspects.clear()

    def still_fits(self, failure: RankFailed) -> bool:
        """Return whether the gang fits without what is excluded; if not, add a note to the failure.

        An elastic gang uses suspect nodes again rather than end the run: the bound on its losses in
        a row bounds those on such a node.
        """
        problem = self._find_misfit()
        if problem is not None and self._active.plan.spec.is_elastic and self.exclusions.hosts:
            log.info("%s: does not exclude %s: %s", self._active.run_id, self.exclusions, problem)
            self.exclusions = Exclusions(gpus=self.exclusions.gpus)
            self._suspects.clear()
            problem = self._find_misfit()
        if problem is None:
            return True
        log.info(
            "%s: not retried: the gang does not fit without %s",
            self._active.run_id,
            self.exclusions,
        )
        failure.add_note(
            f"not retried without {self.exclusions}, which caused the failure: {problem}"
        )
        return False

    def _find_misfit(self) -> CapacityError | None:
        """Return why the gang can never be granted without what is excluded, or None."""
        plan = self._active.plan
        try:
            if self.exclusions.is_any:
                least = replace(plan, executors=plan.least_executors)
                self._active.application.check_with_exclusions(least, self.exclusions)
        except CapacityError as error:
            return error
        except HopsGpuError as error:
            self._board.warn(f"cannot determine whether the gang still fits: {error}")
        return None
