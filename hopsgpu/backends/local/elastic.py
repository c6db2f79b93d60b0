"""A search's executors on this machine: one process each, with its GPUs and its agent."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from hopsgpu.backends.elastic_executors import ElasticLease
from hopsgpu.backends.grant import Job
from hopsgpu.backends.lease_request import Request
from hopsgpu.backends.local.container import ContainerRequest
from hopsgpu.backends.local.container_process import ContainerJob
from hopsgpu.backends.local.lease import local_control_server, package_for
from hopsgpu.control.channel import Message
from hopsgpu.control.peer import Driver
from hopsgpu.control.server import ControlServer
from hopsgpu.core.gang import Container, GangState

log = logging.getLogger(__name__)

_EVENT_SECONDS = 0.1
_END_SECONDS = 30.0


class LocalElasticLease(ElasticLease):
    """The lease of a search on this machine; use `local_elastic_lease`, which always ends it."""

    def __init__(
        self, request: Request, server: ControlServer, driver: Driver, directory: Path
    ) -> None:
        super().__init__(request, server)
        self._driver = driver
        self._directory = directory
        self._started = 0
        self._live: dict[str, ContainerJob] = {}
        self._leaving: list[ContainerJob] = []
        self._wanted = 0
        self._package: Path | None = None

    @property
    def held(self) -> int:
        self._leaving = [job for job in self._leaving if not job.ended.is_set()]
        return len(self.here) + self.aside + len(self._leaving)

    @property
    def waiting_for(self) -> str:
        if self._wanted <= len(self.here):
            return ""
        return next((job.waiting_for for job in self._waiting()), "")

    def want(self, executors: int, at_once: int) -> None:
        self._wanted = executors
        self._forget_ended()
        while len(self._live) - self.aside < executors:
            self._start()
        for job in self._waiting()[: max(len(self._live) - self.aside - executors, 0)]:
            self._end(job)

    def _waiting(self) -> list[ContainerJob]:
        """Return the jobs whose executors are not here yet, the latest first."""
        here = [self._jobs[key] for key in (*self.here, *self._aside)]
        return [job for job in reversed(self._live.values()) if not any(job is h for h in here)]

    def _forget_ended(self) -> None:
        for name, job in list(self._live.items()):
            if job.ended.is_set():
                del self._live[name]
                if job.problem is not None:
                    self._fail(job.problem)

    def _start(self) -> None:
        self._started += 1
        name = f"{self.request.run_id}-{self._started}"
        directory = self._directory / name
        directory.mkdir(mode=0o700)
        request = self.request
        wanted = ContainerRequest(
            replace(self._driver, job=name, modules=request.imports),
            request.plan.shape.gpus,
            request.plan.spec.gpu_type,
            (),
            os.getpid(),
        )
        log.info("%s: process started", name)
        package = package_for(request, directory)
        self._live[name] = ContainerJob(wanted, directory, request.watcher.warn, package)

    def _end(self, job: ContainerJob) -> None:
        self._live = {name: one for name, one in self._live.items() if one is not job}
        self._leaving.append(job)
        job.close()

    def _job_of(self, hello: Message) -> Job | None:
        return self._live.get(str(hello["job"]))

    def _let_go(self, leaving: Mapping[int, Container]) -> None:
        for key in leaving:
            job = self._jobs[key]
            assert isinstance(job, ContainerJob), "this machine has no others"
            self._end(job)

    def _lost(self, job: Job) -> None:
        """Do nothing: the process ends with its agent, and `want` starts another."""

    def _come(self) -> None:
        """Do nothing: no time limit and no request depends on an executor's arrival here."""

    def _why_lost(self, reason: str, host: str) -> str:
        return reason

    def _tokens(self) -> bytes:
        return b""

    def release(self) -> None:
        """End all executors; their GPUs are free on return."""
        watcher = self.request.watcher
        watcher.state(GangState.RELEASING, ())
        for job in list(self._live.values()):
            self._end(job)
        deadline = time.monotonic() + _END_SECONDS
        never = threading.Event()
        while self.held > len(self.here) and time.monotonic() < deadline:
            # Repeated, because an executor may connect only now.
            self.server.end_all()
            never.wait(_EVENT_SECONDS)
        for job in self._leaving:
            if not job.ended.is_set():
                watcher.warn(
                    f"a process of the search did not end within {_END_SECONDS:g} s and was killed"
                )
                job.kill()
                job.ended.wait()
        self.here.clear()
        watcher.mark("released")


@contextlib.contextmanager
def local_elastic_lease(
    request: Request, *, user: str | None, heartbeat: float, ports: range | None
) -> Iterator[LocalElasticLease]:
    """Provide the lease of a search, which starts executors; end all of them on every path.

    Args:
        request: the search's request.
        user, heartbeat, ports: as for `lease_here`.

    Raises:
        ConfigError: no port of the range is free.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hopsgpu-", ignore_cleanup_errors=True) as directory,
        local_control_server(user, heartbeat, ports) as (server, driver),
    ):
        lease = LocalElasticLease(request, server, driver, Path(directory))
        try:
            yield lease
        finally:
            lease.release()
