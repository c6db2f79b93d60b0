"""hopsgpu's queue of gangs, driven by a simulated clock, and gangs of one size in it.

Whose turn it is, who may pass whom and what elastic gangs give are decided by `hopsgpu.core`; here
is only what would be done by files on the lake and by YARN. Nobody else requests GPUs, and YARN
does not preempt, so a gang asks only if it fits, and is granted all at once.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

from benchmarks.simulation.world import Held, Record, World, unhindered_wait
from hopsgpu.backends.spark.fit import containers_of
from hopsgpu.cluster_managers.demand import container_of
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.cluster_managers.snapshot import Snapshot
from hopsgpu.core.queue_policy import (
    RENEW_SECONDS,
    UNLIMITED_PASSES_PERIOD_SECONDS,
    Bound,
    Candidate,
    Offer,
    QueueSnapshot,
    Ticket,
    count_passes,
    decide_turn,
    first_ticket_to_serve,
    has_unlimited_passes,
    queue_tag,
    split_among_offers,
)
from hopsgpu.core.spec import GangSpec

_Standing = tuple[Ticket, str]


class Place:
    """A gang's place in the queue.

    Args:
        queue: name of the gang's queue, who is also its user.
        container: what each executor asks of YARN.
        executors: number of executors that it asks for together.
        is_growth: whether it is behind all gangs.
        take: is called when the gang has the turn.

    Attributes:
        ticket: its ticket.
        record: the job, if its size-free wait is to be found out.
    """

    def __init__(
        self,
        queue: str,
        container: Amount,
        executors: int,
        take: Callable[[], None],
        *,
        is_growth: bool = False,
        record: Record | None = None,
    ) -> None:
        self.queue = queue
        self.container = container
        self.take = take
        self.record = record
        self.before: QueueSnapshot | None = None
        self.queues = (queue_tag(f"root.{queue}"), queue_tag("root"))
        self.ticket = Ticket(
            filed=0,
            id="",
            is_growth=is_growth,
            executors=executors,
            gpus=container.gpus,
            queue=self.queues[0],
            bound=Bound.NONE,
            passed=0,
            application="simulated",
        )

    @property
    def kind(self) -> tuple[bool, int, int, str]:
        """Return what the queue's decisions tell gangs apart by, beside their order."""
        return self.ticket.is_growth, self.ticket.executors, self.ticket.gpus, self.queue

    @property
    def own(self) -> Candidate:
        """Return the gang as it looks at the queue."""
        return Candidate(self.ticket, self.queue, self.queues)


class _Looked(Sequence[_Standing]):
    """The tickets that stand in the queue; each gang has a look when its ticket's turn comes.

    So only tickets that a decision comes to are kept up to date. A ticket that is read by its index
    tells its place alone.
    """

    def __init__(self, places: Sequence[Place], look: Callable[[Place], None]) -> None:
        self._places = places
        self._look = look

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> _Standing: ...

    @overload
    def __getitem__(self, index: slice) -> _Looked: ...

    def __getitem__(self, index: int | slice) -> _Standing | _Looked:
        if isinstance(index, slice):
            return _Looked(self._places[index], self._look)
        place = self._places[index]
        return place.ticket, place.queue

    def __iter__(self) -> Iterator[_Standing]:
        for place in self._places:
            self._look(place)
            yield place.ticket, place.queue


