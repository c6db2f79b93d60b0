"""The check whether a gang can ever be granted. Pure.

The check follows YARN: the maximum of a queue and of each parent holds strictly, for each resource.
YARN compares a user's limit before it adds a container, by dominant share, and still grants the
container that exceeds the limit. A standalone master has only the limit of a setting.
"""

from __future__ import annotations

from hopsgpu.cluster_managers.demand import Demand, node_capacity, user_capacity
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.snapshot import Node, Queue, Snapshot
from hopsgpu.errors import CapacityError
from hopsgpu.units import count_of

_LOWER = "Lower memory_per_worker, cores_per_worker or gpus_per_worker"
_ELSEWHERE = "use another queue (spark.yarn.queue)"
_MAX_SHOWN = 8


def check_possible(demand: Demand, snapshot: Snapshot) -> None:
    """Check that a gang can ever be granted: on an idle cluster, beside our application master.

    Raises:
        CapacityError: the gang can never be granted; the message says what bounds it, with the
            numbers, and what to ask for.
    """
    for queue in snapshot.queues:
        # A DRAINING queue takes no new applications, but still serves its present ones.
        if queue.state == "STOPPED":
            raise CapacityError(f"queue {queue.path} is STOPPED: have it started, or {_ELSEWHERE}")
    check_container(demand.container, snapshot.largest, snapshot.running)
    container, wanted = snapshot.granted_size(demand.container), demand.executors
    capacities = {
        node: node_capacity(node.total - snapshot.master_on(node), container, demand.is_spread)
        for node in snapshot.running
    }
    # The limits of queue and user do not hold for idle nodes of a shared partition.
    shared_capacity = sum(
        room for node, room in capacities.items() if node.partition != snapshot.partition
    )
    master = snapshot.master_in_queue
    shared = f", plus {shared_capacity} on idle nodes of other labels" if shared_capacity else ""
    nodes = (
        f"the cluster's nodes have room for {_capacity_text(capacities)}{_master_note(snapshot)}"
    )
    bounds = [(sum(capacities.values()), nodes, _LOWER)]
    for queue in snapshot.queues:
        room = shared_capacity + (queue.maximum - master).capacity_for(container)
        elsewhere = f"raise {queue.path}" if queue.is_setting else _ELSEWHERE
        bounds.append((room, _queue_bound(queue, master) + shared, f"{_LOWER}, or {elsewhere}"))
    room = shared_capacity + user_capacity(snapshot, master, container, wanted)
    bounds.append(
        (
            room,
            _user_bound(snapshot) + shared,
            f"Use a smaller application master, or {_ELSEWHERE}",
        )
    )
    room, text, advice = min(bounds, key=lambda bound: bound[0])
    if room < wanted:
        raise CapacityError(
            f"{count_of(wanted, 'executor')} of {container} can never fit: {text}"
            + (f"; together they need {container * wanted}. " if wanted > 1 else ". ")
            + (f"Request at most {room} of them" if room else advice)
        )


def check_container(wanted: Amount, largest: Amount, nodes: tuple[Node, ...]) -> None:
    """Check that a container can ever be granted; otherwise a request for it ends the application.

    Raises:
        CapacityError: the container exceeds the scheduler's largest one, or every node's total.
    """
    bounds = {f"node {node.host}": node.total for node in nodes if node.state == "RUNNING"}
    fits_somewhere = any(wanted.is_within(bound) for bound in bounds.values())
    if fits_somewhere and wanted.is_within(largest):
        return
    # A standalone master has no such limit: the largest container is that of the nodes.
    if not all(bound.is_within(largest) for bound in bounds.values()) or not bounds:
        bounds = {"the scheduler's largest container": largest, **bounds}
    raise CapacityError(
        f"an executor of {wanted} fits on no node: "
        + "; ".join(f"{name} has {bound}" for name, bound in bounds.items())
        + f". {_LOWER}"
    )


def _capacity_text(capacities: dict[Node, int]) -> str:
    texts = [f"{node.host} {count}" for node, count in capacities.items() if count]
    more = [f"and {len(texts) - _MAX_SHOWN} more"] if len(texts) > _MAX_SHOWN else []
    shown = ", ".join(texts[:_MAX_SHOWN] + more) or "on no node"
    # A node that runs but has no room may say why.
    full = [node for node, count in capacities.items() if not count and node.health]
    problems = "".join(f"; {node.host}: {node.health}" for node in full[:_MAX_SHOWN])
    return f"{sum(capacities.values())} ({shown}{problems})"


def _master_note(snapshot: Snapshot) -> str:
    master = snapshot.master
    hosts = [node.host for node in snapshot.running if master and node.id == master.node]
    return f" beside this application's master on {hosts[0]}" if hosts else ""


def _queue_bound(queue: Queue, master: Amount) -> str:
    if queue.is_setting:
        return f"{queue.path} allows at most {count_of(queue.maximum.cores, 'core')}"
    note = f", {master} of it for this application's master" if master != NOTHING else ""
    return f"queue {queue.path} may have at most {queue.maximum} (its effective maximum){note}"


def _user_bound(snapshot: Snapshot) -> str:
    user, queue = snapshot.user, snapshot.queues[0]
    return (
        f"user {user.name} gets no more containers in queue {queue.path} once above {user.limit}"
        f" (the queue's user-limit-factor times its guaranteed {queue.guaranteed})"
    )


def cores_per_gpu(nodes: tuple[Node, ...]) -> int:
    """Return the smallest share of cores per GPU among running GPU nodes, less one; at least 1.

    The remaining core of each share is for application masters and ETL.
    """
    shares = [
        node.total.cores // node.total.gpus - 1
        for node in nodes
        if node.state == "RUNNING" and node.total.gpus > 0
    ]
    return max(min(shares, default=1), 1)
