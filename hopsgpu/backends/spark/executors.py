"""The executors of one gang or search: resource profile, jobs and control channel."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from py4j.protocol import Py4JError
from pyspark.resource import ResourceProfile

from hopsgpu.backends.gang_allocation import Releasable
from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.spark.application import Application
from hopsgpu.backends.spark.barrier_job import GangJob, Task, refuse_hopeless
from hopsgpu.backends.spark.executor_admission import ExecutorAdmission, ExecutorAdmissions
from hopsgpu.backends.spark.jvm import wait_until
from hopsgpu.backends.spark.log4j import CapturedLog
from hopsgpu.cluster_managers.manager import HeldExecutors
from hopsgpu.cluster_managers.yarn.container_exits import container_exit
from hopsgpu.control.channel import new_secret
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.control.server import ControlServer, serve
from hopsgpu.control.tls import is_network_encrypted
from hopsgpu.core.own_log import level
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason
from hopsgpu.errors import ConfigError, HopsGpuError
from hopsgpu.linux import allow_descriptors
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

_CONTAINER = re.compile(r"container_\w+")
# Spark learns of a job's tasks some milliseconds after its start, and later on a busy machine.
_REQUEST_SECONDS, _REQUEST_POLL_SECONDS = 3.0, 0.05


@dataclass(frozen=True)
class Executors:
    """The executors of one resource profile, which only one allocator uses.

    Attributes:
        driver: what an executor needs to connect to the control channel.
        removals: Spark's messages about executors that have ended, or None.
        admissions: opens admissions by a queue besides hopsgpu's.
    """

    application: Application
    profile: ResourceProfile
    server: ControlServer
    driver: DriverEndpoint
    removals: CapturedLog | None
    admissions: ExecutorAdmissions = field(default_factory=ExecutorAdmissions)

    def new_job(
        self,
        request: Request,
        role: str,
        tasks: int,
        hosts: Sequence[str],
        task_for: Callable[[DriverEndpoint], Task],
        *,
        is_barrier: bool = False,
    ) -> GangJob:
        """Return a Spark job on these executors, which is not started.

        Args:
            role: role of the tasks, a noun.
            hosts: preferred host of each task; empty for none.
            task_for: returns the function of the tasks, given what a task needs to connect.
        """
        tag = f"hopsgpu-{request.run_id}-{role}-{uuid.uuid4().hex[:8]}"
        return GangJob(
            self.application,
            tag=tag,
            description=f"hopsgpu {request.run_id}: {role} on {count_of(tasks, 'executor')}",
            tasks=tasks,
            hosts=hosts,
            profile=self.profile,
            is_barrier=is_barrier,
            task=task_for(replace(self.driver, job=tag, modules=request.imports)),
        )

    def refuse_hopeless(self, jobs: Iterable[GangJob]) -> None:
        """Raise the error of a failed task of these jobs if a retry by Spark cannot fix it.

        Raises:
            ConfigError: also if a setting ends each container before its executor can start.
        """
        self.refuse_hopeless_containers()
        for job in jobs:
            for error in self.application.jvm.task_failures(job.tag):
                refuse_hopeless(error)

    def refuse_hopeless_containers(self) -> None:
        """Record why containers ended.

        Raises:
            ConfigError: a setting ends each container before its executor can start.
        """
        failing = self.application.failing
        for message in () if self.removals is None else self.removals.drain():
            if match := _CONTAINER.search(message):
                failing.record_exit(match[0], container_exit(message))
        if (hopeless := failing.hopeless_exit()) is not None:
            raise ConfigError(
                f"no executor can start, because {hopeless.reason}: {hopeless.remedy}"
            )

    def registered_ids(self) -> tuple[str, ...]:
        """Return Spark's IDs of the executors that are connected to the driver's JVM."""
        return self.application.jvm.registered_executors(self.profile.id)

    def busy_ids(self) -> Collection[str]:
        """Return Spark's IDs of the executors that run a task."""
        return self.application.jvm.busy_executors(self.profile.id)

    def target(self) -> int:
        return self.application.jvm.target(self.profile.id)

    def is_target_at_most(self, executors: int) -> bool:
        """Make Spark recompute its target; return whether it wants at most this many executors.

        While Spark wants more, it replaces killed executors.
        """
        if self.target() > executors:
            self.application.jvm.run_allocation_step()
        return self.target() <= executors

    def request_now(self, executors: int, cancelled: threading.Event) -> None:
        """Make Spark request all executors now, rather than 1, 2, 4, … a second apart.

        Spark requests no more executors than its tasks need. If it does not request them within
        seconds, as at the limit of its executors, it continues at its own pace.

        Args:
            executors: number of executors that the tasks need, including the present ones.
        """

        def is_requested() -> bool:
            if self.target() >= executors:
                return True
            self.application.jvm.request_executors_now(self.profile.id, executors)
            return False

        try:
            is_done = wait_until(is_requested, cancelled, _REQUEST_SECONDS, _REQUEST_POLL_SECONDS)
        except LookupError as error:
            log.warning("Spark requests executors at its own pace: it has no %s", error)
            return
        log.debug("Spark %s requested all %d executors", "has" if is_done else "has not", executors)

    def kill_idle(self, busy: Collection[str]) -> None:
        """Kill all executors but the busy ones.

        Spark requests new executors if its target still includes the killed ones.
        """
        self.kill([e for e in self.registered_ids() if e not in busy])

    def kill(self, executors: Collection[str]) -> None:
        """Kill executors, busy or not, without changing Spark's target.

        Also send StopExecutor: the kill reaches a node only with the next heartbeats of the
        application master and the NodeManager.

        Raises:
            Py4JError: this Spark has no such kill.
        """
        if not executors:
            return
        # Kill first, so that Spark expects the end of these executors.
        self.application.jvm.kill(executors)
        try:
            self.application.jvm.shut_down(executors)
        except Py4JError as error:
            why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            log.info("killed executors end with the heartbeats of their nodes: %s", why)
        self.application.end_executors(executors)

    def placing(
        self, request: Request, admission: ExecutorAdmission, excluded_hosts: Collection[str] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """Have the cluster manager follow the gang's placement while inside, where it can."""
        hosts = {*excluded_hosts, *request.exclusions.hosts}
        hosts |= self.application.failing.hosts(time.monotonic())
        return self.application.placing(request, self.profile, admission.flavors, hosts)

    def end_revoked(self, executors: Collection[str], why: str) -> None:
        """End executors whose admission was revoked; their loss has this reason.

        Args:
            executors: Spark's IDs of the executors.

        Raises:
            HopsGpuError: the cluster manager does not answer; the caller tries again.
        """
        if executors:
            log.info("ends %s: %s", count_of(len(executors), "executor"), why)
            self.application.end_revoked(executors, why)

    def start_problem(self) -> WaitReason:
        """Return what keeps requested executors from starting; `NO_WAIT` if nothing is known.

        Raises:
            ConfigError: nothing but another setting helps.
        """
        try:
            problem = self.application.find_start_problem(self.profile)
        except HopsGpuError as error:
            log.info("it is unknown whether executors can start: %s", error)
            return NO_WAIT
        if problem is None:
            return NO_WAIT
        reason = WaitReason(problem.sentence, lack=problem.sentence)
        reason = reason.with_details(problem.details, problem.remedy)
        if problem.is_final:
            raise ConfigError(str(reason))
        return reason

    def held_containers(self) -> HeldExecutors:
        """Return the containers of these executors, as the cluster manager shows them."""
        return self.application.manager.held_executors(self.application.id, self.profile.id)


_Allocator = TypeVar("_Allocator", bound=Releasable)


@contextlib.contextmanager
def spark_allocator(
    kind: Callable[[Request, Executors], _Allocator], application: Application, request: Request
) -> Iterator[_Allocator]:
    """Provide an allocator of executors; release all of them on every path.

    Raises:
        ConfigError: the driver cannot listen for the executors, or it is unclear which queue admits
            them.
    """
    with (
        _control_channel(application, request.plan.executors) as (server, driver),
        application.removals() or contextlib.nullcontext() as removals,
        application.admissions() as admissions,
    ):
        profile = application.profiles.check_out(request.plan.shape)
        executors = Executors(application, profile, server, driver, removals, admissions)
        allocator = kind(request, executors)
        try:
            yield allocator
        finally:
            if allocator.release():
                application.profiles.check_in(request.plan.shape, profile)


@contextlib.contextmanager
def _control_channel(
    application: Application, executors: int
) -> Iterator[tuple[ControlServer, DriverEndpoint]]:
    """Serve a control channel with its own secret; also yield what executors need to connect."""
    allow_descriptors(executors)
    secret, jvm = new_secret(), application.jvm
    address = application.driver_address
    bind = application.setting("spark.driver.bindAddress") or address
    user = None if jvm.is_kerberized() else jvm.user()
    heartbeat = application.heartbeat
    encrypted = is_network_encrypted(application.setting)
    with serve(secret, bind, application.ports, heartbeat=heartbeat, encrypted=encrypted) as server:
        driver = DriverEndpoint(
            address, server.port, secret, user, heartbeat=heartbeat, log=level()
        )
        yield server, replace(driver, certificate=server.certificate)
