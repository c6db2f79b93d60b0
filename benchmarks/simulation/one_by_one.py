"""No queue: YARN grants executors one by one, and every job keeps what it has until it is whole.

Of the queues, the one that has the least is served first, and in a queue the application that came
first, as the CapacityScheduler does. Spark asks for 1, 2, 4, … executors, a second apart. A gang
that is not whole gives nothing back, so that gangs may wait for each other for ever.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from benchmarks.simulation.world import Held, Record, World
from hopsgpu.cluster_managers.resources import Amount

_RAMP_SECONDS = 1.0


@dataclass
class _Waiting:
    record: Record
    container: Amount
    executors: int
    asked: int = 0
    held: list[Held] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return self.asked - len(self.held)


class OneByOne:
    """The jobs that wait for executors of YARN.

    Args:
        world: the simulation.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._queues: dict[str, deque[_Waiting]] = defaultdict(deque)
        world.changed = self._serve

    def submit(self, record: Record, container: Amount, executors: int) -> None:
        """Have a job ask for its executors."""
        waiting = _Waiting(record, container, executors)
        self._queues[record.job.cluster].append(waiting)
        self._ramp(waiting, 1)

    def finish(self) -> None:
        """Count what jobs that never became whole have held until now."""
        for queue in self._queues.values():
            for waiting in queue:
                self._world.release(waiting.held, 0.0)
                waiting.record.lost["a part"] += sum(
                    self._world.clock.now - held.since for held in waiting.held
                )
            queue.clear()

    def _ramp(self, waiting: _Waiting, more: int) -> None:
        waiting.asked = min(waiting.asked + more, waiting.executors)
        if waiting.asked < waiting.executors:
            self._world.clock.after(_RAMP_SECONDS, lambda: self._ramp(waiting, 2 * more))
        self._serve()

    def _serve(self) -> None:
        """Grant containers as long as one fits."""
        cluster = self._world.cluster
        while cluster.free:
            for name in sorted(self._queues, key=lambda name: (cluster.held_by(name), name)):
                if self._grant_one(self._queues[name]):
                    break
            else:
                return

    def _grant_one(self, queue: deque[_Waiting]) -> bool:
        for waiting in queue:
            if waiting.pending <= 0:
                continue
            granted = self._world.grant(waiting.record, waiting.container, 1)
            if not granted:
                # All have containers of one GPU.
                return False
            waiting.held += granted
            if len(waiting.held) == waiting.executors:
                queue.remove(waiting)
                self._start(waiting)
            return True
        return False

    def _start(self, waiting: _Waiting) -> None:
        clock, record, costs = self._world.clock, waiting.record, self._world.costs
        record.granted = clock.now
        gpus = record.job.gpus
        record.lost["a part"] += sum(clock.now - held.since for held in waiting.held)
        record.lost["start"] += gpus * costs.start

        def end() -> None:
            record.ended = clock.now
            record.trained = gpus * record.job.seconds
            record.lost["release"] += gpus * costs.release
            record.lost["tail"] += gpus * costs.tail
            self._world.release(waiting.held, costs.tail + costs.release)

        clock.after(costs.start + record.job.seconds, end)
