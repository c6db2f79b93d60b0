"""A search's executors, which arrive and leave one by one, each with an agent."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from hopsgpu.backends.agent_registration import register_container
from hopsgpu.backends.grant import Job, Lease, keep_all, refuse_duplicates
from hopsgpu.backends.lease_request import Request
from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event
from hopsgpu.control.server import ControlServer
from hopsgpu.core.gang import Container, Exclusions
from hopsgpu.errors import HopsGpuError
from hopsgpu.units import counted

log = logging.getLogger(__name__)

# Executors that get no trial are held aside, because they would otherwise be granted again. The
# limit is the number of GPUs of a large node.
_MOST_ASIDE = 8


class ElasticLease(ABC):
    """The lease of a search, which acquires and releases executors while the search runs.

    Only the thread of the search calls its public methods; slow operations run in other threads.

    Args:
        request: the search's request; its shape is that of each executor.
        server: control channel of the executors.

    Attributes:
        server: control channel of the executors.
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
        """Return the number of executors that are held aside because they cannot run trials."""
        return len(self._aside)

    @property
    @abstractmethod
    def held(self) -> int:
        """Return the number of executors that arrived and are not known to be gone."""

    @property
    @abstractmethod
    def waiting_for(self) -> str:
        """Return why more executors have not arrived; "" if no more are requested."""

    @abstractmethod
    def want(self, executors: int, at_once: int) -> None:
        """Set the number of executors to have from now on; return at once.

        Executors that are here stay.

        Args:
            executors: total number.
            at_once: how many of the missing ones are requested together.
        """

    @abstractmethod
    def _let_go(self, leaving: Mapping[int, Container]) -> None:
        """Start to give back executors that were disconnected; return at once."""

    @abstractmethod
    def _agent_lost(self, job: Job) -> None:
        """Record that the agent of a job is gone, at least for now."""

    @abstractmethod
    def _job_of(self, hello: Message) -> Job | None:
        """Return the job of the agent that introduces itself; None if that is an earlier job."""

    @abstractmethod
    def _arrived(self) -> None:
        """Record that one more executor is here."""

    @abstractmethod
    def _why_lost(self, reason: str, host: str) -> str:
        """Return why an executor on a host was lost."""

    @abstractmethod
    def _tokens(self) -> bytes:
        """Return the submitter's HDFS tokens."""

    def let_go(self, keys: Iterable[int]) -> None:
        """Give back the executors whose agents have the given keys; return at once."""
        leaving = {key: self.here.pop(key) for key in keys if key in self.here}
        if leaving:
            hosts = sorted(container.host for container in leaving.values())
            log.info("executors given back: %s", ", ".join(hosts))
        self.server.hang_up(leaving)
        self._let_go(leaving)

    def avoid(self, blamed: Exclusions) -> list[int]:
        """Exclude the causes of a failure; return the keys of agents that get no more trials.

        Raises:
            HopsGpuError: too many executors are excluded to continue.
        """
        self.request = replace(self.request, avoid=self.request.avoid | blamed)
        excluded = []
        for key, container in list(self.here.items()):
            if (reason := self.request.unwanted(container)) is not None:
                excluded.append(key)
                self._put_aside(self.here.pop(key), reason)
        return excluded

    def check(self) -> None:
        """Check that executors can arrive.

        Raises:
            HopsGpuError: executors cannot arrive; the message says why.
        """
        with self._lock:
            if self._problem is not None:
                raise self._problem

    def take(self, event: Event) -> Container | None:
        """Handle an event of the control channel; return the executor that it makes ready, or None.

        Raises:
            ConfigError, DiscoveryError: the executor cannot serve, or has a GPU of another one.
            HopsGpuError: too many executors are excluded to continue.
        """
        if event.message is None:
            if event.peer in self.here or event.peer in self._aside:
                log.info("executor lost: agent %d: %s", event.peer, event.reason)
                self.here.pop(event.peer, None)
                self._aside.pop(event.peer, None)
                self._agent_lost(self._jobs[event.peer])
            return None
        if event.message.kind != "hello":
            return None
        job = self._job_of(event.message)
        if job is None:
            self.server.hang_up([event.peer])
            return None
        container = register_container(event, event.message, self.request)
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
        self._arrived()
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

    def of(self, keys: Collection[int]) -> Lease:
        """Return the executors of a trial, by the keys of their agents, as a gang's lease."""
        jobs = tuple(self._jobs[key] for key in dict.fromkeys(keys))
        containers = tuple(self.here[key] for key in dict.fromkeys(keys))
        return Lease(
            self.server,
            containers,
            jobs[0] if len(jobs) == 1 else _Jobs(jobs),
            self._why_lost,
            keep_all,
            self._tokens,
        )

    def _fail(self, problem: HopsGpuError) -> None:
        with self._lock:
            self._problem = self._problem or problem


class _AnyEvent(threading.Event):
    """An event that is set once any of several jobs has ended."""

    def __init__(self, jobs: Collection[Job]) -> None:
        super().__init__()
        self._jobs = jobs

    def is_set(self) -> bool:
        return any(job.ended.is_set() for job in self._jobs)


@dataclass
class _Jobs:
    """The jobs of a trial on several executors, as one `Job` that ends when any of them ends."""

    jobs: tuple[Job, ...]

    def __post_init__(self) -> None:
        self.ended: threading.Event = _AnyEvent(self.jobs)

    def reason(self, seconds: float) -> str:
        ended = [job for job in self.jobs if job.ended.is_set()]
        return (ended or list(self.jobs))[0].reason(seconds if not ended else 0.0)
