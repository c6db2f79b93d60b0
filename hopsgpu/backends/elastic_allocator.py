"""Executors of searches and elastic gangs: they arrive and leave one by one, each with an agent."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from hopsgpu.backends.agent_registration import register_container
from hopsgpu.backends.gang_allocation import GangAllocation, Job, keep_all, refuse_duplicates
from hopsgpu.backends.gang_request import Request
from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event
from hopsgpu.control.server import ControlServer
from hopsgpu.core.gang import Exclusions, GangExecutor
from hopsgpu.core.wait_reasons import WaitReason
from hopsgpu.errors import HopsGpuError
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

# Executors that get no rank are parked, because the cluster manager would otherwise grant them
# again. The limit is the number of GPUs of a large node.
_MAX_PARKED = 8
_POLL_SECONDS = 0.1


class ElasticAllocator(ABC):
    """Acquires and releases executors one by one, for a search, a score or an elastic gang.

    Only the caller's thread calls the public methods; slow operations run in other threads.

    Args:
        request: the request; its shape is that of each executor.

    Attributes:
        ready_executors: the executors that can run ranks, by the keys of their agents.
    """

    def __init__(self, request: Request, server: ControlServer) -> None:
        self.request = request
        self.server = server
        self.ready_executors: dict[int, GangExecutor] = {}
        self._jobs: dict[int, Job] = {}
        self._parked: dict[int, GangExecutor] = {}
        self._lock = threading.Lock()
        self._problem: HopsGpuError | None = None

    @property
    def parked_count(self) -> int:
        return len(self._parked)

    @property
    @abstractmethod
    def held_count(self) -> int:
        """Return the number of GPU-holding executors: arrived, and release not confirmed."""

    @property
    @abstractmethod
    def starting_count(self) -> int:
        """Return how many granted executors are known to be starting."""

    @property
    @abstractmethod
    def wait_reason(self) -> WaitReason:
        """Return why more executors have not arrived; `NO_WAIT` if no more are requested."""

    @abstractmethod
    def set_wanted(self, executors: int, at_once: int, *, least: int = 1) -> None:
        """Set the number of executors to have from now on; return at once.

        Ready executors stay. While fewer than `least` are ready, the missing ones are requested as
        a gang, within the request's time limit. Further executors are requested behind all waiting
        gangs, without a limit.

        Args:
            at_once: how many missing executors are requested together.
            least: number without which the caller cannot work.
        """

    @property
    @abstractmethod
    def reclaimed_count(self) -> int:
        """Return how many of the offered executors waiting gangs need."""

    @abstractmethod
    def offer(self, executors: int, giving: int) -> None:
        """Offer executors to gangs that wait, from now on; return at once.

        Args:
            executors: how many the caller has above its minimum; 0 for no offer.
            giving: how many of them it releases at its next checkpoint.
        """

    @abstractmethod
    def _start_release(self, leaving: Mapping[int, GangExecutor]) -> None:
        """Start to release disconnected executors; return at once."""

    @abstractmethod
    def _abandon_job(self, job: Job) -> None:
        """Cancel the job of a lost agent, so that another executor is requested in its place.

        Otherwise Spark would request an executor for the job outside the queue of gangs, or none if
        the agent is only frozen or cut off.
        """

    @abstractmethod
    def _job_of(self, hello: Message) -> Job | None:
        """Return the job of the agent that introduces itself; None for an earlier job."""

    @abstractmethod
    def _record_arrival(self, container: GangExecutor) -> None: ...

    @abstractmethod
    def _explain_loss(self, reason: str, container: GangExecutor) -> str: ...

    @abstractmethod
    def _read_tokens(self) -> bytes: ...

    def release_executors(self, keys: Iterable[int]) -> None:
        self._disconnect_and_release(
            {key: self.ready_executors.pop(key) for key in keys if key in self.ready_executors}
        )

    def _disconnect_and_release(self, leaving: Mapping[int, GangExecutor]) -> None:
        if leaving:
            hosts = sorted(container.host for container in leaving.values())
            log.info("executors released: %s", ", ".join(hosts))
        self.server.disconnect(leaving)
        self._start_release(leaving)

    def exclude(self, exclusions: Exclusions) -> list[int]:
        """Exclude these nodes and GPUs from now on, and no others.

        A parked executor that is not excluded any more is released, so that the cluster manager
        grants another.

        Returns:
            The keys of agents that get no more ranks.

        Raises:
            HopsGpuError: too many executors are excluded to continue.
        """
        self.request = replace(self.request, exclusions=exclusions)
        parked = list(self._parked.items())
        readmitted = [
            key for key, container in parked if self.request.exclusion_reason(container) is None
        ]
        self._disconnect_and_release({key: self._parked.pop(key) for key in readmitted})
        self._report_parked()
        excluded = []
        for key, container in list(self.ready_executors.items()):
            if (reason := self.request.exclusion_reason(container)) is not None:
                excluded.append(key)
                self._park(self.ready_executors.pop(key), reason)
        return excluded

    def raise_if_impossible(self) -> None:
        """Raise the error that says why executors cannot arrive, if they cannot."""
        with self._lock:
            if self._problem is not None:
                raise self._problem

    def handle_event(self, event: Event) -> GangExecutor | None:
        """Handle an event of the control channel; return the executor that it makes ready, or None.

        Raises:
            ConfigError, DiscoveryError: the executor cannot serve, or has a GPU of another one.
            HopsGpuError: too many executors are excluded to continue.
        """
        if event.message is None:
            if event.peer in self.ready_executors or event.peer in self._parked:
                log.info("executor lost: agent %d: %s", event.peer, event.reason)
                self.ready_executors.pop(event.peer, None)
                self._parked.pop(event.peer, None)
                self._report_parked()
                self._abandon_job(self._jobs[event.peer])
            return None
        if event.message.kind != "hello":
            return None
        job = self._job_of(event.message)
        if job is None:
            self.server.disconnect([event.peer])
            return None
        container = register_container(event, event.message, self.request)
        self._jobs[event.peer] = job
        if (reason := self.request.exclusion_reason(container)) is not None:
            self._park(container, reason)
            return None
        refuse_duplicates([*self.ready_executors.values(), container])
        self.ready_executors[event.peer] = container
        log.info(
            "executor arrived: %s on %s (%d ready)",
            container.container_id,
            container.host,
            len(self.ready_executors),
        )
        self._record_arrival(container)
        return container

    def _park(self, container: GangExecutor, reason: str) -> None:
        self._parked[container.key] = container
        self._report_parked()
        log.info("executor parked: %s: %s", container.container_id, reason)
        self.request.watcher.warn(f"an executor got no rank: {reason}")
        if len(self._parked) > _MAX_PARKED:
            raise HopsGpuError(
                f"{count_of(len(self._parked), 'executor')} started that get no rank, the last"
                f" because {reason}"
            )

    def _report_parked(self) -> None:
        self.request.watcher.on_parked([container.host for container in self._parked.values()])

    def allocation_of(self, keys: Collection[int]) -> GangAllocation:
        job_by_key = {key: self._jobs[key] for key in keys}
        jobs = tuple(job_by_key.values())
        containers = tuple(self.ready_executors[key] for key in dict.fromkeys(keys))
        return GangAllocation(
            self.server,
            containers,
            jobs[0] if len(jobs) == 1 else _Jobs(jobs),
            self._explain_loss,
            keep_all,
            self._read_tokens,
            job_by_key,
        )

    def _record_problem(self, problem: HopsGpuError) -> None:
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
    """The jobs of several executors, as one `Job` that ends when any of them ends."""

    jobs: tuple[Job, ...]

    def __post_init__(self) -> None:
        self.ended: threading.Event = _AnyEvent(self.jobs)

    def reason(self, seconds: float) -> str:
        ended = [job for job in self.jobs if job.ended.is_set()]
        return (ended or list(self.jobs))[0].reason(seconds if not ended else 0.0)

    def loss(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while not (reason := next(filter(None, (job.loss(0.0) for job in self.jobs)), "")):
            # Poll: there is no notification for the reason of an end.
            if time.monotonic() >= deadline or self.ended.wait(_POLL_SECONDS):
                break
        return reason
