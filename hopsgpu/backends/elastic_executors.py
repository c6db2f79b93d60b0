"""Executors that come and go one by one, each with an agent: what a search runs on."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from hopsgpu.backends.agent_registration import greeted
from hopsgpu.backends.grant import Job, Lease, Wire, refuse_duplicates
from hopsgpu.backends.lease_request import Request
from hopsgpu.control.channel import Message
from hopsgpu.control.server import ControlServer, Event
from hopsgpu.core.gang import Avoid, Container
from hopsgpu.errors import HopsGpuError
from hopsgpu.units import counted

log = logging.getLogger(__name__)

# Executors that get no trial are held aside, so that they are not given again; as many as a large
# node has GPUs.
_MOST_ASIDE = 8


class ElasticLease(ABC):
    """Brings executors and lets them go while a search goes on.

    One thread calls it, that of the search. What takes time is done in others.

    Args:
        request: of whom; its shape is that of each executor.
        server: their control channel.

    Attributes:
        server: their control channel.
        here: the executors that are ready, by the keys of their agents.
    """

    def __init__(self, request: Request, server: ControlServer) -> None:
        self.request = request
        self.server = server
        self.here: dict[int, Container] = {}
        self._jobs: dict[int, Job] = {}
        self._aside: dict[int, Container] = {}
        self._lock = threading.Lock()
        self._problem: HopsGpuError | None = None

    @property
    def aside(self) -> int:
        """Executors that get no trial."""
        return len(self._aside)

    @property
    @abstractmethod
    def held(self) -> int:
        """Executors that have come and are not known to be gone, those that get no trial too."""

    @property
    @abstractmethod
    def waiting_for(self) -> str:
        """Why there are not more; "" where no more are asked for."""

    @abstractmethod
    def want(self, executors: int, at_once: int) -> None:
        """How many to have from now on; those that are here stay. Returns at once.

        Args:
            executors: in all.
            at_once: of those that are missing so many are asked for together.
        """

    @abstractmethod
    def _let_go(self, leaving: Mapping[int, Container]) -> None:
        """Has executors, that were hung up on, given back; returns at once."""

    @abstractmethod
    def _lost(self, job: Job) -> None:
        """Note that the agent of a job is gone, for now at least."""

    @abstractmethod
    def _job_of(self, hello: Message) -> Job | None:
        """Return what runs the agent that introduces itself; None for one of an earlier time."""

    @abstractmethod
    def _come(self) -> None:
        """Note that one more is here."""

    @abstractmethod
    def _why_lost(self, reason: str, host: str) -> str:
        """Return why an executor on a host was lost."""

    @abstractmethod
    def _tokens(self) -> bytes:
        """Return the submitter's HDFS tokens."""

    def let_go(self, keys: Iterable[int]) -> None:
        """Give executors back, by the keys of their agents; return at once."""
        leaving = {key: self.here.pop(key) for key in keys if key in self.here}
        if leaving:
            hosts = sorted(container.host for container in leaving.values())
            log.info("executors given back: %s", ", ".join(hosts))
        self.server.hang_up(leaving)
        self._let_go(leaving)

    def avoid(self, blamed: Avoid) -> list[int]:
        """Put aside what is to blame for a failure; the keys of agents that get no trial more.

        Raises:
            HopsGpuError: so many are aside that there is no sense in it.
        """
        self.request = replace(self.request, avoid=self.request.avoid | blamed)
        found = []
        for key, container in list(self.here.items()):
            if (reason := self.request.unwanted(container)) is not None:
                found.append(key)
                self._put_aside(self.here.pop(key), reason)
        return found

    def check(self) -> None:
        """Check whether executors can come.

        Raises:
            HopsGpuError: what keeps them from it, and will.
        """
        with self._lock:
            if self._problem is not None:
                raise self._problem

    def take(self, event: Event) -> Container | None:
        """Take in what comes from the control channel; the executor that is ready by it.

        Raises:
            ConfigError, DiscoveryError: it cannot serve, or has a GPU that another one has.
        """
        if event.message is None:
            if event.peer in self.here or event.peer in self._aside:
                log.info("executor lost: agent %d: %s", event.peer, event.reason)
                self.here.pop(event.peer, None)
                self._aside.pop(event.peer, None)
                self._lost(self._jobs[event.peer])
            return None
        if event.message.kind != "hello":
            return None
        job = self._job_of(event.message)
        if job is None:
            self.server.hang_up([event.peer])
            return None
        container = greeted(event, event.message, self.request)
        self._jobs[event.peer] = job
        if (reason := self.request.unwanted(container)) is not None:
            self._put_aside(container, reason)
            return None
        refuse_duplicates([*self.here.values(), container])
        self.here[event.peer] = container
        log.info(
            "executor arrived: %s on %s (%d here)",
            container.container_id,
            container.host,
            len(self.here),
        )
        self._come()
        return container

    def _put_aside(self, container: Container, reason: str) -> None:
        self._aside[container.key] = container
        log.info("executor held aside: %s: %s", container.container_id, reason)
        self.request.watcher.warn(f"an executor got no trial: {reason}")
        if len(self._aside) > _MOST_ASIDE:
            raise HopsGpuError(
                f"{counted(len(self._aside), 'executor')} started that cannot run trials, the last"
                f" because {reason}"
            )

    def of(self, keys: Collection[int], wire: Wire) -> Lease:
        """Return executors of a trial, as a gang's.

        Args:
            keys: of their agents.
            wire: gives what these say of the trial.
        """
        jobs = tuple(self._jobs[key] for key in dict.fromkeys(keys))
        containers = tuple(self.here[key] for key in dict.fromkeys(keys))
        return Lease(
            wire,
            containers,
            jobs[0] if len(jobs) == 1 else _Jobs(jobs),
            self._why_lost,
            _keep,
            self._tokens,
        )

    def _fail(self, problem: HopsGpuError) -> None:
        with self._lock:
            self._problem = self._problem or problem


class _EndOfAny(threading.Event):
    """Whether one of several has ended."""

    def __init__(self, jobs: Collection[Job]) -> None:
        super().__init__()
        self._jobs = jobs

    def is_set(self) -> bool:
        return any(job.ended.is_set() for job in self._jobs)


@dataclass
class _Jobs:
    """Those of a trial of several executors; a `Job` that has ended when one has."""

    jobs: tuple[Job, ...]

    def __post_init__(self) -> None:
        self.ended: threading.Event = _EndOfAny(self.jobs)

    def reason(self, seconds: float) -> str:
        ended = [job for job in self.jobs if job.ended.is_set()]
        return (ended or list(self.jobs))[0].reason(seconds if not ended else 0.0)


def _keep(keys: Collection[int]) -> bool:
    """`Lease.let_go`: the search lets them go."""
    return False
