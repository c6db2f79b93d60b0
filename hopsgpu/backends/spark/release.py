"""Release of a gang: end the tasks, kill the executors, and confirm it at the ResourceManager."""

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
from hopsgpu.backends.spark.jvm import Jvm, wait_until
from hopsgpu.core.gang import GangExecutor
from hopsgpu.errors import HopsGpuError
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

RELEASE_SECONDS = 30.0
_ENDED_SECONDS = 0.5
_LOOK_SECONDS = 0.05
# The interval in which Spark's application master talks to YARN, and its default.
_HEARTBEAT = "spark.yarn.scheduler.heartbeat.interval-ms"
_HEARTBEAT_MS = 3000
_ENDING_SECONDS = 5.0
# An executor that does not say in this time that its cancelled task has ended cannot be reached.
UNREACHABLE_SECONDS = 4.0
_PART_SECONDS = 10.0


def heartbeat_seconds(jvm: Jvm) -> float:
    """Return the seconds within which the application master forwards a request to YARN."""
    interval = jvm.setting(_HEARTBEAT) or ""
    return 2 * (int(interval) if interval.isdigit() else _HEARTBEAT_MS) / 1000


@dataclass(frozen=True)
class Release:
    """The result of a release.

    Attributes:
        confirmed: whether the ResourceManager has confirmed that everything is gone.
        problem: a warning for people, or None.
    """

    confirmed: bool
    problem: str | None = None


def report(release: Release, watcher: Watcher) -> bool:
    """Report the release of all executors to the watcher; return whether it was confirmed."""
    if release.confirmed:
        watcher.mark("released")
    if release.problem is not None:
        watcher.warn(release.problem)
    return release.confirmed


def release_executors(executors: Executors, jobs: Sequence[GangJob], *, whole: bool) -> Release:
    """End a gang's tasks, kill its executors and confirm that they are gone, within 30 s.

    If this Spark does not offer the direct kill, its idle timeout releases them.

    Args:
        executors: the gang's executors.
        jobs: all jobs of the gang, ended or not.
        whole: whether the gang was whole; if not, requests may still be on their way.
    """
    began = time.monotonic()
    try:
        release = _ReleaseWatch(executors, jobs, whole).run()
    except Exception as error:  # noqa: BLE001 - must not hide the error that ended the run
        # The context was stopped meanwhile, or its JVM has died: YARN then reclaims all executors.
        release = Release(False, _unconfirmed(f"{type(error).__name__}: {error}"))
    if release.confirmed:
        log.info(
            "executors released; the ResourceManager confirmed it after %.1f s",
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

    Spark no longer needs a task of a barrier stage that has succeeded.

    Args:
        executors: the gang's executors.
        job: the barrier job.
        leaving: the containers to release.
        staying: number of those that continue.
        cancelled: event that ends the wait for the confirmation.
    """
    containers = {container.container_id for container in leaving}
    executors.server.hang_up([container.key for container in leaving])

    def are_gone() -> bool:
        busy = executors.busy()
        if len(busy) == staying and executors.wants_at_most(staying):
            executors.kill_idle(busy)
        return containers.isdisjoint(executors.held().containers)

    try:
        confirmed = wait_until(
            lambda: cancelled.is_set() or are_gone(), job.ended, _PART_SECONDS, _LOOK_SECONDS
        )
    except (HopsGpuError, Py4JError) as error:
        # They are released with the other executors at the latest.
        why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        return Release(False, f"executors with nothing to publish could not be released ({why})")
    return Release(confirmed and not cancelled.is_set())


class _ReleaseWatch:
    def __init__(self, executors: Executors, jobs: Sequence[GangJob], whole: bool) -> None:
        self._executors = executors
        self._jvm = executors.application.jvm
        self._jobs = jobs
        self._whole = whole
        self._deadline = time.monotonic() + RELEASE_SECONDS
        self._never = threading.Event()
        self._shown = "no answer yet"
        self._no_kill: str | None = None
        self._ended = float("inf")
        self._given_up: set[str] = set()
        self._unreachable: set[str] = set()

    def run(self) -> Release:
        log.debug("ends %d Spark jobs within %g s", len(self._jobs), RELEASE_SECONDS)
        self._executors.server.end_all()
        for job in self._jobs:
            # Repeated, because a job that is not submitted yet cannot be cancelled, and a task
            # that starts late connects late.
            while not job.ended.wait(_ENDED_SECONDS) and time.monotonic() < self._deadline:
                self._jvm.cancel(job.tag)
                self._executors.server.end_all()
        log.debug("jobs ended; waits until the ResourceManager shows no executor")
        self._ended = time.monotonic()
        if not self._until(self._confirmed):
            no_kill = "" if self._no_kill is None else f"; the direct kill failed: {self._no_kill}"
            return Release(False, _unconfirmed(self._shown + no_kill))
        # Containers of other applications may be ending too, so this wait has its own limit.
        with contextlib.suppress(HopsGpuError):  # not essential: the kill is already confirmed
            ended = time.monotonic() + _ENDING_SECONDS
            manager = self._executors.application.manager
            self._until(lambda: not manager.gpus_ending() or time.monotonic() > ended)
        if self._no_kill is None:
            return Release(True)
        return Release(
            True,
            f"the executors could not be killed ({self._no_kill}); Spark's idle timeout has"
            " released them",
        )

    def _until(self, holds: Callable[[], bool]) -> bool:
        left = self._deadline - time.monotonic()
        return wait_until(holds, self._never, left, _LOOK_SECONDS)

    def _kill(self) -> None:
        try:
            if self._executors.wants_at_most(0):
                # Repeated, because an executor that was granted may register later.
                self._executors.kill_idle(())
                self._end_unreachable()
            elif time.monotonic() - self._ended > UNREACHABLE_SECONDS:
                self._give_up_unreachable()
        except Py4JError as error:
            self._no_kill = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]

    def _give_up_unreachable(self) -> None:
        """Have Spark give up executors that do not say that their task has ended.

        Its target includes executors that run a task; while it does, YARN replaces killed ones.
        """
        running = {*self._executors.busy()} - self._given_up
        if running:
            log.info("gives up executors that cannot be reached: %s", sorted(running))
            self._given_up |= running
            self._unreachable |= running
            self._jvm.give_up(running)

    def _end_unreachable(self) -> None:
        if self._unreachable:
            self._jvm.end_containers(self._unreachable)
            self._unreachable = set()

    def _gone(self) -> bool:
        if self._no_kill is None:
            self._kill()
        try:
            held = self._executors.held()
        except HopsGpuError as error:
            self._shown = str(error)
            return False
        self._shown = f"{count_of(len(held.containers), 'container')}, {held.pending} requested"
        return not held.containers and not held.pending

    def _confirmed(self) -> bool:
        if not self._gone():
            return False
        # If the gang was not whole, a request of Spark may still be on its way to YARN.
        if self._whole:
            return True
        return not self._never.wait(heartbeat_seconds(self._jvm)) and self._gone()


def _unconfirmed(shown: str) -> str:
    return (
        f"the ResourceManager did not confirm that the GPUs are back ({shown}); Spark's idle"
        " timeout releases them"
    )
