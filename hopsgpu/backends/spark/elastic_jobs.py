"""The state of executors that are Spark jobs of one task each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.backends.gang_allocation import Job
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.spark.barrier_job import GangJob
from hopsgpu.backends.spark.executor_admission import ExecutorAdmission
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.backends.spark.pending_executors import PendingExecutors
from hopsgpu.control.channel import Message
from hopsgpu.control.server import ControlServer
from hopsgpu.core.gang import GangExecutor
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason

log = logging.getLogger(__name__)


class ElasticJobAllocator(ElasticAllocator):
    """Keeps the jobs of ready and missing executors; a subclass requests and releases executors.

    Attributes:
        why: why executors have not arrived.
    """

    def __init__(self, request: Request, server: ControlServer, failing: FailingHosts) -> None:
        super().__init__(request, server)
        self._failing = failing
        self.why = NO_WAIT
        self._changed = threading.Condition()
        # The lock of the condition guards all of the following.
        self._jobs_by_tag: dict[str, GangJob] = {}
        # Includes the jobs of released executors, because the final release waits for all jobs.
        self._started_jobs: list[GangJob] = []
        # The container of each connected agent, by the tag of the agent's job.
        self._container_by_tag: dict[str, str] = {}
        self._leaving: set[str] = set()
        # Jobs of lost executors, to be cancelled.
        self._abandoned: list[GangJob] = []
        # The admission of each job, by the job's tag; and those that are open, whose executors may
        # all have ended.
        self._admission_by_tag: dict[str, ExecutorAdmission] = {}
        self._admissions: list[ExecutorAdmission] = []
        # The admission with which executors are requested now.
        self._admission: ExecutorAdmission | None = None
        # Jobs whose executors must end, because their admission was revoked, with the reason.
        self._revoked: dict[GangJob, str] = {}
        self._pending = PendingExecutors(failing, request.plan.spec.image)
        self._wanted = 0
        self._at_once = 1
        self._least = 1
        self._failed = 0
        self._is_closed = False
        # When an executor was last requested, or a request was withdrawn.
        self._requested_at = float("-inf")
        # When executors were last released.
        self._released_at = float("-inf")
        # When an agent last connected.
        self._connected_at = float("-inf")
        # Set while the caller needs fewer executors than exist or were requested.
        self._has_surplus = threading.Event()
        # Set when the last request no longer needs to stay in the queue of gangs.
        self._leave_queue = threading.Event()
        self._is_first_request = False

    @property
    def held_count(self) -> int:
        with self._changed:
            return len(self._container_by_tag) + len(self._leaving)

    @property
    def wait_reason(self) -> WaitReason:
        with self._changed:
            return self.why if self._wanted > len(self._container_by_tag) else NO_WAIT

    def set_wanted(self, executors: int, at_once: int, *, least: int = 1) -> None:
        with self._changed:
            wanted = (executors, at_once, least)
            if wanted != (self._wanted, self._at_once, self._least):
                log.debug("%d executors wanted, %d at a time, at least %d", *wanted)
                self._wanted, self._at_once, self._least = wanted
                self._notify()

    def _notify(self) -> None:
        """Wake the threads; the caller holds the lock."""
        if self._is_closed or self._wanted <= self._executor_count():
            self._leave_queue.set()
        if self._is_closed or self._wanted < self._executor_count():
            self._has_surplus.set()
        else:
            self._has_surplus.clear()
        self._changed.notify_all()

    def _executor_count(self) -> int:
        """Return how many unparked executors exist or were requested; the caller holds the lock."""
        return len(self._jobs_by_tag) - self.parked_count

    def _job_of(self, hello: Message) -> Job | None:
        with self._changed:
            job = self._jobs_by_tag.get(str(hello["job"]))
            if job is not None:
                self._container_by_tag[job.tag] = str(hello["container"])
                # A waiting task may have started on an executor that was released.
                self._leaving.discard(self._container_by_tag[job.tag])
                self._pending.record_connection(self._container_by_tag[job.tag])
                self._connected_at = time.monotonic()
                self._failed = 0
                self._changed.notify_all()
            return job

    def _record_arrival(self, container: GangExecutor) -> None:
        self._failing.record_arrival(container.host)
        if len(self.ready_executors) < self._least:
            return
        with self._changed:
            self._pending.record_arrival()
            if self._is_first_request:
                # Further executors are requested behind all gangs, in a new request.
                self._leave_queue.set()

    def _start_release(self, leaving: Mapping[int, GangExecutor]) -> None:
        with self._changed:
            self._released_at = time.monotonic()
            for key, container in leaving.items():
                self._drop(self._jobs[key])
                self._leaving.add(container.container_id)
            self._notify()

    def _abandon_job(self, job: Job) -> None:
        with self._changed:
            lost = [current for current in self._jobs_by_tag.values() if current is job]
            for current in lost:
                self._drop(current)
            if lost:
                self._abandoned += lost
                self._notify()

    def _drop(self, job: Job) -> None:
        """Forget a job; the caller holds the lock."""
        tag = next((tag for tag, current in self._jobs_by_tag.items() if current is job), None)
        if tag is not None:
            del self._jobs_by_tag[tag]
            self._container_by_tag.pop(tag, None)
            self._admission_by_tag.pop(tag, None)

    def _free_admission(self, executors: int) -> ExecutorAdmission | None:
        """Return an open admission with room for so many executors; the caller holds the lock."""
        for admission in self._admissions:
            used = sum(other is admission for other in self._admission_by_tag.values())
            if admission.executors is None or admission.executors - used >= executors:
                return admission
        return None

    def _take_unused_admissions(self) -> list[ExecutorAdmission]:
        """Remove the admissions whose executors have ended; the caller holds the lock."""
        if self._leaving:
            return []
        used = [self._admission, *self._admission_by_tag.values()]
        unused = [admission for admission in self._admissions if admission not in used]
        self._admissions = [admission for admission in self._admissions if admission in used]
        return unused

    def _revoke(self, admission: ExecutorAdmission, why: str) -> None:
        """Have the executors of an admission end, which was revoked."""
        with self._changed:
            for tag, job in self._jobs_by_tag.items():
                if self._admission_by_tag.get(tag) is admission:
                    self._revoked[job] = why
            self._notify()

    def _withdraw(self, jobs: list[GangJob]) -> list[GangJob]:
        """Drop waiting jobs before they are cancelled; return them. The caller holds the lock.

        Otherwise an executor that arrives before the cancellation would count as ready, and a rank
        that the caller starts on it would be lost.
        """
        for job in jobs:
            self._drop(job)
        return jobs

    def _surplus_jobs(self) -> list[GangJob]:
        """Return the waiting jobs that are no longer needed; the caller holds the lock."""
        return self._waiting_jobs()[: max(self._executor_count() - self._wanted, 0)]

    def _waiting_jobs(self) -> list[GangJob]:
        """Return the jobs without an executor, the latest first; the caller holds the lock."""
        return [
            job
            for tag, job in reversed(self._jobs_by_tag.items())
            if tag not in self._container_by_tag
        ]
