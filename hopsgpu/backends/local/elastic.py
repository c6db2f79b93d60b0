"""Executors that arrive and leave on this machine: one process each, with GPUs and an agent."""

from __future__ import annotations

from collections.abc import Mapping

from hopsgpu.backends.elastic_executors import ElasticLease
from hopsgpu.backends.grant import Job
from hopsgpu.backends.lease_request import Request
from hopsgpu.backends.local.container_process import ContainerJob
from hopsgpu.backends.local.containers import Containers
from hopsgpu.control.channel import Message
from hopsgpu.core.gang import Container, GangState


class LocalElasticLease(ElasticLease):
    """The lease on this machine; `leased_containers` provides it."""

    def __init__(self, request: Request, containers: Containers) -> None:
        super().__init__(request, containers.server)
        self._containers = containers
        self._wanted = 0

    @property
    def held(self) -> int:
        return len(self.here) + self.aside + len(self._containers.ending)

    @property
    def coming(self) -> int:
        return 0  # their processes may wait for GPUs

    @property
    def waiting_for(self) -> str:
        if self._wanted <= len(self.here):
            return ""
        return next((job.waiting_for for job in self._waiting()), "")

    def want(self, executors: int, at_once: int, *, least: int = 1) -> None:
        self._wanted = executors
        for job in self._containers.drop_ended():
            if job.problem is not None:
                self._fail(job.problem)
        while self._count() < executors:
            self._containers.start(self.request)
        for job in self._waiting()[: max(self._count() - executors, 0)]:
            job.close()

    @property
    def asked_back(self) -> int:
        return 0

    def offer(self, executors: int, giving: int) -> None:
        """Do nothing: no other gang waits for the executors of this process."""

    def _count(self) -> int:
        """Return how many executors, not held aside, are here or starting."""
        return len(self._containers.wanted) - self.aside

    def _waiting(self) -> list[ContainerJob]:
        """Return the jobs whose executors are not here yet, the latest first."""
        arrived = [self._jobs[key] for key in (*self.here, *self._aside)]
        return [job for job in reversed(self._containers.wanted) if job not in arrived]

    def _job_of(self, hello: Message) -> Job | None:
        return next((job for job in self._containers.wanted if job.name == hello["job"]), None)

    def _let_go(self, leaving: Mapping[int, Container]) -> None:
        for key in leaving:
            job = self._jobs[key]
            assert isinstance(job, ContainerJob), "this machine has no others"
            job.close()

    def _forget(self, job: Job) -> None:
        """Do nothing: the process ends with its agent, and `want` starts another."""

    def _arrived(self, container: Container) -> None:
        """Do nothing: no time limit and no request depends on an executor's arrival here."""

    def _why_lost(self, reason: str, host: str) -> str:
        return reason

    def _tokens(self) -> bytes:
        return b""

    def release(self) -> None:
        """End all executors; their GPUs are free on return."""
        self.request.watcher.state(GangState.RELEASING, ())
        self._containers.end_all(self.request.watcher)
        self.here.clear()
        self.request.watcher.mark("released")
