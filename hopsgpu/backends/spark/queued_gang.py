"""A gang's place in the queue of gangs: it asks YARN when it has the turn and seems to fit."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Collection, Iterator

from hopsgpu.backends.gang_request import AcquisitionClock, Request, demand_of
from hopsgpu.backends.spark.application import Application
from hopsgpu.core.gang import AcquisitionProgress, Exclusions
from hopsgpu.core.queue_policy import (
    LOOK_SPREAD,
    TICKET_TTL_SECONDS,
    Bound,
    Probes,
    TurnDecision,
    coming,
    look_seconds,
    queue_tag,
)
from hopsgpu.errors import HopsGpuError, StoreError
from hopsgpu.yarn.gang_queue import QueuePlace, queued
from hopsgpu.yarn.gpu_holders import GpuFacts, waiting_facts
from hopsgpu.yarn.placement import preferred_hosts
from hopsgpu.yarn.shortage import Shortage, shortage
from hopsgpu.yarn.snapshot import Snapshot

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.4
_SNAPSHOT_SECONDS = 1.0


class QueuedGang:
    """One gang in the queue of gangs; use `queued_gang`, which leaves the queue on every path."""

    def __init__(
        self,
        application: Application,
        request: Request,
        clock: AcquisitionClock,
        place: QueuePlace | None,
    ) -> None:
        self._application = application
        self._request = request
        self._clock = clock
        self._place = place
        self._demand = demand_of(
            request.plan.shape, request.plan.executors, request.plan.spec.placement
        )
        self._probes = Probes(time.monotonic())
        # By the clock: when the gang looks next at YARN and at the queue of gangs.
        self._next_look = float("-inf")
        self._refused_since: float | None = None
        self._has_passed_on = False

    @contextlib.contextmanager
    def turn(self, arrived: int) -> Iterator[None]:
        """Wait for the gang's turn; hold it while inside, or until YARN has granted all executors.

        Args:
            arrived: number of the gang's executors that are already there.

        Raises:
            GangTimeout, Cancelled: as for `AcquisitionClock.check`.
        """
        began, self._has_passed_on = time.monotonic(), False
        self._next_look = began
        while not self._is_ours(arrived):
            # The time limit holds, however rarely the gang looks.
            until_look = max(self._next_look - time.monotonic(), 0.0)
            self._request.cancelled.wait(min(until_look, _LOOK_SECONDS))
        lock = self._application.acquiring
        try:
            while not lock.acquire(timeout=_LOOK_SECONDS):
                self.keep()
                self._clock.tell((), "another gang of this application is acquiring its executors")
                self._clock.check(AcquisitionProgress(connected=arrived))
            waited = time.monotonic() - began
            log.info("%s: took the turn after %.1f s", self._request.run_id, waited)
            try:
                yield
            finally:
                lock.release()
        finally:
            self._give_back()

    def keep(self) -> bool:
        """Renew the turn; return False if it was lost because others considered this gang dead."""
        is_ours = True

        def keep(place: QueuePlace) -> None:
            nonlocal is_ours
            is_ours = place.keep()

        self._on_the_lake(keep)
        return is_ours

    def granted(self) -> None:
        """Pass the turn on: YARN has granted all executors, and they only have to start."""
        if not self._has_passed_on:
            self._has_passed_on = True
            log.info("%s: YARN has granted all executors; passes the turn on", self._request.run_id)
        self._give_back()

    def facts(self, held: int) -> GpuFacts:
        """Return who holds what the gang waits for, what is short, and what is free.

        Args:
            held: number of the gang's executors that YARN has granted.
        """
        try:
            snapshot = self._snapshot(_SNAPSHOT_SECONDS)
            missing = shortage(self._demand, snapshot, held)
            facts = self._facts(snapshot, held, missing)
            return dataclasses.replace(facts, short=missing.text)
        except HopsGpuError as error:
            return GpuFacts("", str(error))

    def hosts(self, executors: int, taken: Collection[str] = ()) -> tuple[str, ...]:
        """Return the best host for each executor; if empty, YARN chooses.

        Args:
            executors: their number.
            taken: hosts that are to get none of them.
        """
        plan = self._request.plan
        yarn_chooses = plan.spec.placement is None and plan.hosts is None
        failing = self._application.failing.hosts(time.monotonic())
        if yarn_chooses and not failing:
            return ()
        # YARN's client refuses a request with both a node label and hosts, and that error ends
        # Spark's application master.
        if self._application.labelled:
            return ()
        try:
            snapshot = self._snapshot(_SNAPSHOT_SECONDS)
            snapshot = snapshot.without(Exclusions(hosts=frozenset(taken)))
        except HopsGpuError:  # only a preference; the next wait reports that YARN is silent
            return ()
        demand = dataclasses.replace(self._demand, executors=executors)
        if failing:
            log.info("%s: prefers nodes other than %s", self._request.run_id, sorted(failing))
            sound = snapshot.without(Exclusions(hosts=failing))
            if hosts := preferred_hosts(demand, sound):
                return hosts
        return () if yarn_chooses else preferred_hosts(demand, snapshot)

    def room(self, least: int, most: int) -> int:
        """Return how many of the requested executors seem to fit now.

        Args:
            least: number to request, whatever is free.
            most: largest number to request.
        """
        try:
            snapshot = self._snapshot(0.0)
        except HopsGpuError:  # the wait for the executors reports that YARN is silent
            return least

        def fits(count: int) -> bool:
            demand = dataclasses.replace(self._demand, executors=count)
            return shortage(demand, snapshot).bound is Bound.NONE

        return largest_fit(least, most, fits)

    def _snapshot(self, most_seconds: float) -> Snapshot:
        """Return the state of YARN on the nodes that the gang can use."""
        return self._application.snapshot(most_seconds).only(self._request.plan.hosts)

    def _is_ours(self, arrived: int) -> bool:
        """Return whether the gang should ask YARN now; if not, report why.

        Until the next look is due, it should not.
        """
        self._clock.check(AcquisitionProgress(connected=arrived))
        if time.monotonic() < self._next_look:
            return False
        self._look_after(_LOOK_SECONDS)
        try:
            snapshot = self._snapshot(_SNAPSHOT_SECONDS)
        except HopsGpuError as error:
            self._clock.tell((), str(error))
            return False
        missing = shortage(self._demand, snapshot, arrived)
        probe = self._probes.is_due(missing.bound, time.monotonic())
        turn = self._look(missing, snapshot, probe)
        self._probes.looked(time.monotonic(), is_behind=turn.is_behind)
        if turn.take and self._still(arrived, probe):
            if probe:
                log.info("%s: asks YARN although it does not seem to fit", self._request.run_id)
                self._probes.made(time.monotonic())
            return True
        facts = self._facts(snapshot, arrived, missing)
        # A gang ahead in the queue is the first obstacle.
        seen = None if self._place is None else self._place.seen
        given = "" if seen is None else coming(seen)
        why = [turn.why, facts.around(missing.text), given]
        self._clock.tell((), "; ".join(part for part in why if part))
        return False

    def _look_after(self, seconds: float) -> None:
        """Look next after about so many seconds; gangs that look at the same time spread."""
        spread = random.uniform(1.0 - LOOK_SPREAD, 1.0 + LOOK_SPREAD)  # noqa: S311
        self._next_look = time.monotonic() + seconds * spread

    def _facts(self, snapshot: Snapshot, held: int, missing: Shortage) -> GpuFacts:
        return waiting_facts(snapshot, self._demand, held, missing.queue, by_gpus=missing.by_gpus)

    def _look(self, missing: Shortage, snapshot: Snapshot, probe: bool) -> TurnDecision:
        """Return whether the turn was taken: in the queue on the lake, or without a queue."""
        alone = TurnDecision(missing.bound is Bound.NONE or probe)
        if self._place is None:
            return alone
        try:
            turn = self._look_at_line(self._place, missing, snapshot, probe)
        except StoreError as error:
            return self._refused(error, alone)
        self._refused_since = None
        return turn

    def _look_at_line(
        self, place: QueuePlace, missing: Shortage, snapshot: Snapshot, probe: bool
    ) -> TurnDecision:
        queues = tuple(queue_tag(queue.path) for queue in snapshot.queues)
        queue = queue_tag(missing.queue) if missing.queue else queues[0]
        if not place.is_filed:
            log.info("%s: joins the queue of gangs", self._request.run_id)
        gpus = [node.total.gpus for node in snapshot.running]
        turn = place.ask(missing.bound, queue, queues, gpus, probe)
        seconds = look_seconds(place.rank)
        log.debug("%s: rank %d, looks after %.1f s", self._request.run_id, place.rank, seconds)
        self._look_after(seconds)
        return turn

    def _still(self, arrived: int, probe: bool) -> bool:
        """Return whether the gang, which has the turn, still fits; if not, give the turn back.

        The gang that had the turn before may have taken the rest. A probe is not checked again.
        """
        if probe:
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
        self._on_the_lake(lambda place: place.give_back())

    def _on_the_lake(self, action: Callable[[QueuePlace], None]) -> None:
        if self._place is None:
            return
        try:
            action(self._place)
        except StoreError as error:
            self._refused(error, TurnDecision(False))
        else:
            self._refused_since = None

    def _refused(self, error: StoreError, alone: TurnDecision) -> TurnDecision:
        """Return what to do when the lake fails: wait for a while, then `alone`, without the queue.

        After `TICKET_TTL_SECONDS` of failures the gang stays without the queue.
        """
        self._refused_since = self._refused_since or time.monotonic()
        if time.monotonic() - self._refused_since < TICKET_TTL_SECONDS:
            return TurnDecision(False, f"the queue of gangs cannot be read ({error})")
        self._place = None
        log.info("%s: continues without the queue of gangs: %s", self._request.run_id, error.kind)
        self._request.watcher.warn(_without_queue(error))
        return alone


@contextlib.contextmanager
def queued_gang(
    application: Application, request: Request, clock: AcquisitionClock, *, grows: bool = False
) -> Iterator[QueuedGang]:
    """Provide a gang's place in the queue of gangs; leave the queue on every path.

    Args:
        application: application in which the gang runs.
        request: the request.
        clock: time limit of the acquisition.
        grows: whether the request is for more executors of a running search or gang, which queues
            behind all gangs.
    """
    with contextlib.ExitStack() as stack:
        place = None
        try:
            place = QueuePlace(
                application.line,
                application=application.id,
                executors=request.plan.executors,
                gpus=request.plan.shape.gpus,
                grows=grows,
            )
            stack.enter_context(queued(place))
        except StoreError as error:
            request.watcher.warn(_without_queue(error))
        yield QueuedGang(application, request, clock, place)


def _without_queue(error: StoreError) -> str:
    return (
        f"the gang did not join the queue of gangs ({error}), so gangs of several"
        " applications may have taken GPUs from each other; an administrator can name another"
        " directory for the queue with spark.hopsgpu.locks"
    )


def largest_fit(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number in [least, most] that fits; `least` if none does.

    If a number fits, every smaller number must fit too.
    """
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
