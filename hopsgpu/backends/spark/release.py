"""Release of a gang: end the tasks, kill the executors, and confirm it at the cluster manager."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from py4j.protocol import Py4JError

from hopsgpu.backends.gang_request import Watcher
from hopsgpu.backends.spark.barrier_job import GangJob
from hopsgpu.backends.spark.executors import Executors
from hopsgpu.backends.spark.jvm import wait_until
from hopsgpu.core.gang import GangExecutor
from hopsgpu.errors import HopsGpuError
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

RELEASE_SECONDS = 30.0
_ENDED_SECONDS = 0.5
_POLL_SECONDS = 0.05
_ENDING_SECONDS = 5.0
# An executor is unreachable if it does not report the end of its cancelled task in this time.
UNREACHABLE_SECONDS = 4.0
_PART_SECONDS = 10.0


@dataclass(frozen=True)
class Release:
    """The result of a release; `problem` is a warning for people."""

    is_confirmed: bool
    problem: str | None = None


def report(release: Release, watcher: Watcher) -> bool:
    if release.is_confirmed:
        watcher.mark("released")
    if release.problem is not None:
        watcher.warn(release.problem)
    return release.is_confirmed


def release_executors(executors: Executors, jobs: Sequence[GangJob], *, is_whole: bool) -> Release:
    """End a gang's tasks, kill its executors and confirm the release, within 30 s.

    If this Spark does not offer the direct kill, its idle timeout releases the executors.

    Args:
        jobs: all jobs of the gang, ended or not.
        is_whole: whether the gang was whole; if not, requests may still be on their way.
    """
    began = time.monotonic()
    try:
        release = _ReleaseWatch(executors, jobs, is_whole).run()
    except Exception as error:  # noqa: BLE001 - must not hide the error that ended the run
        # The context was stopped, or its JVM has died: all executors then end.
        why = f"{type(error).__name__}: {error}"
        release = Release(False, _unconfirmed_text(executors, why))
    if release.is_confirmed:
        log.info(
            "executors released; %s confirmed it after %.1f s",
            executors.application.manager.title,
            time.monotonic() - began,
        )
    else:
        log.warning("executors released, but not confirmed: %s", release.problem)
    return release


def release_part(
    executors: Executors,
    job: GangJob,
    leaving: Sequence[GangExecutor],
    staying: int,
    cancelled: threading.Event,
) -> Release:
    """End some of a gang's tasks and kill their executors, while the others continue.

    Spark allows this: a task of a barrier stage may succeed before the others.

    Args:
        staying: number of executors that continue.
    """
    containers = {container.container_id for container in leaving}
    executors.server.disconnect([container.key for container in leaving])

    def are_gone() -> bool:
        busy = executors.busy_ids()
        if len(busy) == staying and executors.is_target_at_most(staying):
            executors.kill_idle(busy)
        return containers.isdisjoint(executors.held_containers().containers)

    try:
        is_confirmed = wait_until(
            lambda: cancelled.is_set() or are_gone(), job.ended, _PART_SECONDS, _POLL_SECONDS
        )
    except (HopsGpuError, Py4JError) as error:
        # The executors are released with the others at the latest.
        why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        return Release(False, f"executors with nothing to publish could not be released ({why})")
    return Release(is_confirmed and not cancelled.is_set())


class _ReleaseWatch:
    def __init__(self, executors: Executors, jobs: Sequence[GangJob], is_whole: bool) -> None:
        self._executors = executors
        self._jvm = executors.application.jvm
        self._jobs = jobs
        self._is_whole = is_whole
        self._deadline = time.monotonic() + RELEASE_SECONDS
        self._never = threading.Event()
        self._last_answer = "no answer yet"
        self._no_kill: str | None = None
        self._ended = float("inf")
        self._given_up: set[str] = set()
        self._unreachable: set[str] = set()
        # Whether Spark wants no executor, and so replaces none that is deleted.
        self._is_target_zero = False

    def run(self) -> Release:
        log.debug("ends %d Spark jobs within %g s", len(self._jobs), RELEASE_SECONDS)
        self._executors.server.disconnect_all()
        for job in self._jobs:
            # Repeat both: a job that is not submitted yet cannot be cancelled, and a task that
            # starts late connects late.
            while not job.ended.wait(_ENDED_SECONDS) and time.monotonic() < self._deadline:
                self._jvm.cancel(job.tag)
                self._executors.server.disconnect_all()
        log.debug("jobs ended; waits until the cluster manager shows no executor")
        self._ended = time.monotonic()
        if not self._wait_until(self._is_confirmed):
            no_kill = "" if self._no_kill is None else f"; the direct kill failed: {self._no_kill}"
            return Release(False, _unconfirmed_text(self._executors, self._last_answer + no_kill))
        # Containers of other applications may be ending too, so this wait has its own limit.
        with contextlib.suppress(HopsGpuError):  # not essential: the kill is already confirmed
            ended = time.monotonic() + _ENDING_SECONDS
            manager = self._executors.application.manager
            self._wait_until(lambda: not manager.are_gpus_ending() or time.monotonic() > ended)
        if self._no_kill is None:
            return Release(True)
        return Release(
            True,
            f"the executors could not be killed ({self._no_kill}); Spark's idle timeout has"
            " released them",
        )

    def _wait_until(self, holds: Callable[[], bool]) -> bool:
        seconds = self._deadline - time.monotonic()
        return wait_until(holds, self._never, seconds, _POLL_SECONDS)

    def _kill(self) -> None:
        try:
            self._is_target_zero = self._executors.is_target_at_most(0)
            if self._is_target_zero:
                # Repeat the kill: a granted executor may register later.
                self._executors.kill_idle(())
                self._end_unreachable()
            elif time.monotonic() - self._ended > UNREACHABLE_SECONDS:
                self._give_up_unreachable()
        except Py4JError as error:
            self._no_kill = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]

    def _give_up_unreachable(self) -> None:
        """Make Spark give up executors that do not report the end of their task.

        Otherwise Spark's target includes these executors, and killed ones are replaced. On
        Kubernetes, Spark shows no task of an executor that has lost its connection. It counts the
        tasks until the API server says why the pod has ended.
        """
        ids = self._executors.busy_ids() or self._executors.registered_ids()
        running = {*ids} - self._given_up
        if running:
            log.info("gives up unreachable executors: %s", sorted(running))
            self._given_up |= running
            self._unreachable |= running
            self._jvm.give_up(running)

    def _end_unreachable(self) -> None:
        if self._unreachable:
            self._jvm.end_containers(self._unreachable)
            self._unreachable = set()

    def _are_executors_gone(self) -> bool:
        if self._no_kill is None:
            self._kill()
        try:
            held = self._executors.held_containers()
        except HopsGpuError as error:
            self._last_answer = str(error)
            return False
        self._last_answer = (
            f"{count_of(len(held.containers), 'container')}, {held.pending} requested"
        )
        if held.containers:
            self._executors.application.end_stranded(held.containers)
        if self._is_target_zero:
            self._executors.application.end_rest(self._executors.profile.id)
        return not held.containers and not held.pending

    def _is_confirmed(self) -> bool:
        if not self._are_executors_gone():
            return False
        # If the gang was not whole, a request of Spark may still be on its way: check again.
        if self._is_whole:
            return True
        settling = self._executors.application.settle_seconds
        return not self._never.wait(settling) and self._are_executors_gone()


def _unconfirmed_text(executors: Executors, shown: str) -> str:
    return (
        f"{executors.application.manager.title} did not confirm that the GPUs are back ({shown});"
        " Spark's idle timeout releases them"
    )
