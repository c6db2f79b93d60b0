"""A gang's executors once they are there, and what a launch wants of whoever brings them."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hopsgpu.backends.lease_request import Request
from hopsgpu.control.events import Event
from hopsgpu.core.gang import Avoid, Container, GangState, duplicate_gpu
from hopsgpu.errors import DiscoveryError


class Job(Protocol):
    """What runs the agents of a gang: Spark's barrier job, or processes of this machine.

    Attributes:
        ended: set when it is over.
    """

    ended: threading.Event

    def reason(self, seconds: float) -> str:
        """Return what a person needs of its end; waits so long for it to be known."""


class Wire(Protocol):
    """A gang's agents, as peers of the control channel."""

    @property
    def certificate(self) -> bytes | None:
        """What agents must see of TLS (DER); None where the channel is not encrypted."""

    def next_event(self, seconds: float) -> Event | None:
        """Return the next event, or None when none came within `seconds`."""

    def send(self, peer: int, kind: str, payload: bytes = b"", **fields: Any) -> bool:
        """Send to a peer; False where its connection is gone."""

    def keep(self, peer: int, name: str, content: bytes) -> bool:
        """Has a peer keep some bytes, as `ControlServer.keep`."""

    def hang_up(self, peers: Iterable[int]) -> None:
        """Close the connections of some peers."""


@dataclass(frozen=True)
class Lease:
    """A gang's executors, all of them, with an agent each.

    Attributes:
        server: the control channel; agents are its peers.
        containers: one per agent.
        job: what runs the agents; it ends when an executor is lost.
        why_lost: says why an executor was lost, given the job's reason and the host.
        let_go: lets executors go that the gang needs no more, by the keys of their agents, while
            the others go on; whether the ResourceManager has shown them gone. The gang is not
            whole then.
        tokens: reads the submitter's HDFS tokens, in Hadoop's format; b"" where there are none.
        gone: keys of the agents whose connection has ended, as far as it was noticed.
    """

    server: Wire
    containers: tuple[Container, ...]
    job: Job
    why_lost: Callable[[str, str], str]
    let_go: Callable[[Collection[int]], bool]
    tokens: Callable[[], bytes]
    gone: set[int] = field(default_factory=set)

    def is_whole(self) -> bool:
        """Return whether no executor was lost since; to be asked between launches only."""
        keys = {container.key for container in self.containers}
        while (event := self.server.next_event(0.0)) is not None:
            if event.message is None and event.peer in keys:
                self.gone.add(event.peer)
        return not self.gone and not self.job.ended.is_set()


class Owner(ABC):
    """Who brings the executors of a gang, and has them until the end of its context.

    Attributes:
        request: of whom it acquires for, and tells; that of the launch at hand, where a gang is
            held for several.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._lease: Lease | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it holds all executors, as far as is known; to be asked between launches only."""
        return self._lease is not None and self._lease.is_whole()

    def whole(self, request: Request) -> Lease:
        """Return the gang: at once where it is whole still, else once what it lacks has come.

        Raises:
            HopsGpuError: as `acquire`.
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
        """Bring all executors, with an agent on each; those that are still there are kept.

        Args:
            request: for whom; of the lease's own shape and number of executors.

        Raises:
            GangTimeout: not all came in time.
            Cancelled: the gang is no longer wanted.
            ConfigError: a container cannot serve (what it lacks is named).
        """

    @abstractmethod
    def end_jobs(self) -> None:
        """End the agents of a gang that is not whole."""


Leasing = Callable[[Request], AbstractContextManager[Owner]]


@contextlib.contextmanager
def leased(lease: Leasing, request: Request) -> Iterator[Callable[[Avoid], Lease]]:
    """What gives the whole gang of one launch, again and again; released on every way out.

    What it is given to avoid has no part in the gang.

    Args:
        lease: gives what can acquire for a request.
        request: the launch's.

    Raises:
        ConfigError: the driver cannot listen for the executors.
    """
    with lease(request) as owner:
        yield lambda avoid: owner.whole(replace(request, avoid=avoid))


def refuse_duplicates(containers: Sequence[Container]) -> None:
    """Check whether each GPU is in one container only.

    Raises:
        DiscoveryError: two containers were given the same one; both are named.
    """
    twice = duplicate_gpu(containers)
    if twice is not None:
        gpu, one, other = twice
        raise DiscoveryError(
            f"{gpu} was given to two containers: {one.container_id} on {one.host} and"
            f" {other.container_id} on {other.host}. Do all containers of the node share"
            " its lease directory?"
        )
