"""Acquisition of a gang on this machine: one process with the gang's GPUs and an agent."""

from __future__ import annotations

import logging
import time

from hopsgpu.backends.agent_registration import is_hello, register_container
from hopsgpu.backends.gang_allocation import GangAllocation, GangAllocator, keep_all
from hopsgpu.backends.gang_request import AcquisitionClock, Request
from hopsgpu.backends.local.container_process import ContainerJob
from hopsgpu.backends.local.containers import EVENT_SECONDS, Containers
from hopsgpu.core.gang import GangExecutor, GangState
from hopsgpu.errors import HopsGpuError

log = logging.getLogger(__name__)


class LocalGangAllocator(GangAllocator):
    def __init__(self, request: Request, containers: Containers) -> None:
        super().__init__(request)
        self._containers = containers

    def acquire(self, request: Request) -> GangAllocation:
        self.request = request
        self.end_jobs()
        clock = AcquisitionClock(request)
        began = time.monotonic()
        job = self._containers.start(request)
        container = self._wait_for_hello(job, clock)
        log.info(
            "gang granted: %s on this machine after %.1f s",
            container.container_id,
            time.monotonic() - began,
        )
        watcher, hosts = request.watcher, [container.host]
        watcher.on_executors_arrived([time.time()])
        watcher.mark("granted")
        watcher.state(GangState.GRANTED, hosts)
        watcher.state(GangState.READY, hosts)
        self._allocation = GangAllocation(
            self._containers.server,
            (container,),
            job,
            explain_loss=lambda reason, container: reason,
            release_part=keep_all,
            read_tokens=bytes,
        )
        return self._allocation

    def _wait_for_hello(self, job: ContainerJob, clock: AcquisitionClock) -> GangExecutor:
        """Wait for the container's hello message; return the container.

        Raises:
            GangTimeout, Cancelled: as for `AcquisitionClock.check`.
            ConfigError, CapacityError, DiscoveryError, HopsGpuError: the container cannot serve.
        """
        clock.report((), job.wait_reason)
        while True:
            clock.check()
            event = self._containers.server.next_event(EVENT_SECONDS)
            message = None if event is None else event.message
            if event is not None and message is not None and is_hello(message, job.name):
                return register_container(event, message, self.request)
            if job.ended.is_set():
                raise job.problem or HopsGpuError(f"the gang did not start: {job.reason(0.0)}")
            clock.report((), job.wait_reason)

    def end_jobs(self) -> None:
        """End the container and its ranks, whatever its state."""
        self._containers.end_all(self.request.watcher)
        self._allocation = None

    def release(self) -> bool:
        """End the container and its ranks; return True, because the GPUs are then free."""
        self.request.watcher.state(GangState.RELEASING, ())
        self.end_jobs()
        self.request.watcher.mark("released")
        return True
