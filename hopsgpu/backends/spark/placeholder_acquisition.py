"""Acquisition of executors by jobs of placeholders, which keep them until the gang is whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from py4j.protocol import Py4JError

from hopsgpu.backends.agent_registration import is_hello, register_container
from hopsgpu.backends.gang_request import AcquisitionClock, Request
from hopsgpu.backends.spark.barrier_job import GangJob
from hopsgpu.backends.spark.executors import Executors
from hopsgpu.backends.spark.settings import refuse_other_python
from hopsgpu.backends.spark.wait_reasons import EndedContainers
from hopsgpu.core.gang import AcquisitionProgress, GangExecutor, Verdict, shared_hosts
from hopsgpu.errors import HopsGpuError
from hopsgpu.yarn.gpu_holders import GpuFacts
from hopsgpu.yarn.resource_manager import PriorityContainers

log = logging.getLogger(__name__)

EVENT_SECONDS = 0.2
_ASK_SECONDS = 1.0
_ASKING = "Spark is asking YARN"


class GrantTurn(Protocol):
    """A gang's turn to ask YARN for executors."""

    def renew(self) -> bool:
        """Renew the turn; return False if another gang has taken it."""

    def end(self) -> None:
        """End the turn: YARN has granted everything, and other gangs may ask."""

    def facts(self, held: int) -> GpuFacts:
        """Return who holds the other GPUs, given the number of executors that YARN has granted."""


