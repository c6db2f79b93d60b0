"""The executors that a gang requests, and how many of them fit into a bound. Pure."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from hopsgpu.cluster_managers.resources import Amount, exceeds_share
from hopsgpu.cluster_managers.snapshot import Snapshot
from hopsgpu.core.spec import ExecutorShape


@dataclass(frozen=True)
class Demand:
    """The executors that a gang requests.

    Attributes:
        is_spread: whether each node may have at most one.
    """

    container: Amount
    executors: int
    is_spread: bool = False


def container_of(shape: ExecutorShape) -> Amount:
    return Amount(shape.gpus, shape.cores, shape.heap_mib + shape.overhead_mib)


def node_capacity(free: Amount, container: Amount, is_spread: bool) -> int:
    """Return how many containers fit into the free resources of a node."""
    capacity = free.capacity_for(container)
    return min(capacity, 1) if is_spread else capacity


def user_capacity(snapshot: Snapshot, used: Amount, container: Amount, wanted: int) -> int:
    """Return how many containers, at most `wanted`, a user who has `used` may still get."""
    limit, cluster = snapshot.user.limit, snapshot.cluster
    if limit is None:
        return wanted
    # Each container brings the user closer to the limit, so a bisection finds it.
    return bisect.bisect_left(
        range(wanted),
        True,
        key=lambda count: exceeds_share(used + container * count, limit, cluster),
    )
