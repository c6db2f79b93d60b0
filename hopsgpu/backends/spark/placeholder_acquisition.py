"""Acquisition of executors by placeholder jobs, which keep executors until the gang is whole."""

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
from hopsgpu.backends.spark.pending_executors import EndedContainers
from hopsgpu.backends.spark.settings import refuse_other_python
from hopsgpu.core import wait_reasons
from hopsgpu.core.gang import AcquisitionProgress, GangExecutor, Verdict, shared_hosts
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason
from hopsgpu.errors import HopsGpuError

log = logging.getLogger(__name__)

EVENT_SECONDS = 0.2
_POLL_SECONDS = 1.0


class GrantTurn(Protocol):
    """A gang's turn to ask the cluster manager for executors."""

    def renew(self) -> bool:
        """Renew the turn; return False if another gang has taken it."""

    def end(self) -> None:
        """End the turn: the cluster manager has granted everything, and other gangs may ask."""

    def shortage_reason(self, held: int) -> WaitReason:
        """Return why the rest is not granted, given the number of granted executors."""


class PlaceholderAcquisition:
    """The wait until each executor of a gang has a connected placeholder.

    Args:
        start: starts a job of so many placeholders.

    Attributes:
        jobs: all jobs of placeholders that were started.
        max_granted: largest number of executors that the cluster manager had granted at a time.
        parked: executors that get no rank, by their peer number. They are kept so that the cluster
            manager does not grant them again.
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
        # Each registered executor needs a placeholder. Otherwise Spark could start an agent on an
        # executor that has not introduced itself.
        registered = len(executors.registered_ids())
        log.info(
            "%s: needs %d executors, of which %d have registered",
            request.run_id,
            request.plan.executors,
            registered,
        )
        self.jobs = [start(max(request.plan.executors, registered))]
        self.max_granted = registered
        self.parked: dict[int, GangExecutor] = {}
        self._clock = clock
        self._turn = turn
        self._placeholders: dict[int, GangExecutor] = {}
        self._arrivals: dict[int, float] = {}
        self._failing = executors.application.failing
        self._ended = EndedContainers(self._failing)
        self._progress = AcquisitionProgress(since=time.monotonic())
        self._polled_at = float("-inf")
        # Spark's IDs of the killed surplus executors.
        self._killed: set[str] = set()
        # The reason why executors do not start, as the cluster manager reports it.
        self._problem = NO_WAIT
        # Returns why the gang waits, from the cluster manager's last answer and the present
        # executors.
        self._why: Callable[[], WaitReason] = lambda: wait_reasons.requesting(
            request.plan.executors
        )

    def run(self) -> dict[int, GangExecutor] | None:
        """Return the containers by peer number, or None if the turn ends without the whole gang.

        The turn ends without the gang if the cluster manager granted only a part, or another gang
        took the turn.
        """
        # Report the wait now, before the first grant, so that the state leaves PREPARING.
        self._clock.report((), self._why())
        self._request_now()
        while True:
            is_whole = len(self._placeholders) >= self._request.plan.executors
            self._progress = replace(
                self._progress,
                connected=len(self._placeholders),
                parked=len(self.parked),
                is_settled=not is_whole or self._is_settled(),
            )
            verdict = self._clock.check(self._progress)
            if verdict is Verdict.GIVE_BACK:
                log.info(
                    "%s: releases its executors: %d of %d granted, %d arrived, %d ended, %d parked",
                    self._request.run_id,
                    self._progress.granted,
                    self._request.plan.executors,
                    self._progress.connected,
                    self._progress.lost,
                    self._progress.parked,
                )
                if note := self._ended.with_exits():
                    self._clock.failed_before(str(note))
                return None
            if verdict is Verdict.GRANTED and not self._replace_sharing_executors():
                return self._placeholders
            if is_whole and not self._progress.is_settled:
                self._kill_surplus()
            if time.monotonic() - self._polled_at >= _POLL_SECONDS:
                self._polled_at = time.monotonic()
                if not self._turn.renew():
                    log.info("%s: another gang has taken the turn", self._request.run_id)
                    return None
                self._executors.refuse_hopeless(self.jobs)
                self._poll_manager()
            self._clock.report(hosts_of(self._placeholders), self._why())
            self._handle_next_event()

    def _handle_next_event(self) -> None:
        event = self._executors.server.next_event(EVENT_SECONDS)
        if event is None:
            for job in self.jobs:
                if job.ended.is_set():
                    refuse_other_python(str(job.error))
                    raise HopsGpuError(f"Spark's job of placeholders failed: {job.reason(0)}")
            return
        if event.message is None:
            lost = self._placeholders.pop(event.peer, None)
            if lost is not None:
                log.info("executor lost before the gang was whole: %s", lost.host)
            self.parked.pop(event.peer, None)
            self._arrivals.pop(event.peer, None)
        elif any(is_hello(event.message, job.tag) for job in self.jobs):
            self._arrivals[event.peer] = time.time()
            self._add_executor(register_container(event, event.message, self._request))
        self._request.watcher.on_executors_arrived(tuple(self._arrivals.values()))
        self._request.watcher.on_parked(hosts_of(self.parked))

    def _add_executor(self, container: GangExecutor) -> None:
        reason = self._request.exclusion_reason(container)
        if reason is None:
            self._placeholders[container.key] = container
            self._failing.record_arrival(container.host)
            log.info(
                "executor arrived: %s on %s (%d of %d)",
                container.container_id,
                container.host,
                len(self._placeholders),
                self._request.plan.executors,
            )
            return
        log.info("executor parked: %s: %s", container.container_id, reason)
        self._clock.note_parked(reason)
        self.parked[container.key] = container
        # Besides the parked executors, the gang needs a placeholder for each of its executors.
        if len(self.parked) > self._task_count() - self._request.plan.executors:
            self.jobs.append(self._start(1))
            self._request_now()

    def _request_now(self) -> None:
        self._executors.request_now(self._task_count(), self._request.cancelled)

    def _task_count(self) -> int:
        return sum(job.tasks for job in self.jobs)

    def _is_settled(self) -> bool:
        """Return whether agents can start only on executors that have a placeholder.

        No other executor may be registered, and no other task may wait for an executor.
        """
        ready_count = len(self._placeholders) + len(self.parked)
        if self.parked and ready_count < self._task_count():
            # A parked executor has ended. Its task waits for another executor, and would take the
            # place of an agent. Its job must continue for the other parked executors.
            return False
        return ready_count >= len(self._executors.registered_ids())

    def _kill_surplus(self) -> None:
        """Kill the executors that no task needs.

        If Spark changes its request while the cluster manager answers it, the cluster manager
        grants both, and Spark may start all of them. The gang would wait for the surplus until
        Spark's idle timeout ends it.
        """
        tasks = self._task_count()
        # While a task waits, or Spark wants more, another executor would replace a killed one.
        if len(self._placeholders) + len(self.parked) < tasks or self._executors.target() > tasks:
            return
        busy = self._executors.busy_ids()
        surplus = {*self._executors.registered_ids()} - {*busy} - self._killed
        if len(busy) < tasks or not surplus:
            return
        self._killed |= surplus
        log.info(
            "%s: kills %d executors that no task needs: more are granted than Spark wants",
            self._request.run_id,
            len(surplus),
        )
        try:
            self._executors.kill(surplus)
        except Py4JError as error:
            log.warning("surplus executors stay until Spark's idle timeout: %s", error)

    def _poll_manager(self) -> None:
        """Record the cluster manager's view of this gang, or why it does not answer."""
        try:
            held = self._executors.held_containers()
        except HopsGpuError as error:
            silent = wait_reasons.silent_manager(str(error))
            self._why = lambda: silent
            return
        wanted = min(self._task_count(), self._executors.target())
        self._ended.update(held.containers, wanted)
        is_whole = len(self._placeholders) >= self._request.plan.executors
        self._problem = NO_WAIT if is_whole else self._executors.start_problem()
        granted = len(held.containers) - len(self.parked)
        if granted != self._progress.granted:
            log.debug("%d of %d are granted", granted, self._request.plan.executors)
        self.max_granted = max(self.max_granted, granted)
        since = self._progress.since
        if granted > self._progress.granted:
            since = time.monotonic()
        self._progress = replace(
            self._progress, granted=granted, since=since, lost=self._ended.count
        )
        if granted >= self._request.plan.executors:
            self._turn.end()
            # The holders of other GPUs no longer matter.
            self._why = lambda: self._describe_missing(held.containers, NO_WAIT)
        else:
            short = self._turn.shortage_reason(len(held.containers))
            self._why = lambda: self._describe_missing(held.containers, short)

    def _describe_missing(self, held: Mapping[str, str], short: WaitReason) -> WaitReason:
        """Return why the gang is not whole.

        Args:
            held: host of each container that the cluster manager has granted, by ID.
            short: why the cluster manager does not grant the rest; `NO_WAIT` if all seems free.
        """
        wanted, granted = self._request.plan.executors, len(held) - len(self.parked)
        arrived = {c.container_id for c in (*self._placeholders.values(), *self.parked.values())}
        hosts = [held[container] for container in sorted(held) if container not in arrived]
        # Spark releases what the cluster manager grants in excess, which are the last containers.
        starting = wait_reasons.starting_executors(
            hosts[: max(wanted - len(self._placeholders), 0)],
            hosts_of(self._placeholders),
            self._request.plan.spec.image,
        )
        if granted < wanted:
            reason = wait_reasons.granted_part(granted, wanted, short).before(starting)
        else:
            reason = starting or wait_reasons.ending_surplus()
        if self.parked:
            why = filter(None, map(self._request.exclusion_reason, self.parked.values()))
            parked = wait_reasons.parked_executors([*why], len(self.parked))
            reason = parked.before(reason)
        return self._ended.with_exits(self._problem.before(reason))

    def _replace_sharing_executors(self) -> bool:
        """Kill executors of a spread gang that share a node; return whether any did."""
        if self._request.plan.spec.placement != "spread":
            return False
        shared = shared_hosts(self._placeholders.values())
        for host in shared:
            # Spark's target stays the same, so Spark requests other executors, on the nodes that
            # tasks prefer.
            self._executors.kill(self._jvm.executors_on(self._executors.profile.id, host)[1:])
        if shared:
            log.info("replaces executors that share a node: %s", ", ".join(shared))
            self._progress = replace(self._progress, since=time.monotonic())
            replacing = wait_reasons.replacing_executors(shared)
            self._why = lambda: replacing
        return bool(shared)


def hosts_of(containers: Mapping[int, GangExecutor]) -> list[str]:
    return [container.host for container in containers.values()]