class PlaceholderAcquisition:
    """The wait until each executor of a gang has a connected placeholder.

    Args:
        request: the request.
        executors: the executors of its allocator.
        start: starts a job of so many placeholders.
        clock: time limit of the acquisition.
        turn: the turn in which the gang asks YARN.

    Attributes:
        jobs: all jobs of placeholders that were started.
        most: largest number of executors that YARN had granted at a time.
        parked: executors that get no rank, by the peer number of their placeholders, which keep
            them so that YARN does not grant them again.
    """

    def __init__(
        self,
        request: Request,
        executors: Executors,
        start: Callable[[int], GangJob],
        clock: AcquisitionClock,
        turn: GrantTurn,
    ) -> None:
        self._request = request
        self._executors = executors
        self._jvm = executors.application.jvm
        self._start = start
        # Every executor that is already there needs a placeholder: Spark could otherwise start an
        # agent on an executor that has not introduced itself.
        there = len(executors.registered())
        log.info(
            "%s: needs %d executors, of which %d have registered",
            request.run_id,
            request.plan.executors,
            there,
        )
        self.jobs = [start(max(request.plan.executors, there))]
        self.most = there
        self.parked: dict[int, GangExecutor] = {}
        self._clock = clock
        self._turn = turn
        self._holders: dict[int, GangExecutor] = {}
        self._arrivals: dict[int, float] = {}
        self._failing = executors.application.failing
        self._ended = EndedContainers(self._failing)
        self._grants = AcquisitionProgress(since=time.monotonic())
        self._asked = float("-inf")
        # Spark's IDs of the executors that no task needs, which were killed.
        self._killed: set[str] = set()
        # Returns why the gang waits: from YARN's last answer, and from the executors here now.
        self._why: Callable[[], str] = lambda: _ASKING

    def run(self) -> dict[int, GangExecutor] | None:
        """Return the containers by peer number, or None if the turn ends without the whole gang.

        The turn ends so if YARN granted only a part, or if others have taken the turn.

        Raises:
            GangTimeout, Cancelled: as for `AcquisitionClock.check`.
            ConfigError: an executor cannot reach the driver, or lacks what ranks need.
            DiscoveryError: an executor does not have the requested GPUs.
            HopsGpuError: the job of placeholders failed.
        """
        # Before YARN grants anything: the run no longer prepares.
        self._clock.report((), self._why())
        self._ask_at_once()
        while True:
            whole = len(self._holders) >= self._request.plan.executors
            self._grants = replace(
                self._grants,
                connected=len(self._holders),
                parked=len(self.parked),
                settled=not whole or self._settled(),
            )
            verdict = self._clock.check(self._grants)
            if verdict is Verdict.GIVE_BACK:
                log.info(
                    "%s: gives its part back: %d of %d granted, %d arrived, %d ended, %d aside",
                    self._request.run_id,
                    self._grants.granted,
                    self._request.plan.executors,
                    self._grants.connected,
                    self._grants.lost,
                    self._grants.parked,
                )
                if remark := self._ended.beside():
                    self._clock.failed_before(remark)
                return None
            if verdict is Verdict.GRANTED and not self._replace_surplus():
                return self._holders
            if whole and not self._grants.settled:
                self._end_surplus()
            if time.monotonic() - self._asked >= _ASK_SECONDS:
                self._asked = time.monotonic()
                if not self._turn.renew():
                    log.info("%s: another gang has taken the turn", self._request.run_id)
                    return None
                self._executors.refuse_hopeless(self.jobs)
                self._look()
            self._clock.report(hosts_of(self._holders), self._why())
            self._listen()

    def _listen(self) -> None:
        event = self._executors.server.next_event(EVENT_SECONDS)
        if event is None:
            for job in self.jobs:
                if job.ended.is_set():
                    refuse_other_python(str(job.error))
                    raise HopsGpuError(f"Spark's job of placeholders failed: {job.reason(0)}")
            return
        if event.message is None:
            left = self._holders.get(event.peer)
            if left is not None:
                log.info("executor lost before the gang was whole: %s", left.host)
            self._holders.pop(event.peer, None)
            self.parked.pop(event.peer, None)
            self._arrivals.pop(event.peer, None)
        elif any(is_hello(event.message, job.tag) for job in self.jobs):
            self._arrivals[event.peer] = time.time()
            self._welcome(register_container(event, event.message, self._request))
        self._request.watcher.on_executors_arrived(tuple(self._arrivals.values()))
        self._request.watcher.on_parked(hosts_of(self.parked))

    def _welcome(self, container: GangExecutor) -> None:
        reason = self._request.exclusion_reason(container)
        if reason is None:
            self._holders[container.key] = container
            self._failing.arrived(container.host)
            log.info(
                "executor arrived: %s on %s (%d of %d)",
                container.container_id,
                container.host,
                len(self._holders),
                self._request.plan.executors,
            )
            return
        log.info("executor held aside: %s: %s", container.container_id, reason)
        self._clock.note_parked(reason)
        self.parked[container.key] = container
        # Besides the parked ones, as many placeholders must be left as the gang wants.
        if len(self.parked) > self._tasks() - self._request.plan.executors:
            self.jobs.append(self._start(1))
            self._ask_at_once()

    def _ask_at_once(self) -> None:
        self._executors.ask_at_once(self._tasks(), self._request.cancelled)

    def _tasks(self) -> int:
        return sum(job.tasks for job in self.jobs)

    def _settled(self) -> bool:
        """Return whether agents can start only on executors that have a placeholder.

        For that, no other executor may be there, and no other task may wait for an executor.
        """
        here = len(self._holders) + len(self.parked)
        if self.parked and here < self._tasks():
            # A parked executor has ended. Its task waits for another executor, and would take an
            # agent's place; its job must continue for the other parked executors.
            return False
        return here >= len(self._executors.registered())

    def _end_surplus(self) -> None:
        """Kill the executors that no task needs.

        When Spark changes its request while YARN answers it, as after the loss of an executor, YARN
        grants both, and Spark may start them all. The gang would wait for the others, with their
        GPUs, until Spark's idle timeout ends them.
        """
        tasks = self._tasks()
        # As long as a task waits, or Spark wants more, another executor would follow.
        if len(self._holders) + len(self.parked) < tasks or self._executors.target() > tasks:
            return
        busy = self._executors.busy()
        surplus = {*self._executors.registered()} - {*busy} - self._killed
        if len(busy) < tasks or not surplus:
            return
        self._killed |= surplus
        log.info(
            "%s: kills %d executors that no task needs: YARN has granted more than Spark wants",
            self._request.run_id,
            len(surplus),
        )
        try:
            self._executors.kill(surplus)
        except Py4JError as error:
            log.warning("they stay until Spark's idle timeout: %s", error)

    def _look(self) -> None:
        """Record what the ResourceManager says about this gang, or why it does not answer."""
        try:
            held = self._executors.held()
        except HopsGpuError as error:
            problem = str(error)
            self._why = lambda: problem
            return
        self._ended.look(held.hosts, self._tasks())
        granted = len(held.containers) - len(self.parked)
        grown = granted > self._grants.granted
        if granted != self._grants.granted:
            log.debug("YARN has granted %d of %d", granted, self._request.plan.executors)
        self.most = max(self.most, granted)
        since = time.monotonic() if grown else self._grants.since
        self._grants = replace(self._grants, granted=granted, since=since, lost=self._ended.count)
        if granted >= self._request.plan.executors:
            self._turn.end()
            # It no longer matters who holds other GPUs.
            self._why = lambda: self._missing(held)
        else:
            facts = self._turn.facts(len(held.containers))
            self._why = lambda: facts.around(self._missing(held))

    def _missing(self, held: PriorityContainers) -> str:
        """Return where the executors that have not arrived are, in words."""
        connected = len(self._holders)
        parts = []
        granted = len(held.containers) - len(self.parked)
        # YARN counts a granted request as pending until Spark's next heartbeat.
        if (pending := min(held.pending, self._request.plan.executors - granted)) > 0:
            parts.append(f"YARN has not granted {pending}")
        if (starting := granted - connected) > 0:
            parts.append(f"{starting} granted and starting")
        if self.parked:
            why = {self._request.exclusion_reason(c) for c in self.parked.values()}
            parts.append(f"{len(self.parked)} held aside ({', '.join(sorted(filter(None, why)))})")
        return self._ended.beside(*parts) or _ASKING

    def _replace_surplus(self) -> bool:
        """Kill executors of a spread gang that share a node; return whether there were any."""
        if self._request.plan.spec.placement != "spread":
            return False
        shared = shared_hosts(self._holders.values())
        for host in shared:
            # Spark's target stays the same, so it requests others, on the nodes that tasks prefer.
            self._executors.kill(self._jvm.executors_on(self._executors.profile.id, host)[1:])
        if shared:
            log.info("replaces executors that share a node: %s", ", ".join(shared))
            self._grants = replace(self._grants, since=time.monotonic())
            self._why = lambda: f"executors that share a node ({', '.join(shared)}) are replaced"
        return bool(shared)


def hosts_of(containers: Mapping[int, GangExecutor]) -> list[str]:
    """Return the host of each container."""
    return [container.host for container in containers.values()]
