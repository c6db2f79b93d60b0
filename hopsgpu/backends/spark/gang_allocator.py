"""Acquisition of a gang: all of its executors and their GPUs, or none.

docs/how-it-works.md explains the order of the steps. Only this module changes the flag of dynamic
allocation, and only to submit a barrier job.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from py4j.protocol import Py4JError

from hopsgpu.backends.agent_registration import is_hello, register_container
from hopsgpu.backends.gang_allocation import GangAllocation, GangAllocator
from hopsgpu.backends.gang_request import AcquisitionClock, Request
from hopsgpu.backends.spark.barrier_job import GangJob, agent_task, placeholder_task
from hopsgpu.backends.spark.executors import Executors
from hopsgpu.backends.spark.jvm import FLIP_SECONDS, wait_until
from hopsgpu.backends.spark.placeholder_acquisition import (
    EVENT_SECONDS,
    PlaceholderAcquisition,
    hosts_of,
)
from hopsgpu.backends.spark.queued_gang import QueuedGang, queued_gang
from hopsgpu.backends.spark.release import (
    RELEASE_SECONDS,
    Release,
    release_executors,
    release_part,
    report,
)
from hopsgpu.backends.spark.token_renewal import read_tokens
from hopsgpu.core.gang import GangExecutor, GangState, backoff_seconds
from hopsgpu.core.wait_reasons import gave_back
from hopsgpu.errors import Cancelled, HopsGpuError
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

# Executors and their Python already run: an agent only has to import modules and connect.
_AGENTS_SECONDS = 120.0
_MAX_HANDOVERS = 5
# A cancelled task ends within spark.python.task.killTimeout (0.2 s) and the time in which Spark
# passes the cancellation on.
_STUCK_SECONDS = 5.0


class SparkGangAllocator(GangAllocator):
    """Acquires executors by placeholders, which agents replace; `spark_allocator` provides it."""

    def __init__(self, request: Request, executors: Executors) -> None:
        super().__init__(request)
        self._executors = executors
        self._application = executors.application
        self._jobs: list[GangJob] = []
        self._admission = executors.admissions.open(request, self._end_revoked)
        # Number of executors that the cluster manager had granted when the last turn ended without
        # the gang.
        self._granted_in_last_turn = 0

    def acquire(self, request: Request) -> GangAllocation:
        self.request = request
        # Count the excluded executors before `end_jobs` disconnects their agents.
        excluded_count, self._allocation = self._count_excluded(), None
        self.end_jobs()
        began = time.monotonic()
        clock = AcquisitionClock(request)
        attempts = 0
        with queued_gang(self._application, request, clock, self._admission) as queued:
            while True:
                with queued.hold_turn(
                    max(len(self._executors.registered_ids()) - excluded_count, 0)
                ):
                    allocation = self._acquire_in_turn(queued, clock)
                    if allocation is not None:
                        self._allocation = allocation
                        log.info(
                            "gang granted: %s on %s after %.1f s",
                            count_of(len(allocation.containers), "executor"),
                            ", ".join(sorted({c.host for c in allocation.containers})),
                            time.monotonic() - began,
                        )
                        return allocation
                    self._release_all()
                    request.watcher.on_executors_arrived(())
                    request.watcher.on_parked(())
                attempts += 1
                self._back_off(attempts, clock)

    def _end_revoked(self, why: str) -> None:
        self._executors.end_revoked(self._executors.registered_ids(), why)

    def _release_all(self) -> Release:
        is_whole = self._allocation is not None
        return release_executors(self._executors, self._jobs, is_whole=is_whole)

    def _back_off(self, attempts: int, clock: AcquisitionClock) -> None:
        deadline = time.monotonic() + backoff_seconds(attempts, random.random())  # noqa: S311
        log.info(
            "%s: has released %d partial allocations, and asks again in %.1f s",
            self.request.run_id,
            attempts,
            deadline - time.monotonic(),
        )
        why = gave_back(self._granted_in_last_turn, self.request.plan.executors, attempts)
        while time.monotonic() < deadline:
            clock.report((), why)
            clock.check()
            self.request.cancelled.wait(EVENT_SECONDS)

    def _count_excluded(self) -> int:
        """Return how many connected executors of the last allocation are excluded now."""
        if self._allocation is None:
            return 0
        lost = self._allocation.lost_keys
        connected = (c for c in self._allocation.containers if c.key not in lost)
        return sum(self.request.exclusion_reason(c) is not None for c in connected)

    def _acquire_in_turn(
        self, queued: QueuedGang, clock: AcquisitionClock
    ) -> GangAllocation | None:
        """Request, await and hand over executors in one turn; return None without the whole gang.

        The turn ends without the gang if the cluster manager granted only a part, or another gang
        took the turn.
        """
        watcher = self.request.watcher
        for _ in range(_MAX_HANDOVERS):
            acquisition = PlaceholderAcquisition(
                self.request,
                self._executors,
                lambda tasks: self._start("placeholders", tasks, queued.hosts(tasks)),
                clock,
                queued,
            )
            with (
                self._application.jvm.without_resource_warning(),
                self._executors.placing(self.request, self._admission),
            ):
                placeholders = acquisition.run()
            if placeholders is None:
                self._granted_in_last_turn = acquisition.max_granted
                return None
            watcher.mark("granted")
            watcher.state(GangState.GRANTED, hosts_of(placeholders))
            allocation = self._hand_over(placeholders, acquisition.jobs, acquisition.parked)
            if allocation is not None:
                watcher.state(GangState.READY, [c.host for c in allocation.containers])
                return allocation
            log.info(
                "%s: was granted but did not start, and is requested again", self.request.run_id
            )
        raise HopsGpuError(
            f"the gang was granted {_MAX_HANDOVERS} times but never started, the last time because:"
            f" {self._jobs[-1].reason(0)}"
        )

    def end_jobs(self) -> None:
        """End the tasks of an incomplete gang; its executors stay until Spark's idle timeout."""
        if not self._jobs:
            return
        self._executors.server.disconnect_all()
        deadline = time.monotonic() + RELEASE_SECONDS
        for job in self._jobs:
            while not job.ended.wait(EVENT_SECONDS) and time.monotonic() < deadline:
                self._application.jvm.cancel(job.tag)
                self._executors.server.disconnect_all()
        self._jobs = [job for job in self._jobs if not job.ended.is_set()]
        self._kill_stuck()

    def _kill_stuck(self) -> None:
        """Kill executors whose tasks do not end, because they are frozen or disconnected.

        Otherwise Spark would rely on these executors, and request no others, until their heartbeat
        times out.
        """
        cancelled = self.request.cancelled
        if wait_until(lambda: not self._executors.busy_ids(), cancelled, _STUCK_SECONDS):
            return
        if not cancelled.is_set():
            log.info("%s: kills unresponsive executors", self.request.run_id)
            try:
                self._executors.kill(self._executors.busy_ids())
            except Py4JError as error:
                self.request.watcher.warn(f"an unresponsive executor could not be killed: {error}")

    def _start(self, role: str, tasks: int, hosts: tuple[str, ...] = ()) -> GangJob:
        is_barrier = role == "agents"
        warm = self.request.warm_up
        job = self._executors.new_job(
            self.request,
            role,
            tasks,
            hosts,
            lambda driver: (agent_task if is_barrier else placeholder_task)(driver, warm),
            is_barrier=is_barrier,
        )
        self._jobs.append(job)
        log.debug(
            "Spark job %s started: %d tasks, preferably on %s", job.tag, tasks, hosts or "any"
        )
        job.start()
        return job

    def _hand_over(
        self,
        placeholders: Mapping[int, GangExecutor],
        placeholder_jobs: Sequence[GangJob],
        parked: Mapping[int, GangExecutor],
    ) -> GangAllocation | None:
        """Replace the placeholders by agents; return None if an agent does not arrive.

        The parked placeholders keep their executors until the agents have arrived.
        """
        self._executors.server.disconnect(placeholders)
        cancelled = self.request.cancelled
        jvm = self._application.jvm
        if not parked and sum(job.tasks for job in placeholder_jobs) > len(placeholders):
            # A waiting placeholder task would take the executor of an agent.
            for job in placeholder_jobs:
                jvm.cancel(job.tag)

        def are_free() -> bool:
            if not parked:
                return all(job.ended.is_set() for job in placeholder_jobs)
            return sum(jvm.active_tasks(job.tag) for job in placeholder_jobs) <= len(parked)

        log.debug(
            "%s: waits up to %g s for the placeholders to end", self.request.run_id, _AGENTS_SECONDS
        )
        if not wait_until(are_free, cancelled, _AGENTS_SECONDS):
            log.info("%s: the placeholders did not end", self.request.run_id)
            for job in placeholder_jobs:
                jvm.cancel(job.tag)
            return None
        with self._submit_agents() as job:
            agents = self._wait_for_agents(job, placeholders)
            count = "none" if agents is None else len(agents)
            log.debug("%s: agents: %s", self.request.run_id, count)
            if agents is None or any(map(self.request.exclusion_reason, agents.values())):
                # End the parked placeholders too: the next attempt parks these executors again.
                self._executors.server.disconnect_all()
                for ending in (job, *placeholder_jobs):
                    jvm.cancel(ending.tag)
                    wait_until(ending.ended.is_set, cancelled, RELEASE_SECONDS)
                return None
        self._release_parked(parked, placeholder_jobs)
        return GangAllocation(
            self._executors.server,
            tuple(agents.values()),
            job,
            explain_loss=self._application.explain_loss,
            release_part=functools.partial(self._release_part, job),
            read_tokens=functools.partial(read_tokens, jvm),
        )

    @contextlib.contextmanager
    def _submit_agents(self) -> Iterator[GangJob]:
        """Submit the barrier job; yield it once Spark's scheduler has accepted or refused it.

        A scheduler that does not answer in time will refuse the job later, because the flag that
        allows barrier stages is reset. Spark's warning of this refusal is suppressed.
        """
        jvm, cancelled = self._application.jvm, self.request.cancelled
        with jvm.barriers_allowed():
            job = self._start("agents", self.request.plan.executors)

            def is_accepted() -> bool:
                if cancelled.is_set():
                    # Repeat the call: Spark ignores the cancellation of a job that is not
                    # submitted yet.
                    jvm.cancel(job.tag)
                return jvm.is_stage_active(job.tag)

            is_settled = wait_until(is_accepted, job.ended, FLIP_SECONDS) or job.ended.is_set()
        if is_settled:
            yield job
            return
        log.warning(
            "%s: Spark's scheduler has not answered for %g s, so the gang's barrier job will be"
            " submitted again",
            self.request.run_id,
            FLIP_SECONDS,
        )
        with jvm.without_stage_refusal():
            yield job

    def _release_part(self, job: GangJob, keys: Collection[int]) -> bool:
        allocation = self._allocation
        assert allocation is not None, "only a whole gang releases executors"
        log.info("%s released early: they have nothing to publish", count_of(len(keys), "executor"))
        leaving = [container for container in allocation.containers if container.key in keys]
        release = release_part(
            self._executors,
            job,
            leaving,
            len(allocation.containers) - len(leaving),
            self.request.cancelled,
        )
        if release.problem is not None:
            self.request.watcher.warn(release.problem)
        return release.is_confirmed

    def _release_parked(
        self, parked: Mapping[int, GangExecutor], placeholder_jobs: Sequence[GangJob]
    ) -> None:
        if not parked:
            return
        self._executors.server.disconnect(parked)
        cancelled = self.request.cancelled
        if wait_until(
            lambda: all(j.ended.is_set() for j in placeholder_jobs), cancelled, RELEASE_SECONDS
        ):
            self._executors.kill_idle(self._executors.busy_ids())
        self.request.watcher.on_parked(())

    def _wait_for_agents(
        self, job: GangJob, placeholders: Collection[int]
    ) -> dict[int, GangExecutor] | None:
        """Wait for the agents of a job; return None if the job ends, or an agent does not arrive.

        Args:
            placeholders: keys of the placeholders, whose last events may still arrive.
        """
        agents: dict[int, GangExecutor] = {}
        deadline = time.monotonic() + _AGENTS_SECONDS
        while len(agents) < self.request.plan.executors:
            if self.request.cancelled.is_set():
                raise Cancelled(f"{self.request.run_id} was cancelled before its ranks started")
            if job.ended.is_set() or time.monotonic() > deadline:
                return None
            event = self._executors.server.next_event(EVENT_SECONDS)
            if event is None or event.peer in placeholders:
                continue
            if event.message is None:
                agents.pop(event.peer, None)
            elif is_hello(event.message, job.tag):
                agents[event.peer] = register_container(event, event.message, self.request)
        return agents

    def release(self) -> bool:
        self.request.watcher.state(GangState.RELEASING, ())
        return report(self._release_all(), self.request.watcher)
