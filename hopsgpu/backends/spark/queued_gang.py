"""A gang in the queue of gangs: it requests executors when it has the turn and seems to fit."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Collection, Iterator

from hopsgpu.backends.gang_queue import QueueMember, queued
from hopsgpu.backends.gang_request import AcquisitionClock, Request, demand_of
from hopsgpu.backends.spark.application import Application
from hopsgpu.backends.spark.executor_admission import ExecutorAdmission
from hopsgpu.cluster_managers.placement import preferred_hosts
from hopsgpu.cluster_managers.request_without_room import why_request_without_room
from hopsgpu.cluster_managers.shortage import Shortage, shortage
from hopsgpu.cluster_managers.snapshot import Snapshot
from hopsgpu.cluster_managers.wait_message import shortage_reason
from hopsgpu.core import wait_reasons
from hopsgpu.core.gang import AcquisitionProgress, Exclusions
from hopsgpu.core.queue_policy import (
    POLL_JITTER,
    TICKET_TTL_SECONDS,
    Bound,
    GangsAhead,
    Probes,
    TurnDecision,
    TurnHolder,
    describe_excess,
    describe_promised,
    poll_seconds,
    queue_tag,
)
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason, name_application
from hopsgpu.errors import HopsGpuError, StoreError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.4
_SNAPSHOT_SECONDS = 1.0


class QueuedGang:
    """One gang in the queue of gangs; use `queued_gang`, which leaves the queue on every path.

    Args:
        admission: what the gang needs from another queue, before it joins this one.
        member: the gang in the queue on the lake; None if the lake refuses the queue.
    """

    def __init__(
        self,
        application: Application,
        request: Request,
        clock: AcquisitionClock,
        admission: ExecutorAdmission,
        member: QueueMember | None,
    ) -> None:
        self._application = application
        self._request = request
        self._clock = clock
        self._admission = admission
        self._member = member
        self._demand = demand_of(
            request.plan.shape, request.plan.executors, request.plan.spec.placement
        )
        self._probes = Probes(time.monotonic())
        # The clock's reading at which the cluster manager and the queue of gangs are polled next.
        self._next_poll = float("-inf")
        self._failing_since: float | None = None
        # Why the executors were requested in the last turn although they did not fit; else "".
        self._why_requested = ""
        self._has_logged_grant = False

    @contextlib.contextmanager
    def hold_turn(self, arrived: int) -> Iterator[None]:
        """Wait for the gang's turn; hold it while inside, or until everything is granted."""
        self._wait_for_admission(arrived)
        began, self._has_logged_grant = time.monotonic(), False
        self._next_poll = began
        while not self._take_turn(arrived):
            # Wait in short steps: the time limit is checked more often than the queue is polled.
            until_poll = max(self._next_poll - time.monotonic(), 0.0)
            self._request.cancelled.wait(min(until_poll, _POLL_SECONDS))
        lock = self._application.acquiring
        try:
            while not lock.acquire(timeout=_POLL_SECONDS):
                self.renew()
                self._clock.report((), wait_reasons.other_run())
                self._clock.check(AcquisitionProgress(connected=arrived))
            waited = time.monotonic() - began
            log.info("%s: took the turn after %.1f s", self._request.run_id, waited)
            try:
                yield
            finally:
                lock.release()
        finally:
            self._give_back()

    def _wait_for_admission(self, arrived: int) -> None:
        """Wait until the other queue admits the gang.

        The gang has no ticket meanwhile: it would keep gangs from their turn which that queue has
        admitted, and for whose quota it may wait.
        """
        while why := self._admission.poll():
            self._clock.report((), why)
            self._clock.check(AcquisitionProgress(connected=arrived))
            self._request.cancelled.wait(_POLL_SECONDS)

    def renew(self) -> bool:
        """Renew the turn; return False without it, or if the admission was revoked."""
        has_turn = True

        def renew(member: QueueMember) -> None:
            nonlocal has_turn
            has_turn = member.renew_turn()

        self._with_member(renew)
        return has_turn and self._admission.is_valid

    def end(self) -> None:
        if not self._has_logged_grant:
            self._has_logged_grant = True
            log.info("%s: all executors are granted; passes the turn on", self._request.run_id)
        self._give_back()

    def shortage_reason(self, held: int) -> WaitReason:
        """Return why the rest cannot be granted, given the number of granted executors."""
        try:
            snapshot = self._snapshot(_SNAPSHOT_SECONDS)
        except HopsGpuError as error:
            return wait_reasons.silent_manager(str(error))
        missing = shortage(self._demand, snapshot, held)
        return shortage_reason(
            snapshot, self._demand, missing, held, time.time(), self._why_requested
        )

    def hosts(self, executors: int, excluded_hosts: Collection[str] = ()) -> tuple[str, ...]:
        """Return the best host for each executor; if empty, the cluster manager chooses.

        Args:
            excluded_hosts: hosts that must not get an executor.
        """
        plan = self._request.plan
        yarn_chooses = plan.spec.placement is None and plan.hosts is None
        failing = self._application.failing.hosts(time.monotonic())
        if yarn_chooses and not failing:
            return ()
        if not self._application.can_prefer_hosts:
            return ()
        try:
            snapshot = self._snapshot(_SNAPSHOT_SECONDS)
            snapshot = snapshot.excluding(Exclusions(hosts=frozenset(excluded_hosts)))
        except HopsGpuError:  # only a preference; the next wait reports the silence
            return ()
        demand = dataclasses.replace(self._demand, executors=executors)
        if failing:
            log.info("%s: prefers nodes other than %s", self._request.run_id, sorted(failing))
            sound = snapshot.excluding(Exclusions(hosts=failing))
            if hosts := preferred_hosts(demand, sound):
                return hosts
        return () if yarn_chooses else preferred_hosts(demand, snapshot)

    def count_fitting(self, least: int, most: int) -> int:
        """Return how many of `most` executors seem to fit now; at least `least`."""
        try:
            snapshot = self._snapshot(0.0)
        except HopsGpuError:  # the wait for the executors reports the silence
            return least

        def can_fit(count: int) -> bool:
            demand = dataclasses.replace(self._demand, executors=count)
            return shortage(demand, snapshot).bound is Bound.NONE

        return largest_fit(least, most, can_fit)

    def _snapshot(self, most_seconds: float) -> Snapshot:
        """Return the state of the cluster manager on the nodes that the gang can use."""
        return self._application.snapshot(most_seconds).limited_to(self._request.plan.hosts)

    def _take_turn(self, arrived: int) -> bool:
        """Return whether the gang should ask the cluster manager now; if not, report why.

        The result is False until the next poll is due.
        """
        self._clock.check(AcquisitionProgress(connected=arrived))
        if time.monotonic() < self._next_poll:
            return False
        self._poll_after(_POLL_SECONDS)
        try:
            snapshot = self._snapshot(_SNAPSHOT_SECONDS)
        except HopsGpuError as error:
            self._clock.report((), wait_reasons.silent_manager(str(error)))
            return False
        missing = shortage(self._demand, snapshot, arrived)
        why_probe = self._why_probe(missing, snapshot, arrived)
        is_probe = bool(why_probe)
        decision = self._poll(missing, snapshot, is_probe)
        self._probes.record_poll(time.monotonic(), is_behind=decision.is_behind)
        if decision.may_take and self._is_still_fitting(arrived, is_probe):
            self._why_requested = why_probe
            if is_probe:
                log.info("%s: requests executors without room: %s", self._request.run_id, why_probe)
                self._probes.record_probe(time.monotonic())
            return True
        # A gang ahead in the queue is the first obstacle.
        why = _queue_reason(decision, snapshot).before(
            shortage_reason(snapshot, self._demand, missing, arrived, time.time())
        )
        queue = None if self._member is None else self._member.last_snapshot
        if self._member is not None and queue is not None:
            excess = describe_excess(queue, self._member.ticket)
            why = why.with_details(describe_promised(queue), excess)
        self._clock.report((), why or wait_reasons.other_gangs_turn(""))
        return False

    def _why_probe(self, missing: Shortage, snapshot: Snapshot, arrived: int) -> str:
        """Return why the gang should request executors although it does not fit; else ""."""
        if missing.bound is Bound.NONE or not self._probes.is_due(time.monotonic()):
            return ""
        if self._application.should_request_without_room:
            return "spark.hopsgpu.request_without_room is set"
        return why_request_without_room(self._demand, snapshot, missing, arrived)

    def _poll_after(self, seconds: float) -> None:
        """Schedule the next poll, with jitter so that gangs do not poll at the same time."""
        jitter = random.uniform(1.0 - POLL_JITTER, 1.0 + POLL_JITTER)  # noqa: S311
        self._next_poll = time.monotonic() + seconds * jitter

    def _poll(self, missing: Shortage, snapshot: Snapshot, is_probe: bool) -> TurnDecision:
        """Take the turn if the gang may: in the queue on the lake, or without a queue."""
        alone = TurnDecision(missing.bound is Bound.NONE or is_probe)
        if self._member is None:
            return alone
        try:
            decision = self._poll_queue(self._member, missing, snapshot, is_probe)
        except StoreError as error:
            return self._handle_failure(error, alone)
        self._failing_since = None
        return decision

    def _poll_queue(
        self, member: QueueMember, missing: Shortage, snapshot: Snapshot, is_probe: bool
    ) -> TurnDecision:
        queues = tuple(queue_tag(queue.path) for queue in snapshot.queues)
        queue = queue_tag(missing.queue) if missing.queue else queues[0]
        if not member.has_ticket:
            log.info("%s: joins the queue of gangs", self._request.run_id)
        gpus = [node.total.gpus for node in snapshot.running]
        decision = member.request_turn(missing.bound, queue, queues, gpus, is_probe)
        seconds = poll_seconds(member.rank)
        log.debug("%s: rank %d, polls after %.1f s", self._request.run_id, member.rank, seconds)
        self._poll_after(seconds)
        return decision

    def _is_still_fitting(self, arrived: int, is_probe: bool) -> bool:
        """Return whether the gang, which has the turn, still fits; if not, give the turn back.

        The gang that had the turn before may have taken the rest. A probe is not checked again.
        """
        if is_probe:
            return True
        try:
            missing = shortage(self._demand, self._snapshot(0.0), arrived)
        except HopsGpuError as error:
            missing = Shortage(Bound.CLUSTER, str(error))
        if missing.bound is not Bound.NONE:
            log.info(
                "%s: no longer fits, and gives the turn back: %s",
                self._request.run_id,
                missing.text,
            )
            self._give_back()
        return missing.bound is Bound.NONE

    def _give_back(self) -> None:
        self._with_member(QueueMember.give_back_turn)

    def _with_member(self, action: Callable[[QueueMember], None]) -> None:
        if self._member is None:
            return
        try:
            action(self._member)
        except StoreError as error:
            self._handle_failure(error, TurnDecision(False))
        else:
            self._failing_since = None

    def _handle_failure(self, error: StoreError, alone: TurnDecision) -> TurnDecision:
        """Return the decision when the lake fails: wait first, then `alone`, without the queue.

        After `TICKET_TTL_SECONDS` of failures the gang continues without the queue.
        """
        self._failing_since = self._failing_since or time.monotonic()
        if time.monotonic() - self._failing_since < TICKET_TTL_SECONDS:
            return TurnDecision(False, problem=str(error))
        self._member = None
        log.info("%s: continues without the queue of gangs: %s", self._request.run_id, error.kind)
        self._request.watcher.warn(_without_queue(error))
        return alone