class SimulatedQueue:
    """The queue of gangs of a cluster.

    Args:
        world: the simulation.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._cluster = world.cluster
        world.changed = self.changed
        self._numbers = itertools.count()
        self._places: list[Place] = []
        # What they stand by, for `count_passes`, which asks only who stands there.
        self._standing: list[_Standing] = []
        # The places of each kind, in order: the first of a kind speaks for the others.
        self._kinds: dict[tuple[bool, int, int, str], list[Place]] = defaultdict(list)
        self._generation = 0
        self._asking: Place | None = None
        self._snapshot: QueueSnapshot | None = None
        self._will_look = self._will_ask_back = self._awaits_unlimited_passes = False
        # Gangs of several GPUs whose size-free wait is not known yet, by queue.
        self._shadows: dict[str, list[Place]] = defaultdict(list)
        self._offers: dict[str, tuple[Offer, str, Callable[[int], None]]] = {}

    def join(self, place: Place) -> None:
        """Put a gang into the queue, or back at the place where it was."""
        if not place.ticket.id:
            filed, number = int(1000 * self._world.clock.now), next(self._numbers)
            place.ticket = dataclasses.replace(place.ticket, filed=filed, id=f"{number:08x}")
            if place.record is not None:
                # Without limits of queues all of them wait for the same.
                name = place.queue if self._cluster.has_queue_limits else ""
                insort(self._shadows[name], place, key=_order)
        place.before = None
        index = bisect_left(self._places, _order(place), key=_order)
        self._places.insert(index, place)
        self._standing.insert(index, (place.ticket, place.queue))
        insort(self._kinds[place.kind], place, key=_order)
        self._snapshot = None
        self.changed()

    def leave(self, place: Place) -> None:
        """Take a gang out of the queue."""
        for places in (self._places, self._kinds[place.kind]):
            index = bisect_left(places, _order(place), key=_order)
            if index < len(places) and places[index] is place:
                del places[index]
                if places is self._places:
                    del self._standing[index]
        self._snapshot = None
        self.changed()

    def give_back(self) -> None:
        """Give the turn back."""
        self._asking = None
        self._generation += 1
        self.changed()

    def changed(self) -> None:
        """Have gangs look at the queue, because it or the cluster has changed."""
        if not self._will_look and self._places:
            self._will_look = True
            self._world.clock.after(self._world.costs.look, self._poll_queue)
        if not self._will_ask_back and self._offers:
            self._will_ask_back = True
            self._world.clock.after(RENEW_SECONDS / 2, self._ask_back)

    def _await_unlimited_passes(self) -> None:
        """Have gangs look at the queue when they may pass any number of times next."""
        if not self._awaits_unlimited_passes:
            self._awaits_unlimited_passes = True
            period = UNLIMITED_PASSES_PERIOD_SECONDS
            self._world.clock.after(period - self._world.clock.now % period, self._begin_unlimited)

    def _begin_unlimited(self) -> None:
        self._awaits_unlimited_passes = False
        self.changed()

    def _poll_queue(self) -> None:
        self._will_look = False
        self._await_unlimited_passes()
        self._find_size_free_waits()
        if self._asking is not None:
            # No gang takes a turn that another one has.
            return
        for place in self._firsts():
            self._see_bound(place)
            if place.ticket.bound is not Bound.NONE:
                continue
            view = self._view()
            if decide_turn(place.own, view, self._cluster.node_gpus, is_probe=False).may_take:
                self.leave(place)
                place.ticket = dataclasses.replace(place.ticket, turns=place.ticket.turns + 1)
                self._generation, self._asking = view.next_generation, place
                place.take()
                return

    def _firsts(self) -> list[Place]:
        """Return the first place of each kind, in order.

        A later one of the same kind may not take the turn if the first may not: what blocks the
        first is ahead of both.
        """
        return sorted((places[0] for places in self._kinds.values() if places), key=_order)

    def _look(self, place: Place) -> None:
        """Have a gang see its bound and how often it was passed, as its own look does."""
        self._see_bound(place)
        before = place.before
        if before is None:
            place.before = self._present()
        elif before.generation != self._generation:
            place.before = self._present()
            place.ticket = count_passes(place.ticket, before, place.before)

    def _see_bound(self, place: Place) -> None:
        ticket = place.ticket
        bound = self._cluster.bound(place.container, ticket.executors, place.queue)
        if bound is not ticket.bound:
            place.ticket = dataclasses.replace(ticket, bound=bound)

    def _view(self) -> QueueSnapshot:
        return QueueSnapshot(
            _Looked(self._places, self._look),
            self._generation,
            None,
            has_unlimited_passes=has_unlimited_passes(self._world.clock.now),
        )

    def _present(self) -> QueueSnapshot:
        """Return who stands in the queue, whatever their bounds."""
        if self._snapshot is None or self._snapshot.generation != self._generation:
            self._snapshot = QueueSnapshot(tuple(self._standing), self._generation, None)
        return self._snapshot

    def _find_size_free_waits(self) -> None:
        """Grant jobs of 1 GPU in the mind: such a job stands where a gang does, and takes nothing.

        It does not wait for the turn of another gang, either.
        """
        for shadows in self._shadows.values():
            while shadows and self._cluster.free:
                place = shadows[0]
                record = place.record
                if record is None or record.granted is not None:
                    del shadows[0]
                    continue
                container = _one_gpu(place.container)
                if self._cluster.bound(container, 1, place.queue) is not Bound.NONE:
                    break
                one = dataclasses.replace(place.ticket, executors=1, gpus=1, bound=Bound.NONE)
                own = dataclasses.replace(place.own, ticket=one)
                if not decide_turn(own, self._view(), self._cluster.node_gpus, False).may_take:
                    break
                record.size_free = self._world.clock.now - record.job.submitted
                del shadows[0]

    def offer(self, offer: Offer, queue: str, asked: Callable[[int], None]) -> None:
        """Put up what an elastic gang has above its minimum; 0 executors withdraw it.

        Args:
            offer: the offer.
            queue: name of its queue.
            asked: is called with the number of executors that waiting gangs need of it.
        """
        before = self._offers.get(offer.id)
        if before is not None and before[0] == offer:
            return
        if offer.executors:
            self._offers[offer.id] = offer, queue, asked
        elif before is not None:
            del self._offers[offer.id]
        else:
            return
        self.changed()

    def _ask_back(self) -> None:
        self._will_ask_back = False
        view, free = self._view(), self._cluster.free
        offers = {offer.id: offer for offer, _, _ in self._offers.values()}
        given: dict[str, Mapping[str, int]] = {}
        helped: dict[str, Ticket | None] = {}
        for offer, queue, asked in list(self._offers.values()):
            if queue not in helped:
                chain = (queue_tag(f"root.{queue}"), queue_tag("root"))
                helped[queue] = first_ticket_to_serve(view, queue, chain)
            first = helped[queue]
            if first is None:
                asked(0)
                continue
            if first.id not in given:
                given[first.id] = split_among_offers(first, offers, free)
            asked(given[first.id].get(offer.id, 0))

    def took(self, place: Place) -> None:
        """Record that YARN granted everything to the gang that has the turn, which passes it on."""
        self._world.clock.after(self._world.costs.turn, lambda: self._passed_on(place))

    def _passed_on(self, place: Place) -> None:
        if self._asking is place:
            self.give_back()


def _order(place: Place) -> tuple[bool, int, str]:
    return place.ticket.order


def _one_gpu(container: Amount) -> Amount:
    gpus = container.gpus
    return Amount(1, container.cores // gpus, container.memory_mib // gpus)


def containers_for(
    snapshot: Snapshot, gpus: int, least: int | None = None, *, placement: str | None = "pack"
) -> tuple[Amount, int]:
    """Return the container of a gang of so many ranks of 1 GPU, and its ranks.

    Args:
        snapshot: the idle cluster.
        gpus: number of ranks.
        least: smallest number of ranks of an elastic gang, which divides the largest.
        placement: "pack", or None for containers of one rank.
    """
    spec = GangSpec("replay", workers=least or gpus, placement=placement)
    ranks, shape = containers_of(spec, snapshot)
    return container_of(shape), ranks


class FixedGang:
    """A job of one size, as `launch(workers=n, acquire_timeout=None)`.

    Args:
        world: the simulation.
        queue: the queue of gangs.
        record: the job.
        container: what each executor asks of YARN.
        executors: number of executors.
    """

    def __init__(
        self, world: World, queue: SimulatedQueue, record: Record, container: Amount, executors: int
    ) -> None:
        self._world = world
        self._queue = queue
        self._record = record
        self._container = container
        self._executors = executors
        self._held: list[Held] = []
        job = record.job
        self._place = Place(
            job.cluster, container, executors, self._take, record=record if job.gpus > 1 else None
        )

    def submit(self) -> None:
        """Join the queue."""
        record, world = self._record, self._world
        if record.unhindered is None and record.job.gpus > 1:
            record.unhindered = unhindered_wait(
                world.cluster.free_on,
                world.held.values(),
                self._container.gpus,
                self._executors,
                world.clock.now,
            )
        self._queue.join(self._place)

    def _take(self) -> None:
        self._held = self._world.grant(self._record, self._container, self._executors)
        if len(self._held) < self._executors:
            raise RuntimeError(f"{len(self._held)} of {self._executors} executors that fit granted")
        self._queue.took(self._place)
        self._start()

    def _start(self) -> None:
        record, world = self._record, self._world
        clock, costs = world.clock, world.costs
        record.granted = clock.now
        if record.size_free is None:
            record.size_free = record.waited
        gpus, seconds = record.job.gpus, record.job.seconds
        record.lost["start"] += gpus * costs.start
        for one in self._held:
            one.until = clock.now + costs.start + seconds + costs.release
        clock.after(costs.start + seconds, self._return)

    def _return(self) -> None:
        record, costs = self._record, self._world.costs
        gpus = record.job.gpus
        record.ended = self._world.clock.now
        record.trained = gpus * record.job.seconds
        record.lost["release"] += gpus * costs.release
        record.lost["tail"] += gpus * costs.tail
        self._world.release(self._held, costs.tail + costs.release)
        self._held = []
