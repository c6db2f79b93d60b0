"""The lease: executors and their GPUs, held by one gang, all of them or none.

The order of each step, and why, is in docs/how-it-works.md. This is the only place that
turns dynamic allocation's flag, and only for the submission of a barrier job.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyspark.resource import ResourceProfile

from hopsgpu.errors import Cancelled, HopsGpuError
from hopsgpu.gang import Container, GangState, backoff_seconds
from hopsgpu.spark.application import Application
from hopsgpu.spark.bring import EVENT_SECONDS, Bringing, greeted, hosts_of, is_hello
from hopsgpu.spark.jobs import GangJob, hold_in_task, supervise_in_task
from hopsgpu.spark.jvm import FLIP_SECONDS, wait_until
from hopsgpu.spark.queueing import Queueing, queueing
from hopsgpu.spark.release import RELEASE_SECONDS, Release, let_go
from hopsgpu.spark.request import Patience, Request
from hopsgpu.worker.channel import new_secret
from hopsgpu.worker.peer import Driver
from hopsgpu.worker.server import ControlServer, serve

# Executors are up and Python is: an agent only has to import and connect.
_AGENTS_SECONDS = 120.0
_HANDOVERS = 5


@dataclass(frozen=True)
class Lease:
    """A gang's executors, all of them, with an agent each.

    Attributes:
        server: the control channel; agents are its peers.
        containers: one per agent.
        job: the barrier job of the agents; it fails when an executor is lost.
    """

    server: ControlServer
    containers: tuple[Container, ...]
    job: GangJob


class GpuLease:
    """Acquires, hands over and releases; use `lease_gpus`, which always releases.

    Attributes:
        request: of whom it acquires for, and tells.
    """

    def __init__(
        self,
        application: Application,
        request: Request,
        profile: ResourceProfile,
        server: ControlServer,
        driver: Driver,
    ) -> None:
        self._application = application
        # That of the launch at hand, where a gang is held for several.
        self.request = request
        self._profile = profile
        self._server = server
        self._driver = driver
        self._jobs: list[GangJob] = []
        self._whole = False

    def acquire(self, request: Request) -> Lease:
        """Brings all executors, with an agent on each; those that are still there are kept.

        Args:
            request: for whom; of the lease's own shape and number of executors.

        Raises:
            GangTimeout: not all came in time.
            Cancelled: the gang is no longer wanted.
            ConfigError: a container cannot serve (what it lacks is named).
        """
        self.request = request
        self.end_jobs()
        self._whole = False
        patience = Patience(request)
        given_back = 0
        with queueing(self._application, request, patience) as place:
            while True:
                with place.turn(self._registered()):
                    lease = self._try(place, patience)
                    if lease is not None:
                        self._whole = True
                        return lease
                    self._let_go()
                    request.watcher.arrived(())
                given_back += 1
                self._back_off(given_back, patience)

    def _let_go(self) -> Release:
        return let_go(
            self._application, self._profile.id, self._jobs, self._server, whole=self._whole
        )

    def _back_off(self, given_back: int, patience: Patience) -> None:
        """Lets others go first, once a part of the gang was held too long."""
        until = time.monotonic() + backoff_seconds(given_back, random.random())  # noqa: S311
        why = f"it was granted a part and gave it back (time {given_back}); it asks again soon"
        while time.monotonic() < until:
            patience.tell((), why)
            patience.check()
            self.request.cancelled.wait(EVENT_SECONDS)

    def _registered(self) -> int:
        return len(self._application.jvm.executors(self._profile.id))

    def _try(self, place: Queueing, patience: Patience) -> Lease | None:
        """One turn: asks, waits and hands over; None where YARN granted only a part."""
        watcher = self.request.watcher
        for _ in range(_HANDOVERS):
            job = self._start("holder", place.hosts())
            holders = Bringing(
                self._application, self.request, self._profile, self._server, job, patience, place
            ).run()
            if holders is None:
                return None
            watcher.mark("granted")
            watcher.state(GangState.GRANTED, hosts_of(holders))
            lease = self._hand_over(holders)
            if lease is not None:
                watcher.state(GangState.READY, [c.host for c in lease.containers])
                return lease
        raise HopsGpuError(
            f"the gang was granted {_HANDOVERS} times and did not start, the last time because:"
            f" {self._jobs[-1].reason(0)}"
        )

    def end_jobs(self) -> None:
        """Ends the tasks of a gang that is not whole; its executors stay, and may idle out."""
        self._server.end_all()
        deadline = time.monotonic() + RELEASE_SECONDS
        for job in self._jobs:
            while not job.ended.wait(EVENT_SECONDS) and time.monotonic() < deadline:
                self._application.jvm.cancel(job.tag)
                self._server.end_all()
        self._jobs = [job for job in self._jobs if not job.ended.is_set()]

    def _start(self, role: str, hosts: tuple[str, ...] = ()) -> GangJob:
        barrier = role == "agent"
        tag = f"hopsgpu-{self.request.run_id}-{role}-{uuid.uuid4().hex[:8]}"
        driver = replace(self._driver, job=tag)
        job = GangJob(
            self._application,
            tag=tag,
            description=f"hopsgpu {self.request.run_id}: {role}s of {self.request.executors}"
            " executors",
            tasks=self.request.executors,
            hosts=hosts,
            profile=self._profile,
            barrier=barrier,
            task=(supervise_in_task if barrier else hold_in_task)(driver),
        )
        self._jobs.append(job)
        job.start()
        return job

    def _hand_over(self, holders: dict[int, Container]) -> Lease | None:
        """Ends the holders and starts the agents in their place; None if one was lost."""
        holding = self._jobs[-1]
        self._server.hang_up(holders)
        cancelled = self.request.cancelled
        jvm = self._application.jvm
        if not wait_until(holding.ended.is_set, cancelled, _AGENTS_SECONDS):
            jvm.cancel(holding.tag)
            return None
        with jvm.barriers_allowed():
            job = self._start("agent")
            wait_until(lambda: jvm.stage_is_active(job.tag), job.ended, FLIP_SECONDS)
        agents: dict[int, Container] = {}
        deadline = time.monotonic() + _AGENTS_SECONDS
        while len(agents) < self.request.executors:
            if cancelled.is_set():
                raise Cancelled(f"{self.request.run_id} was cancelled before its ranks started")
            if job.ended.is_set() or time.monotonic() > deadline:
                jvm.cancel(job.tag)
                wait_until(job.ended.is_set, cancelled, RELEASE_SECONDS)
                return None
            event = self._server.next_event(EVENT_SECONDS)
            if event is None or event.peer in holders:
                continue
            if event.message is None:
                agents.pop(event.peer, None)
            elif is_hello(event.message, job.tag):
                agents[event.peer] = greeted(event.peer, event.message)
        return Lease(self._server, tuple(agents.values()), job)

    def release(self) -> bool:
        """Lets everything go; whether the ResourceManager confirmed it within 30 s."""
        watcher = self.request.watcher
        watcher.state(GangState.RELEASING, ())
        release = self._let_go()
        if release.confirmed:
            watcher.mark("released")
        if release.problem is not None:
            watcher.warn(release.problem)
        return release.confirmed


def is_whole(lease: Lease) -> bool:
    """Whether no executor of a lease was lost since; to be asked between launches only."""
    while (event := lease.server.next_event(0.0)) is not None:
        if event.message is None and event.peer in {c.key for c in lease.containers}:
            return False
    return not lease.job.ended.is_set()


@contextlib.contextmanager
def leased(application: Application, request: Request) -> Iterator[Lease]:
    """A gang for one launch: acquired at once, and released on every way out.

    Raises:
        GangTimeout, Cancelled, ConfigError, HopsGpuError: as `GpuLease.acquire`.
    """
    with lease_gpus(application, request) as owner:
        yield owner.acquire(request)


@contextlib.contextmanager
def lease_gpus(application: Application, request: Request) -> Iterator[GpuLease]:
    """What can acquire executors for a gang; all are released on every way out.

    Raises:
        ConfigError: the driver cannot listen for the executors.
    """
    secret = new_secret()
    jvm = application.jvm
    address = application.driver_address
    bind = application.setting("spark.driver.bindAddress") or address
    user = None if jvm.is_kerberized() else jvm.user()
    with serve(secret, bind, application.ports) as server:
        profile = application.profiles.check_out(request.shape)
        driver = Driver(address, server.port, secret, user)
        owner = GpuLease(application, request, profile, server, driver)
        try:
            yield owner
        finally:
            if owner.release():
                application.profiles.check_in(request.shape, profile)