@contextlib.contextmanager
def queued_gang(
    application: Application,
    request: Request,
    clock: AcquisitionClock,
    admission: ExecutorAdmission,
    *,
    is_growth: bool = False,
) -> Iterator[QueuedGang]:
    """Provide a gang in the queue of gangs; leave the queue on every path.

    Args:
        is_growth: whether a running search or gang requests more executors; such a request is
            behind all gangs.
    """
    with contextlib.ExitStack() as stack:
        member = None
        try:
            member = QueueMember(
                application.gang_queue_dir,
                application=application.id,
                executors=request.plan.executors,
                gpus=request.plan.shape.gpus,
                is_growth=is_growth,
            )
            stack.enter_context(queued(member))
        except StoreError as error:
            request.watcher.warn(_without_queue(error))
        yield QueuedGang(application, request, clock, admission, member)


def _queue_reason(decision: TurnDecision, snapshot: Snapshot) -> WaitReason:
    """Return for which other gangs a gang waits, by the names of their applications."""
    names = {app.id: app.name for app in snapshot.applications}
    match decision.obstacle:
        case TurnHolder(application=application, user=user):
            name = names.get(application, "")
            return wait_reasons.other_gangs_turn(name_application(name, user, application))
        case GangsAhead(count=count, first=first, user=user):
            application = first.application
            who = name_application(names.get(application, ""), user, application)
            return wait_reasons.behind_gangs(count, who, first.executors, first.gpus)
    return wait_reasons.unreadable_queue(decision.problem) if decision.problem else NO_WAIT


def _without_queue(error: StoreError) -> str:
    return (
        f"the gang did not join the queue of gangs ({error}), so gangs of several"
        " applications may have taken GPUs from each other; an administrator can name another"
        " directory for the queue with spark.hopsgpu.locks"
    )


def largest_fit(least: int, most: int, can_fit: Callable[[int], bool]) -> int:
    """Return the largest number in [least, most] that fits; `least` if none does.

    If a number fits, every smaller number must fit too.
    """
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        if can_fit(middle):
            low = middle
        else:
            high = middle - 1
    return low
