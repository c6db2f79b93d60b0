"""What a gang asks of YARN, and how much of it fits into one bound. Pure."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from hopsgpu.core.spec import ExecutorShape
from hopsgpu.yarn.resources import Amount, dominates
from hopsgpu.yarn.snapshot import Snapshot


@dataclass(frozen=True)
class Demand:
    """The executors that a gang asks for.

    Attributes:
        container: what each executor asks of YARN.
        executors: number of executors.
        spread: whether each node may have at most one.
    """

    container: Amount
    executors: int
    spread: bool = False


def container_of(shape: ExecutorShape) -> Amount:
    """Return what an executor asks of YARN."""
    return Amount(shape.gpus, shape.cores, shape.heap_mib + shape.overhead_mib)


def places_on(free: Amount, container: Amount, spread: bool) -> int:
    """Return how many containers fit into what is free on a node."""
    room = free.room_for(container)
    return min(room, 1) if spread else room


def user_room(snapshot: Snapshot, used: Amount, container: Amount, wanted: int) -> int:
    """Return how many containers, at most `wanted`, a user who has `used` gets before the limit."""
    limit, cluster = snapshot.user.limit, snapshot.cluster
    if limit is None:
        return wanted
    # More containers only bring the user closer to the limit, so that a bisection finds it.
    return bisect.bisect_left(
        range(wanted), True, key=lambda count: dominates(used + container * count, limit, cluster)
    )
