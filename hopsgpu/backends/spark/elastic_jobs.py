"""Executors as Spark jobs of one task each: the existing and the missing ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.backends.gang_allocation import Job
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.spark.barrier_job import GangJob
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.backends.spark.wait_reasons import PendingExecutors
from hopsgpu.control.channel import Message
from hopsgpu.control.server import ControlServer
from hopsgpu.core.gang import GangExecutor

log = logging.getLogger(__name__)


class ElasticJobAllocator(ElasticAllocator):
    """The state of these jobs, for all threads; a subclass requests and releases executors.

    Attributes:
        why: why executors are waited for.
    """

    def __init__(self, request: Request, server: ControlServer, failing: FailingHosts) -> None:
        super().__init__(request, server)
        self._failing = failing
        self.why = ""
        self._changed = threading.Condition()
        # Its lock guards all of the following.
        self._live: dict[str, GangJob] = {}
        # Includes the jobs of released executors: at the end all jobs must have ended.
        self._begun: list[GangJob] = []
        # The container of each connected agent, by the tag of the agent's job.
        self._ready: dict[str, str] = {}
        self._leaving: set[str] = set()
        # Jobs of lost executors, which are to be cancelled.
        self._forgotten: list[GangJob] = []
        self._pending = PendingExecutors(failing)
        self._wanted = 0
        self._at_once = 1
        self._least = 1
        self._failed = 0
        self._closed = False
        # When an executor was last requested or given up.
        self._asked = float("-inf")
        # When executors were last given back.
        self._released_at = float("-inf")
        # When an agent connected last.
        self._connected_at = float("-inf")
        # Set while the owner needs fewer executors than are here or requested.
        self._enough = threading.Event()
        # Set when the last request need not stay in the queue of gangs any longer.
        self._leave = threading.Event()
        self._asks_first = False

    @property
    def held_count(self) -> int:
        with self._changed:
            return len(self._ready) + len(self._leaving)

    @property
    def wait_reason(self) -> str:
        with self._changed:
            return self.why if self._wanted > len(self._ready) else ""

    def set_wanted(self, executors: int, at_once: int, *, least: int = 1) -> None:
        with self._changed:
            wish = (executors, at_once, least)
            if wish != (self._wanted, self._at_once, self._least):
                log.debug("%d executors wanted, %d at a time, at least %d", *wish)
                self._wanted, self._at_once, self._least = wish
                self._note()

    def _note(self) -> None:
        """Make the threads check again; call it under the lock."""
        if self._closed or self._wanted <= self._count():
            self._leave.set()
        if self._closed or self._wanted < self._count():
            self._enough.set()
        else:
            self._enough.clear()
        self._changed.notify_all()

    def _count(self) -> int:
        """Return how many executors, not held aside, are here or requested; under the lock."""
        return len(self._live) - self.parked_count

    def _job_of(self, hello: Message) -> Job | None:
        with self._changed:
            job = self._live.get(str(hello["job"]))
            if job is not None:
                self._ready[job.tag] = str(hello["container"])
                # The executor was released, but a task that waited has started on it.
                self._leaving.discard(self._ready[job.tag])
                self._pending.connected(self._ready[job.tag])
                self._connected_at = time.monotonic()
                self._failed = 0
                self._changed.notify_all()
            return job

    def _record_arrival(self, container: GangExecutor) -> None:
        self._failing.arrived(container.host)
        if len(self.ready_executors) < self._least:
            return
        with self._changed:
            self._pending.arrived()
            if self._asks_first:
                # Further executors are requested behind all gangs.
                self._leave.set()

    def _start_release(self, leaving: Mapping[int, GangExecutor]) -> None:
        with self._changed:
            self._released_at = time.monotonic()
            for key, container in leaving.items():
                self._drop(self._jobs[key])
                self._leaving.add(container.container_id)
            self._note()

    def _abandon_job(self, job: Job) -> None:
        with self._changed:
            lost = [one for one in self._live.values() if one is job]
            for one in lost:
                self._drop(one)
            if lost:
                self._forgotten += lost
                self._note()

    def _drop(self, job: Job) -> None:
        """Forget a job; call it under the lock."""
        tag = next((tag for tag, one in self._live.items() if one is job), None)
        if tag is not None:
            del self._live[tag]
            self._ready.pop(tag, None)

    def _withdrawn(self, jobs: list[GangJob]) -> list[GangJob]:
        """Drop jobs that are to be cancelled, and return them; under the lock.

        Dropped where they are found to wait, because an executor may arrive until its job is
        cancelled, and would be lost with what its owner has started on it.
        """
        for job in jobs:
            self._drop(job)
        return jobs

    def _surplus(self) -> list[GangJob]:
        """Return the jobs that wait for executors that are no longer needed; under the lock."""
        return self._waiting()[: max(self._count() - self._wanted, 0)]

    def _waiting(self) -> list[GangJob]:
        """Return the jobs whose task has no executor yet, the latest first; under the lock."""
        return [job for tag, job in reversed(self._live.items()) if tag not in self._ready]
