"""Executors that arrive and leave on this machine: one process each, with GPUs and an agent."""

from __future__ import annotations

from collections.abc import Mapping

from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.backends.gang_allocation import Job
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.local.container_process import ContainerJob
from hopsgpu.backends.local.containers import Containers
from hopsgpu.control.channel import Message
from hopsgpu.core.gang import GangExecutor, GangState
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason


class LocalElasticAllocator(ElasticAllocator):
    def __init__(self, request: Request, containers: Containers) -> None:
        super().__init__(request, containers.server)
        self._containers = containers
        self._wanted = 0

    @property
    def held_count(self) -> int:
        return len(self.ready_executors) + self.parked_count + len(self._containers.ending_jobs)

    @property
    def starting_count(self) -> int:
        return 0  # the processes may wait for GPUs

    @property
    def wait_reason(self) -> WaitReason:
        if self._wanted <= len(self.ready_executors):
            return NO_WAIT
        return next((job.wait_reason for job in self._waiting()), NO_WAIT)

    def set_wanted(self, executors: int, at_once: int, *, least: int = 1) -> None:
        self._wanted = executors
        for job in self._containers.drop_ended():
            if job.problem is not None:
                self._record_problem(job.problem)
        while self._count() < executors:
            self._containers.start(self.request)
        for job in self._waiting()[: max(self._count() - executors, 0)]:
            job.close()

    @property
    def reclaimed_count(self) -> int:
        return 0

    def offer(self, executors: int, giving: int) -> None:
        """Do nothing: no other gang waits for the executors of this process."""

    def _count(self) -> int:
        """Return how many unparked executors are ready or starting."""
        return len(self._containers.active_jobs) - self.parked_count

    def _waiting(self) -> list[ContainerJob]:
        """Return the jobs whose executors are not ready, the latest first."""
        ready = [self._jobs[key] for key in (*self.ready_executors, *self._parked)]
        return [job for job in reversed(self._containers.active_jobs) if job not in ready]

    def _job_of(self, hello: Message) -> Job | None:
        return next((job for job in self._containers.active_jobs if job.name == hello["job"]), None)

    def _start_release(self, leaving: Mapping[int, GangExecutor]) -> None:
        for key in leaving:
            job = self._jobs[key]
            assert isinstance(job, ContainerJob), "this machine has no others"
            job.close()

    def _abandon_job(self, job: Job) -> None:
        """Do nothing: the process ends with its agent, and `set_wanted` starts another."""

    def _record_arrival(self, container: GangExecutor) -> None:
        """Do nothing: no time limit and no request depends on an executor's arrival here."""

    def _explain_loss(self, reason: str, container: GangExecutor) -> str:
        return reason

    def _read_tokens(self) -> bytes:
        return b""

    def release(self) -> bool:
        """End all executors; return True, because their GPUs are then free."""
        self.request.watcher.state(GangState.RELEASING, ())
        self._containers.end_all(self.request.watcher)
        self.ready_executors.clear()
        self.request.watcher.mark("released")
        return True
