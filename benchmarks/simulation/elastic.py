"""An elastic gang in the simulation: `ElasticPolicy` decides, and here is what its lease would do.

A world trains as many times as fast as it has GPUs, so that a smaller one needs equally many GPU
seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from benchmarks.simulation.gang_queue import Place, SimulatedQueue
from benchmarks.simulation.world import Held, Record, World
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.core.queue_policy import Offer, queue_tag
from hopsgpu.launcher.elastic_policy import (
    ElasticDecision,
    ElasticPolicy,
    ElasticTerms,
    WorldEnd,
)

# The gang's thread decides every 0.25 s. Where nothing but time can change what it decides, it is
# asked rarely here; else what changes it asks.
_SOON = 0.25
_ASSEMBLING, _WITH_SPARES, _SMALL = 1.0, 5.0, 20.0


class ElasticGang:
    """A job of several GPUs, as `launch(workers=(least, most), placement="pack")`.

    Args:
        world: the simulation.
        queue: the queue of gangs.
        record: the job.
        container: what each executor asks of YARN.
        terms: the smallest and the largest number of executors.
        number: tells gangs apart.
    """

    def __init__(
        self,
        world: World,
        queue: SimulatedQueue,
        record: Record,
        container: Amount,
        terms: ElasticTerms,
        number: int,
    ) -> None:
        self._world = world
        self._clock = world.clock
        self._queue = queue
        self._record = record
        self._container = container
        self._terms = terms
        self._id = f"{number:08x}"
        self._left = float(record.job.seconds * record.job.gpus)
        self._keys: Iterator[int] = itertools.count()
        self._starting: dict[int, Held] = {}
        self._here: dict[int, Held] = {}
        self._place: Place | None = None
        self._training_since: float | None = None
        # What was to happen to earlier worlds, or at earlier polls, does not count any more.
        self._world_number = self._poll_number = 0
        self._over = False
        # From which order to stop the next world follows, and how; None for the first one.
        self._resized: WorldEnd | None = None

    def submit(self) -> None:
        """Begin to ask for executors."""
        self._policy = ElasticPolicy(self._terms, self._clock.now)
        self._step()

    @property
    def _count(self) -> int:
        """Return how many executors are here or were granted."""
        return len(self._here) + len(self._starting)

    def _step(self) -> None:
        """Decide, and do it."""
        if self._over:
            return
        decision = self._policy.decide(self._clock.now, self._world.chance.random())
        if decision.release:
            released = [self._here.pop(key) for key in decision.release]
            self._world.release(released, self._world.costs.release)
        self._want(decision.wanted, decision.at_once)
        if decision.start:
            self._begin()
        if decision.needs_checkpoint:
            self._clock.after(self._world.costs.checkpoint, self._of_world(self._saved))
        if decision.stop_reason is not None:
            self._stop(decision.stop_reason)
        policy = self._policy
        offer = Offer(
            self._id,
            policy.surplus_count,
            self._container.gpus,
            policy.giving_count,
            queue_tag(f"root.{self._record.job.cluster}"),
            "simulated",
            "replay",
        )
        self._queue.offer(offer, self._record.job.cluster, self._reclaimed_count)
        self._poll(decision)

    def _poll(self, decision: ElasticDecision) -> None:
        policy = self._policy
        if decision.start or decision.stop_reason or decision.release:
            seconds = _SOON
        elif not policy.world:
            if not policy.executor_count and decision.wanted:
                return
            seconds = _ASSEMBLING
        elif policy.executor_count > len(policy.world):
            seconds = _WITH_SPARES
        elif policy.giving_count or decision.wanted < self._terms.max_executors:
            seconds = _SMALL
        else:
            return
        self._poll_number += 1
        number = self._poll_number

        def poll() -> None:
            if number == self._poll_number:
                self._step()

        self._clock.after(seconds, poll)

    def _reclaimed_count(self, executors: int) -> None:
        if executors != self._policy.reclaimed_count:
            self._policy.reclaimed_count = executors
            self._step()

    # What the lease does.

    def _want(self, wanted: int, at_once: int) -> None:
        """Ask for what is missing, as `ElasticJobAllocator.want` has the lease's thread do it."""
        missing = wanted - self._count
        if missing <= 0:
            self._leave()
            return
        if self._place is not None:
            return
        is_growth = len(self._here) >= self._terms.min_executors
        is_first = self._record.granted is None
        self._place = Place(
            self._record.job.cluster,
            self._container,
            max(min(at_once, missing), 1),
            self._take,
            is_growth=is_growth,
            record=self._record if is_first else None,
        )
        self._wanted = wanted
        self._queue.join(self._place)

    def _leave(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            self._queue.leave(place)

    def _take(self) -> None:
        """Take what YARN grants of the executors that are missing, as many as fit."""
        assert self._place is not None, "it had a place"
        least, queue = self._place.ticket.executors, self._record.job.cluster
        most = max(self._wanted - self._count, least)
        count = self._world.cluster.room(self._container, least, most, queue)
        granted = self._world.grant(self._record, self._container, count)
        if len(granted) < count:
            raise RuntimeError(f"{len(granted)} of {count} executors that fit granted")
        for held in granted:
            key = next(self._keys)
            self._starting[key] = held
            self._clock.after(self._world.costs.start, self._arrives(key))
        if self._record.granted is None and self._count >= self._terms.min_executors:
            self._record.granted = self._clock.now
            if self._record.size_free is None:
                self._record.size_free = self._record.waited
        self._queue.took(self._place)
        self._place = None

    def _arrives(self, key: int) -> Callable[[], None]:
        def arrive() -> None:
            held = self._starting.pop(key, None)
            if held is None:
                return
            self._here[key] = held
            self._policy.add_executor(key, held.placed.host, self._clock.now)
            self._policy.record_warm(key, self._clock.now)
            place = self._place
            is_able = len(self._here) >= self._terms.min_executors
            if place is not None and not place.ticket.is_growth and is_able:
                # Further executors are asked for behind all gangs.
                self._leave()
            self._step()

        return arrive

    # What the worlds do.

    def _of_world(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return an action that is done only while the present world lasts."""
        number = self._world_number

        def act() -> None:
            if number == self._world_number:
                action()

        return act

    def _begin(self) -> None:
        self._world_number += 1
        costs = self._world.costs
        seconds = {None: costs.warm, WorldEnd.GREW: costs.growth / 2}.get(
            self._resized, costs.shrink / 2
        )
        self._clock.after(seconds, self._of_world(self._enter))

    def _speed(self) -> int:
        return len(self._policy.world) * self._container.gpus

    def _enter(self) -> None:
        self._training_since = self._clock.now
        self._policy.record_entry(self._clock.now)
        self._clock.after(self._left / self._speed(), self._of_world(self._return))
        self._step()

    def _saved(self) -> None:
        self._policy.record_checkpoint(self._clock.now)
        self._step()

    def _trained(self, repeated: float) -> None:
        """Count what the world has trained, without the last seconds, which are repeated."""
        if self._training_since is None:
            return
        seconds = max(self._clock.now - self._training_since - repeated, 0.0)
        done = min(seconds * self._speed(), self._left)
        self._record.trained += done
        self._left -= done
        self._training_since = None

    def _stop(self, how: WorldEnd) -> None:
        costs = self._world.costs
        self._trained(costs.checkpoint)
        self._resized = how
        self._world_number += 1
        seconds = (costs.growth if how is WorldEnd.GREW else costs.shrink) / 2
        self._clock.after(seconds, self._of_world(lambda: self._ended(how)))

    def _ended(self, how: WorldEnd) -> None:
        self._policy.record_end(how, self._clock.now)
        self._step()

    def _return(self) -> None:
        self._trained(0.0)
        self._record.trained += self._left
        self._policy.record_return()
        self._policy.record_end(WorldEnd.RETURNED, self._clock.now)
        self._over = True
        self._record.ended = self._clock.now
        self._leave()
        held = [*self._here.values(), *self._starting.values()]
        self._here, self._starting = {}, {}
        gone = Offer(self._id, 0, self._container.gpus, 0, "", "simulated", "replay")
        self._queue.offer(gone, self._record.job.cluster, self._reclaimed_count)
        self._world.release(held, self._world.costs.release + self._world.costs.tail)
