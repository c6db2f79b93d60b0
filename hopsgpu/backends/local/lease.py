"""The lease of a gang on this machine: one container, a process with its GPUs and its agent."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from hopsgpu.backends.agent_registration import is_hello, register_container
from hopsgpu.backends.grant import Lease, Owner
from hopsgpu.backends.lease_request import AcquisitionClock, Request
from hopsgpu.backends.local.container import ContainerRequest
from hopsgpu.backends.local.container_process import ContainerJob
from hopsgpu.backends.spark.package_archive import PACKAGE, pack_package
from hopsgpu.control.channel import new_secret
from hopsgpu.control.peer import Driver
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.core.gang import Container, GangState
from hopsgpu.core.own_log import level
from hopsgpu.errors import HopsGpuError

log = logging.getLogger(__name__)

_HERE = "127.0.0.1"
_EVENT_SECONDS = 0.1
# Ranks get SIGTERM, after 5 s SIGKILL; then what they have saved is uploaded to the lake.
_END_SECONDS = 30.0


class LocalLease(Owner):
    """The owner of a gang's container on this machine; use `local_lease`, which always ends it."""

    def __init__(
        self, request: Request, server: ControlServer, driver: Driver, directory: Path
    ) -> None:
        super().__init__(request)
        self._server = server
        self._driver = driver
        self._directory = directory
        self._job: ContainerJob | None = None
        self._started = 0

    def acquire(self, request: Request) -> Lease:
        self.request = request
        self.end_jobs()
        self._lease = None
        patience = AcquisitionClock(request)
        began = time.monotonic()
        job = self._start()
        container = self._greeted(job, patience)
        log.info(
            "gang granted: %s on this machine after %.1f s",
            container.container_id,
            time.monotonic() - began,
        )
        watcher, hosts = request.watcher, [container.host]
        watcher.arrived([time.time()])
        watcher.mark("granted")
        watcher.state(GangState.GRANTED, hosts)
        watcher.state(GangState.READY, hosts)
        self._lease = Lease(
            self._server,
            (container,),
            job,
            why_lost=lambda reason, host: reason,
            let_go=_keep,
            tokens=bytes,
        )
        return self._lease

    def _start(self) -> ContainerJob:
        self._started += 1
        request = self.request
        name = f"{request.run_id}-{self._started}"
        directory = self._directory / name
        directory.mkdir(mode=0o700)
        wanted = ContainerRequest(
            replace(self._driver, job=name, modules=request.imports),
            request.plan.shape.gpus,
            request.plan.spec.gpu_type,
            tuple(sorted(gpu for _, gpu in request.avoid.gpus)),
            os.getpid(),
        )
        package = package_for(request, directory)
        self._job = ContainerJob(wanted, directory, request.watcher.warn, package)
        return self._job

    def _greeted(self, job: ContainerJob, patience: AcquisitionClock) -> Container:
        """Wait until the container introduces itself, and return it.

        Raises:
            GangTimeout, Cancelled: as for `AcquisitionClock.check`.
            ConfigError, CapacityError, DiscoveryError, HopsGpuError: the container cannot serve.
        """
        name = f"{self.request.run_id}-{self._started}"
        patience.tell((), job.waiting_for)
        while True:
            patience.check()
            event = self._server.next_event(_EVENT_SECONDS)
            if event is not None and event.message is not None and is_hello(event.message, name):
                return register_container(event, event.message, self.request)
            if job.ended.is_set():
                raise job.problem or HopsGpuError(f"the gang did not start: {job.reason(0.0)}")
            patience.tell((), job.waiting_for)

    def end_jobs(self) -> None:
        """End the container and its ranks, whatever its state."""
        job, self._job = self._job, None
        if job is None:
            return
        job.close()
        deadline = time.monotonic() + _END_SECONDS
        # Repeated, because the container may connect only now.
        self._server.end_all()
        while not job.ended.wait(_EVENT_SECONDS) and time.monotonic() < deadline:
            self._server.end_all()
        if not job.ended.is_set():
            self.request.watcher.warn(
                f"the gang's process did not end within {_END_SECONDS:g} s and was killed"
            )
            job.kill()
            job.ended.wait()

    def release(self) -> None:
        """End the container and its ranks; the GPUs are free on return."""
        self.request.watcher.state(GangState.RELEASING, ())
        began = time.monotonic()
        self.end_jobs()
        log.info("the gang's process has ended after %.1f s", time.monotonic() - began)
        self._lease = None
        self.request.watcher.mark("released")


def _keep(keys: Collection[int]) -> bool:
    """Implement `Lease.let_go` without a release: the only container stays."""
    return False


@contextlib.contextmanager
def local_lease(
    request: Request, *, user: str | None, heartbeat: float, ports: range | None
) -> Iterator[LocalLease]:
    """Provide the owner of a gang's container, and end the container on every path.

    Args:
        request: the launch's request.
        user: name of the user for the lake; None if the lake knows it (Kerberos).
        heartbeat: seconds without a sign of life after which either end considers the other lost.
        ports: ports for the control channel; None for any.

    Raises:
        ConfigError: no port of the range is free.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hopsgpu-", ignore_cleanup_errors=True) as directory,
        local_control_server(user, heartbeat, ports) as (server, driver),
    ):
        owner = LocalLease(request, server, driver, Path(directory))
        try:
            yield owner
        finally:
            owner.release()


@contextlib.contextmanager
def local_control_server(
    user: str | None, heartbeat: float, ports: range | None
) -> Iterator[tuple[ControlServer, Driver]]:
    """Serve a control channel on this machine; also yield what its containers need to connect.

    Args:
        user, heartbeat, ports: as for `local_lease`.

    Raises:
        ConfigError: no port of the range is free.
    """
    secret = new_secret()
    with serve(secret, _HERE, ports, heartbeat=heartbeat) as server:
        yield server, Driver(_HERE, server.port, secret, user, heartbeat=heartbeat, log=level())


def package_for(request: Request, directory: Path) -> Path | None:
    """Return the path from which a container imports hopsgpu; None for the driver's path.

    If the ranks have a Python of their own, the path is that of a zip with hopsgpu: as on a node,
    that Python must not see the driver's other packages.
    """
    env = request.python_env
    if env is None or env.interpreter is None:
        return None
    return pack_package(directory / PACKAGE)
