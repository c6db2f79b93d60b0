"""The executors that a gang has been granted, and the interface of what acquires them."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from hopsgpu.backends.gang_request import Request
from hopsgpu.control.server import ControlServer
from hopsgpu.core.gang import Exclusions, GangExecutor, GangState, duplicate_gpu
from hopsgpu.errors import DiscoveryError


class Job(Protocol):
    """The job that runs the agents of a gang: a Spark job, or processes on this machine.

    Attributes:
        ended: event, set when the job has ended.
    """

    ended: threading.Event

    def reason(self, seconds: float) -> str:
        """Return why the job ended, in words; wait up to `seconds` for its end."""

    def loss(self, seconds: float) -> str:
        """Return why an executor of the job was lost; "" if that is not known in `seconds`."""


class Releasable(Protocol):
    """An allocator whose executors are released at the end of its context."""

    def release(self) -> bool:
        """Release all executors; return whether the release was confirmed."""


@dataclass(frozen=True)
class GangAllocation:
    """All executors of a gang, with one agent on each.

    Attributes:
        server: control channel; agents are its peers.
        job: the job that runs the agents; it ends when an executor is lost.
        explain_loss: returns why an executor was lost, given the job's reason.
        release_part: releases executors by the keys of their agents, while the others continue;
            returns whether the cluster manager has confirmed it. Afterwards the gang is not whole.
        read_tokens: reads the submitter's HDFS tokens, in Hadoop's format; b"" if there are none.
        job_by_key: the jobs by the keys of the agents, if each executor has its own job.
    """

    server: ControlServer
    containers: tuple[GangExecutor, ...]
    job: Job
    explain_loss: Callable[[str, GangExecutor], str]
    release_part: Callable[[Collection[int]], bool]
    read_tokens: Callable[[], bytes]
    job_by_key: Mapping[int, Job] = field(default_factory=dict)

    @property
    def keys_without_job(self) -> frozenset[int]:
        """Return the keys of the agents that are connected although their job has ended."""
        keys = (container.key for container in self.containers)
        return frozenset(
            key
            for key in keys
            if self.job_by_key.get(key, self.job).ended.is_set() and self.server.is_connected(key)
        )

    @property
    def lost_keys(self) -> frozenset[int]:
        """Return the keys of the agents that are not connected, or were disconnected."""
        keys = (container.key for container in self.containers)
        return frozenset(key for key in keys if not self.server.is_connected(key))

    def is_whole(self) -> bool:
        return not self.lost_keys and not self.job.ended.is_set()


class GangAllocator(ABC):
    """Acquires a gang's executors, and keeps them until its context ends.

    Attributes:
        request: the request that is served, and whose watcher is notified. If a gang is held for
            several launches, it is the request of the current launch.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._allocation: GangAllocation | None = None

    @property
    def is_whole(self) -> bool:
        return self._allocation is not None and self._allocation.is_whole()

    @property
    def executor_count(self) -> int:
        if self._allocation is None:
            return 0
        return len(self._allocation.containers) - len(self._allocation.lost_keys)

    def ensure_whole(self, request: Request) -> GangAllocation:
        """Return the gang: at once if it is whole, else once the missing executors have arrived.

        A gang with an executor that the request excludes is not whole.

        Raises:
            HopsGpuError: as for `acquire`.
        """
        allocation = self._allocation
        if (
            allocation is None
            or not allocation.is_whole()
            or any(map(request.exclusion_reason, allocation.containers))
        ):
            return self.acquire(request)
        self.request = request
        containers = allocation.containers
        request.watcher.mark("granted")
        request.watcher.on_executors_arrived([time.time()] * len(containers))
        request.watcher.state(GangState.READY, [container.host for container in containers])
        return allocation

    @abstractmethod
    def acquire(self, request: Request) -> GangAllocation:
        """Acquire all executors, with an agent on each; keep the executors that already run.

        Raises:
            GangTimeout: not all arrived in time.
            Cancelled: the gang was cancelled.
            ConfigError: a container cannot serve; the message names what it lacks.
        """

    @abstractmethod
    def end_jobs(self) -> None:
        """End the agents of a gang that is not whole."""


def keep_all(keys: Collection[int]) -> bool:
    """Implement `GangAllocation.release_part` where single executors cannot be released."""
    return False


GangAllocatorFactory = Callable[[Request], AbstractContextManager[GangAllocator]]


@contextlib.contextmanager
def provide_allocations(
    allocate: GangAllocatorFactory, request: Request
) -> Iterator[Callable[[Exclusions], GangAllocation]]:
    """Provide a function that returns the whole gang of one launch; release the gang on exit.

    The function takes the nodes and GPUs to exclude from the gang.

    Raises:
        ConfigError: the driver cannot listen for the executors.
    """
    with allocate(request) as allocator:
        yield lambda exclusions: allocator.ensure_whole(replace(request, exclusions=exclusions))


def refuse_duplicates(containers: Sequence[GangExecutor]) -> None:
    """Check that each GPU is in one container only; raise DiscoveryError otherwise."""
    duplicate = duplicate_gpu(containers)
    if duplicate is not None:
        gpu, first, second = duplicate
        raise DiscoveryError(
            f"{gpu} was assigned to two containers: {first.container_id} on {first.host} and"
            f" {second.container_id} on {second.host}. Do all containers of the node share"
            " its lease directory?"
        )
