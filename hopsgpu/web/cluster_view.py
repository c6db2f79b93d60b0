"""The cluster and the queue of gangs as pages show them, from YARN's answers and run records. Pure.

YARN knows applications, and records know runs; the application's id connects them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus, GpuNode, GpuUser
from hopsgpu.core.queue_policy import (
    MAX_PASSES,
    Bound,
    QueueSnapshot,
    Ticket,
    describe_promised,
    queue_tag,
)
from hopsgpu.display.run_view import RunSummary
from hopsgpu.units import count_of

USED, FREE, BROKEN, UNKNOWN = "used", "free", "unhealthy", "unknown"
_WHY = {
    Bound.NONE: "it could be granted now; it waits for its turn to request executors",
    Bound.CLUSTER: "the cluster has not enough free",
    Bound.NODES: "no node has enough free for one of its executors",
    Bound.QUEUE: "a limit of its queue",
    Bound.USER: "a limit of its user in the queue",
}


@dataclass(frozen=True)
class GpuCell:
    """One GPU of a node; YARN does not say which of a node's GPUs an application has.

    Attributes:
        state: "used", "free", "unhealthy", or "unknown" (somebody has it whom YARN does not name).
        who: number of the application among those that have GPUs, from 1; 0 for none.
    """

    state: str
    who: int = 0


@dataclass(frozen=True)
class NodeRow:
    """A node with its GPUs.

    Attributes:
        kinds: its products, in words.
        cells: its GPUs: those in use first, then the free ones.
    """

    node: GpuNode
    kinds: str
    cells: tuple[GpuCell, ...]


@dataclass(frozen=True)
class Holder:
    """An application that has GPUs.

    Attributes:
        number: as in `GpuCell.who`.
        hosts: its nodes, with the number of its GPUs on each.
        runs: its active runs, as far as their records can be read.
    """

    number: int
    user: GpuUser
    hosts: str
    runs: tuple[RunSummary, ...]


@dataclass(frozen=True)
class ClusterView:
    """The cluster's GPUs.

    Attributes:
        holders: who has GPUs, those with the most first.
    """

    gpus: ClusterGpus
    nodes: tuple[NodeRow, ...]
    holders: tuple[Holder, ...]


def cluster_view(gpus: ClusterGpus, active: Sequence[RunSummary]) -> ClusterView:
    """Return the page of the cluster."""
    holders = tuple(
        Holder(
            number,
            user,
            ", ".join(f"{host} ({count})" for host, count in user.hosts.items()),
            tuple(row for row in active if row.application and row.application == user.id),
        )
        for number, user in enumerate(gpus.users, 1)
    )
    # Few applications have GPUs on one node, and many have some in the cluster.
    by_host: dict[str, list[tuple[int, int]]] = {}
    for holder in holders:
        for host, count in holder.user.hosts.items():
            by_host.setdefault(host, []).append((holder.number, count))
    nodes = tuple(
        NodeRow(
            node,
            ", ".join(map(str, node.types)),
            tuple(_cells(node, by_host.get(node.host, ()))),
        )
        for node in gpus.nodes
    )
    return ClusterView(gpus, nodes, holders)


def _cells(node: GpuNode, holders: Sequence[tuple[int, int]]) -> Iterator[GpuCell]:
    """Return a node's GPUs.

    Args:
        holders: numbers of the applications that have GPUs there, and of how many each.
    """
    remaining = node.used
    for number, gpus in holders:
        # The node's report may be older than the application's.
        count = min(gpus, remaining)
        remaining -= count
        yield from (GpuCell(USED, number) for _ in range(count))
    yield from (GpuCell(UNKNOWN) for _ in range(remaining))
    yield from (GpuCell(FREE) for _ in range(node.free))
    yield from (GpuCell(BROKEN) for _ in range(node.total - node.used - node.free))


@dataclass(frozen=True)
class Waiting:
    """A gang, or a search that would like more, that waits for executors.

    Attributes:
        place: its place in the queue of gangs, from 1; None for a run without a ticket.
        name: the application's name, if YARN tells it; or "".
        can_grow: whether it has executors, and would like more.
        partition: node label of its queue of gangs; "" for none.
        queue: path of the queue whose limit keeps it waiting, or of its own; "" if unknown.
        passed: how often later gangs went first; at most `MAX_PASSES`, beyond which none counts.
        runs: the active runs of the application that wait.
    """

    place: int | None
    user: str
    application: str
    name: str
    wants: str
    since: float | None
    why: str
    can_grow: bool = False
    partition: str = ""
    queue: str = ""
    passed: int = 0
    runs: tuple[RunSummary, ...] = ()

    @property
    def passes(self) -> str:
        """Return how often later gangs went first, in words."""
        return f"{self.passed} times{' or more' if self.passed >= MAX_PASSES else ''}"


@dataclass(frozen=True)
class QueueView:
    """The gangs that wait.

    Attributes:
        waiting: in the order of the queue of gangs, those without a ticket last.
        asking: for each partition who asks YARN now, in words.
        promised: what elastic gangs are about to give back, in words.
    """

    waiting: tuple[Waiting, ...]
    asking: tuple[str, ...]
    promised: tuple[str, ...]


def queue_view(
    snapshots: Mapping[str, QueueSnapshot], gpus: ClusterGpus | None, active: Sequence[RunSummary]
) -> QueueView:
    """Return the page of the queue of gangs.

    Args:
        snapshots: the queue of gangs of each partition.
        gpus: the cluster's GPUs, if YARN answers.
        active: the active runs.
    """
    names = {} if gpus is None else {user.id: user.name for user in gpus.users}
    queues = {} if gpus is None else {queue_tag(queue.path): queue.path for queue in gpus.queues}
    alone = len(snapshots) == 1
    waiting, asking, promised = [], [], []
    for partition, snapshot in sorted(snapshots.items()):
        label = "" if alone else partition
        for place, (ticket, owner) in enumerate(snapshot.tickets, 1):
            waiting.append(_waiting(place, ticket, owner, label, names, queues, active))
        of = f"{label}: " if label else ""
        if snapshot.turn_holder is not None:
            asking.append(f"{of}{snapshot.turn_holder} requests its executors now")
        if text := describe_promised(snapshot):
            promised.append(f"{of}{text}")
    applications = {gang.application for gang in waiting}
    without_ticket = [
        _by_record(row)
        for row in active
        if _is_waiting(row) and row.application not in applications
    ]
    return QueueView((*waiting, *without_ticket), tuple(asking), tuple(promised))


def _is_waiting(row: RunSummary) -> bool:
    return row.state == "waiting"


def _waiting(
    place: int,
    ticket: Ticket,
    owner: str,
    partition: str,
    names: Mapping[str, str],
    queues: Mapping[str, str],
    active: Sequence[RunSummary],
) -> Waiting:
    runs = [row for row in active if row.application == ticket.application]
    mine = tuple(row for row in runs if _is_waiting(row) or (ticket.is_growth and row.waiting_for))
    # A record has the reason with numbers, a ticket only its kind.
    why = next((row.waiting_for for row in mine if row.waiting_for), _WHY[ticket.bound])
    gpu_text = count_of(ticket.gpus, "GPU") if ticket.gpus else "no GPU"
    return Waiting(
        place=place,
        user=owner,
        application=ticket.application,
        name=names.get(ticket.application, ""),
        wants=f"{count_of(ticket.executors, 'executor')} with {gpu_text} each",
        since=ticket.filed / 1000,
        why=why,
        can_grow=ticket.is_growth,
        partition=partition,
        queue=queues.get(ticket.queue, ""),
        passed=ticket.passed,
        runs=mine,
    )


def _by_record(row: RunSummary) -> Waiting:
    return Waiting(
        place=None,
        user=row.user,
        application=row.application,
        name="",
        wants=row.gang,
        since=row.requested,
        why=row.waiting_for,
        queue=row.queue,
        runs=(row,),
    )
