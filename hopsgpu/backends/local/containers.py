"""The containers of an allocator on this machine, and the control channel to which they connect."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hopsgpu.backends.gang_allocation import Releasable
from hopsgpu.backends.gang_request import Request, Watcher
from hopsgpu.backends.local.container import ContainerRequest
from hopsgpu.backends.local.container_process import ContainerJob
from hopsgpu.backends.spark.package_archive import PACKAGE, pack_package
from hopsgpu.control.channel import new_secret
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.core.own_log import level

log = logging.getLogger(__name__)

EVENT_SECONDS = 0.1
_HERE = "127.0.0.1"
# Ranks get SIGTERM, after 5 s SIGKILL; then their saved files are uploaded to the lake.
_END_SECONDS = 30.0


class Containers:
    """The containers of one gang or search; their agents are the peers of the server.

    Args:
        directory: directory in which each container gets its own.
    """

    def __init__(self, server: ControlServer, driver: DriverEndpoint, directory: Path) -> None:
        self.server = server
        self._driver = driver
        self._directory = directory
        self._jobs: list[ContainerJob] = []
        self._started = 0

    @property
    def active_jobs(self) -> list[ContainerJob]:
        """Return the containers that were not closed, in the order of their start."""
        return [job for job in self._jobs if not job.is_closed]

    @property
    def ending_jobs(self) -> list[ContainerJob]:
        """Return the containers that were closed and have not ended."""
        return [job for job in self._jobs if job.is_closed and not job.ended.is_set()]

    def start(self, request: Request) -> ContainerJob:
        self._started += 1
        name = f"{request.run_id}-{self._started}"
        directory = self._directory / name
        directory.mkdir(mode=0o700)
        container = ContainerRequest(
            driver=replace(self._driver, job=name, modules=request.imports),
            gpus=request.plan.shape.gpus,
            gpu_type=request.plan.spec.gpu_type,
            excluded_gpus=tuple(sorted(gpu for _, gpu in request.exclusions.gpus)),
            pid=os.getpid(),
        )
        package = _package_for(request, directory)
        job = ContainerJob(container, directory, request.watcher.warn, package)
        self._jobs.append(job)
        log.info("container %s: process started", name)
        return job

    def drop_ended(self) -> list[ContainerJob]:
        """Forget the ended containers; return those that were not closed."""
        ended = [job for job in self._jobs if job.ended.is_set()]
        self._jobs = [job for job in self._jobs if job not in ended]
        return [job for job in ended if not job.is_closed]

    def end_all(self, watcher: Watcher) -> None:
        """End all containers and their ranks; their GPUs are free on return."""
        began = time.monotonic()
        for job in self._jobs:
            job.close()
        for job in self._jobs:
            # Repeat the call: a container may connect late.
            self.server.disconnect_all()
            while not job.ended.wait(EVENT_SECONDS) and time.monotonic() < began + _END_SECONDS:
                self.server.disconnect_all()
        for job in self._jobs:
            if not job.ended.is_set():
                watcher.warn(
                    f"container {job.name} did not end within {_END_SECONDS:g} s and was killed"
                )
                job.kill()
                job.ended.wait()
        if self._jobs:
            seconds = time.monotonic() - began
            log.info("containers ended: %d, after %.1f s", len(self._jobs), seconds)
        self._jobs = []


def _package_for(request: Request, directory: Path) -> Path | None:
    """Return the path from which a container imports hopsgpu; None for the driver's path.

    If the ranks have their own Python, the path is a zip with hopsgpu: as on a node, that Python
    must not see other packages of the driver.
    """
    env = request.python_env
    if env is None or env.interpreter is None:
        return None
    return pack_package(directory / PACKAGE)


_Allocator = TypeVar("_Allocator", bound=Releasable)


@contextlib.contextmanager
def local_allocator(
    kind: Callable[[Request, Containers], _Allocator],
    request: Request,
    *,
    user: str | None,
    heartbeat: float,
    ports: range | None,
) -> Iterator[_Allocator]:
    """Provide an allocator on this machine; release its executors on every path.

    Args:
        user: the user for the lake; None if the lake knows the user (Kerberos).
        heartbeat: seconds without a heartbeat after which either end considers the other lost.

    Raises:
        ConfigError: no port of the range is free.
    """
    secret = new_secret()
    with (
        tempfile.TemporaryDirectory(prefix="hopsgpu-", ignore_cleanup_errors=True) as directory,
        serve(secret, _HERE, ports, heartbeat=heartbeat) as server,
    ):
        driver = DriverEndpoint(_HERE, server.port, secret, user, heartbeat=heartbeat, log=level())
        allocator = kind(request, Containers(server, driver, Path(directory)))
        try:
            yield allocator
        finally:
            allocator.release()
