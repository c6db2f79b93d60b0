"""Many gangs in the queue of gangs, on a simulated clock, and what they cost the NameNode.

Each gang has a `QueueMember`, as in a driver, and looks when `poll_seconds` says. The NameNode is
simulated, and the cluster is a number of free GPUs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.simulation.name_node import NameNode
from benchmarks.simulation.world import Clock
from hopsgpu.backends.gang_queue import QueueMember
from hopsgpu.core.queue_policy import POLL_JITTER, Bound, poll_seconds, queue_tag

# A time since the epoch, at which the simulation begins.
_EPOCH = 1_800_000_000.0
_NODE_GPUS = 10
_NODES = 1000
# While it has the turn, a gang asks YARN until all is granted.
_TURN_SECONDS = 1.0
_ROOT = queue_tag("root")


@dataclass(frozen=True)
class WaitingGangs:
    """What gangs wait, and how they are served.

    Attributes:
        gangs: number of gangs in the queue; whoever is served is replaced by a new one.
        executors: numbers of executors, each with one node's GPUs, that gangs need; by chance.
        limited: number of YARN queues at their limit; all of their gangs wait for that.
        share_limited: share of the gangs that are in one of these.
        served_seconds: from one gang's GPUs that become free to the next ones; each time as many
            become free as the first gang needs that does not wait for a limit.
        killed_seconds: from one gang whose driver is killed to the next; 0 for none.
    """

    gangs: int = 500
    executors: Sequence[int] = (1,)
    limited: int = 0
    share_limited: float = 0.0
    served_seconds: float = 5.0
    killed_seconds: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What was counted.

    Attributes:
        seconds: of the simulated time.
        operations: of the NameNode, by name.
        busiest: most operations in a second of the simulated time.
        looks: number of looks.
        delays: seconds from GPUs that become free until a gang has the turn.
    """

    seconds: float
    operations: Mapping[str, int]
    busiest: int
    looks: int
    delays: Sequence[float]

    @property
    def per_second(self) -> float:
        """Return the operations of a second."""
        return sum(self.operations.values()) / self.seconds


class _Gang:
    """A gang that waits."""

    def __init__(self, number: int, executors: int, queue: str, place: QueueMember) -> None:
        self.number = number
        self.executors = executors
        # "" in the queue that has no limit.
        self.queue = queue
        self.place = place
        self.is_alive = True

    @property
    def gpus(self) -> int:
        return self.executors * _NODE_GPUS


class _Simulation:
    def __init__(self, given: WaitingGangs, seed: int) -> None:
        self._given = given
        self._clock = Clock()
        # Decides nothing that is to be kept secret.
        self._random = random.Random(seed)  # noqa: S311
        self.node = NameNode(lambda: _EPOCH + self._clock.now)
        self._gangs: list[_Gang] = []
        self._number = 0
        self._free = 0
        self._freed: float | None = None
        self._asking: _Gang | None = None
        self.looks = 0
        self.delays: list[float] = []
        self.busiest = 0

    def run(self, warm_up: float, seconds: float) -> Cost:
        """Let the gangs arrive during the warm-up, and count what is done in the seconds after."""
        for _ in range(self._given.gangs):
            self._clock.at(self._random.uniform(0.0, warm_up), self._arrive)
        self._clock.at(warm_up, self._begin)
        self._clock.at(warm_up, lambda: self._each_second(0))
        over = warm_up + seconds
        self._clock.at(over, self._stop)
        with contextlib.suppress(StopIteration):
            self._clock.run()
        return Cost(seconds, self.node.operations, self.busiest, self.looks, self.delays)

    def _begin(self) -> None:
        self.node.operations.clear()
        self.looks = 0
        self.delays.clear()
        self._serve()
        if self._given.killed_seconds:
            self._kill()

    def _stop(self) -> None:
        raise StopIteration

    def _each_second(self, before: int) -> None:
        done = self.node.operations.total()
        self.busiest = max(self.busiest, done - before)
        self._clock.after(1.0, lambda: self._each_second(done))

    def _arrive(self) -> None:
        given, self._number = self._given, self._number + 1
        queue = ""
        if self._random.random() < given.share_limited:
            queue = f"root.limited{self._random.randrange(given.limited)}"
        executors = self._random.choice(given.executors)
        place = QueueMember(
            self.node.directory(f"user{self._number % 50}"),
            application=f"application_1_{self._number:04d}",
            executors=executors,
            gpus=_NODE_GPUS,
            clock=lambda: self._clock.now,
        )
        gang = _Gang(self._number, executors, queue, place)
        self._gangs.append(gang)
        self._look(gang)

    def _look(self, gang: _Gang) -> None:
        if not gang.is_alive:
            return
        self.looks += 1
        bound = Bound.NONE if gang.gpus <= self._free else Bound.CLUSTER
        queue = queue_tag(gang.queue or "root.open")
        if gang.queue:
            bound = Bound.QUEUE
        turn = gang.place.request_turn(bound, queue, (queue, _ROOT), [_NODE_GPUS] * _NODES, False)
        if turn.may_take:
            self._take(gang)
            return
        is_spread = self._random.uniform(1.0 - POLL_JITTER, 1.0 + POLL_JITTER)
        pause = poll_seconds(gang.place.rank) * is_spread
        self._clock.after(pause, lambda: self._look(gang))

    def _take(self, gang: _Gang) -> None:
        self._free -= gang.gpus
        if self._freed is not None:
            self.delays.append(self._clock.now - self._freed)
            self._freed = None
        self._clock.after(_TURN_SECONDS, lambda: self._leave(gang))

    def _leave(self, gang: _Gang) -> None:
        gang.place.leave()
        gang.is_alive = False
        self._gangs.remove(gang)
        self._arrive()

    def _serve(self) -> None:
        """Let as many GPUs become free as the first gang needs that waits for the cluster."""
        waiting = [g for g in self._gangs if g.is_alive and not g.queue and g.place.has_ticket]
        if waiting:
            first = min(waiting, key=lambda g: g.place.ticket.order)
            self._free = max(self._free, first.gpus)
            self._freed = self._clock.now
        self._clock.after(self._given.served_seconds, self._serve)

    def _kill(self) -> None:
        """Kill a driver by chance, whose ticket stays; another gang arrives."""
        gang = self._random.choice([g for g in self._gangs if g.place.has_ticket])
        gang.is_alive = False
        self._gangs.remove(gang)
        self._arrive()
        self._clock.after(self._given.killed_seconds, self._kill)


def cost_of(given: WaitingGangs, warm_up: float, seconds: float, seed: int = 1) -> Cost:
    """Return what waiting gangs cost the NameNode.

    Args:
        given: the gangs.
        warm_up: seconds in which the gangs arrive; nothing is counted then.
        seconds: how long to count.
        seed: of chance.
    """
    return _Simulation(given, seed).run(warm_up, seconds)
