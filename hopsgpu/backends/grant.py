"""A gang's executors once they are granted, and the interface of their owner."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from hopsgpu.backends.lease_request import Request
from hopsgpu.control.server import ControlServer
from hopsgpu.core.gang import Container, Exclusions, GangState, duplicate_gpu
from hopsgpu.errors import DiscoveryError


class Job(Protocol):
    """The job that runs the agents of a gang: a Spark job, or processes on this machine.

    Attributes:
        ended: event, set when the job is over.
    """

    ended: threading.Event

    def reason(self, seconds: float) -> str:
        """Return why the job ended, in words; wait up to `seconds` for its end."""

    def loss(self, seconds: float) -> str:
        """Return why an executor of the job was lost; "" if that is not known in `seconds`."""


@dataclass(frozen=True)
class Lease:
    """All executors of a gang, with one agent on each.

    Attributes:
        server: the control channel; agents are its peers.
        containers: the containers, one per agent.
        job: the job that runs the agents; it ends when an executor is lost.
        why_lost: returns why an executor was lost, given the job's reason and the host.
        let_go: releases executors that the gang no longer needs, by the keys of their agents, while
            the others continue; returns whether the ResourceManager has confirmed that they are
            gone. The gang is then no longer whole.
        tokens: reads the submitter's HDFS tokens, in Hadoop's format; b"" if there are none.
        own_jobs: the jobs by the keys of the agents, if each executor has its own.
    """

    server: ControlServer
    containers: tuple[Container, ...]
    job: Job
    why_lost: Callable[[str, str], str]
    let_go: Callable[[Collection[int]], bool]
    tokens: Callable[[], bytes]
    own_jobs: Mapping[int, Job] = field(default_factory=dict)

    @property
    def jobless(self) -> frozenset[int]:
        """Return the keys of the agents that are connected although their job has ended."""
        keys = (container.key for container in self.containers)
        return frozenset(
            key
            for key in keys
            if self.own_jobs.get(key, self.job).ended.is_set() and self.server.is_connected(key)
        )

    @property
    def lost(self) -> frozenset[int]:
        """Return the keys of the agents that are not connected, or were disconnected."""
        keys = (container.key for container in self.containers)
        return frozenset(key for key in keys if not self.server.is_connected(key))

    def is_whole(self) -> bool:
        """Return whether no executor was lost."""
        return not self.lost and not self.job.ended.is_set()


class Owner(ABC):
    """The owner of a gang's executors: it acquires them, and keeps them until its context ends.

    Attributes:
        request: the request that it serves, and whose watcher it notifies; the current launch's
            request if a gang is held for several launches.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._lease: Lease | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether no executor is known to be lost."""
        return self._lease is not None and self._lease.is_whole()

    @property
    def executors(self) -> int:
        """Return the number of executors of the gang that are not known to be lost."""
        return 0 if self._lease is None else len(self._lease.containers) - len(self._lease.lost)

    def whole(self, request: Request) -> Lease:
        """Return the gang: at once if it is whole, else once the missing executors have arrived.

        A gang with a container that the request does not want is not whole.

        Raises:
            HopsGpuError: as for `acquire`.
        """
        lease = self._lease
        if lease is None or not lease.is_whole() or any(map(request.unwanted, lease.containers)):
            return self.acquire(request)
        self.request = request
        containers = lease.containers
        request.watcher.mark("granted")
        request.watcher.arrived([time.time()] * len(containers))
        request.watcher.state(GangState.READY, [container.host for container in containers])
        return lease

    @abstractmethod
    def acquire(self, request: Request) -> Lease:
        """Acquire all executors, with an agent on each; keep those that are already there.

        Args:
            request: the request, which has the lease's own shape and number of executors.

        Raises:
            GangTimeout: not all arrived in time.
            Cancelled: the gang was cancelled.
            ConfigError: a container cannot serve; the message names what it lacks.
        """

    @abstractmethod
    def end_jobs(self) -> None:
        """End the agents of a gang that is not whole."""


def keep_all(keys: Collection[int]) -> bool:
    """Implement `Lease.let_go` for a lease that does not release single executors."""
    return False


Leasing = Callable[[Request], AbstractContextManager[Owner]]


@contextlib.contextmanager
def leased(lease: Leasing, request: Request) -> Iterator[Callable[[Exclusions], Lease]]:
    """Provide a function that returns the whole gang of one launch; release the gang on exit.

    The argument of the function names nodes and GPUs to avoid, which get no part in the gang.

    Args:
        lease: provides the owner of executors for a request.
        request: the launch's request.

    Raises:
        ConfigError: the driver cannot listen for the executors.
    """
    with lease(request) as owner:
        yield lambda avoid: owner.whole(replace(request, avoid=avoid))


def refuse_duplicates(containers: Sequence[Container]) -> None:
    """Check that each GPU is in one container only.

    Raises:
        DiscoveryError: two containers have the same GPU; the message names both.
    """
    duplicate = duplicate_gpu(containers)
    if duplicate is not None:
        gpu, first, second = duplicate
        raise DiscoveryError(
            f"{gpu} was assigned to two containers: {first.container_id} on {first.host} and"
            f" {second.container_id} on {second.host}. Do all containers of the node share"
            " its lease directory?"
        )
