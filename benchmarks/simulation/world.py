"""What all policies share: a clock, the cluster, what things cost, and a record of each job."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.simulation.cluster import Cluster, Placed
from benchmarks.simulation.trace import Job
from hopsgpu.cluster_managers.resources import Amount


@dataclass(frozen=True)
class Costs:
    """Seconds that things take, as measured on the development cluster.

    A start and a release are those of one executor, as on a node of its own: executors that start
    at once on one machine share its cores.

    Attributes:
        start: from the turn to ask YARN until the function runs, on cold executors. YARN's answer
            is part of it, so GPUs are held a little shorter than is counted.
        turn: from the turn to ask YARN until it is passed on, because YARN has granted everything.
        release: from the return until YARN's count of GPUs is down.
        look: until a gang that waits sees a change; it looks every 0.4 s.
        shrink: from the order to stop an elastic world until a smaller one trains.
        growth: until a larger one trains.
        checkpoint: from the request for a checkpoint until it counts; training goes on meanwhile,
            and is repeated.
        warm: from the start of the first world on warm executors until it trains.
        tail: how long executors are held after the return, beside the release: Spark's idle
            timeout, or the rest of a session.
    """

    start: float = 4.0
    turn: float = 0.3
    release: float = 0.35
    look: float = 0.2
    shrink: float = 2.0
    growth: float = 4.5
    checkpoint: float = 2.0
    warm: float = 0.1
    tail: float = 0.0


class Clock:
    """The simulated time, and what is to happen when.

    Attributes:
        now: seconds since the first job was submitted.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._number = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Have something happen at a time, and if that is over, now."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._number), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something happen later."""
        self.at(self.now + seconds, action)

    def run(self, after_each: Callable[[], None] | None = None) -> None:
        """Let everything happen, in the order of the times.

        Args:
            after_each: is called after each event.
        """
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            if after_each is not None:
                after_each()


@dataclass
class Record:
    """What became of a job; times are seconds since the first job was submitted.

    Attributes:
        job: the job.
        granted: when YARN had granted what it needs to start.
        ended: when its training returned.
        size_free: how long a job of 1 GPU would have waited that was submitted to the same queue at
            the same time, or None if that was not found out.
        unhindered: how long it would have waited if nothing had been granted after it had come; no
            order of the gangs from then on gives less. None if that was not found out.
        held: GPU seconds held, by YARN's count.
        trained: GPU seconds of training, without what was repeated.
        in_window: GPU seconds held within the window of interest.
        lost: GPU seconds held without training, by reason.
    """

    job: Job
    granted: float | None = None
    ended: float | None = None
    size_free: float | None = None
    unhindered: float | None = None
    held: float = 0.0
    trained: float = 0.0
    in_window: float = 0.0
    lost: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def waited(self) -> float | None:
        """Return the seconds from the submission to the grant; None if there was none."""
        return None if self.granted is None else self.granted - self.job.submitted


@dataclass
class Held:
    """A container that a job holds.

    Attributes:
        record: of the job.
        placed: the container.
        since: when YARN granted it.
        until: when it will be free at the earliest: a part of a gang may be given back at once.
    """

    record: Record
    placed: Placed
    since: float
    until: float = 0.0


def unhindered_wait(
    free: Mapping[str, int], held: Iterable[Held], gpus: int, executors: int, now: float
) -> float:
    """Return in how many seconds so many containers have room if no others come.

    Args:
        free: free GPUs of each node, by host.
        held: the containers that hold others.
        gpus: GPUs of each container.
        executors: number of containers.
        now: the time.
    """
    room, at = dict(free), now
    slots = sum(number // gpus for number in room.values())
    for one in sorted(held, key=lambda one: one.until):
        if slots >= executors:
            break
        at, host = max(at, one.until), one.placed.host
        slots -= room[host] // gpus
        room[host] += one.placed.gpus
        slots += room[host] // gpus
    return at - now if slots >= executors else float("inf")


class World:
    """The state of a simulation.

    Args:
        cluster: the cluster.
        costs: what things cost.
        seed: of the chance in back-off times.
        window: begin and end of the time in which the use of GPUs is counted separately.

    Attributes:
        clock: the time.
        cluster: as given.
        costs: as given.
        chance: random numbers.
        changed: is called when GPUs have become free.
        held: the containers that jobs hold, by their ids.
    """

    def __init__(
        self,
        cluster: Cluster,
        costs: Costs,
        seed: int = 0,
        window: tuple[float, float] = (0.0, float("inf")),
    ) -> None:
        self.clock = Clock()
        self.cluster = cluster
        self.costs = costs
        self.chance = random.Random(seed)
        self.changed: Callable[[], None] = lambda: None
        self.held: dict[int, Held] = {}
        self._window = window

    def grant(self, record: Record, container: Amount, executors: int) -> list[Held]:
        """Have YARN grant so many containers, or as many as find room."""
        placed = self.cluster.place(container, executors, record.job.cluster)
        granted = [Held(record, one, self.clock.now) for one in placed]
        self.held.update((id(one), one) for one in granted)
        return granted

    def release(self, held: list[Held], seconds: float) -> None:
        """Free containers after some seconds."""
        if held:
            self.clock.after(seconds, lambda: self._free(held))

    def _free(self, held: list[Held]) -> None:
        now, (begin, end) = self.clock.now, self._window
        for one in held:
            del self.held[id(one)]
            self.cluster.remove(one.placed)
            gpus = one.placed.gpus
            one.record.held += gpus * (now - one.since)
            one.record.in_window += gpus * max(min(now, end) - max(one.since, begin), 0.0)
        self.changed()
