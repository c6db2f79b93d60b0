"""A cluster's GPUs as values: where they are, who has them, and what a user could get."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hopsgpu.core import html
from hopsgpu.units import count_of


@dataclass(frozen=True)
class GpuType:
    """GPUs of one product, or MIG devices of one profile.

    Attributes:
        name: name of the product, such as "NVIDIA A100-SXM4-80GB", and of the profile, such as
            "NVIDIA A100-SXM4-80GB MIG 1g.10gb".
        memory_mib: memory of each, in MiB; None if the NodeManager does not report it.
        count: number of GPUs or MIG devices.
        parents: number of GPUs of which these are MIG devices; 0 for whole GPUs.
    """

    __module__ = "hopsgpu.types"

    name: str
    memory_mib: int | None
    count: int
    parents: int = 0

    def __str__(self) -> str:
        of = f" of {count_of(self.parents, 'GPU')}" if self.parents else ""
        return f"{self.count} × {self.name or '-'}{of}"


def types_of(gpus: Iterable[tuple[str, int | None, Hashable]]) -> tuple[GpuType, ...]:
    """Return the types of a node's GPUs, in the order of first occurrence.

    Args:
        gpus: name, MiB, and for a MIG device what identifies its GPU, else None.
    """
    parents: dict[tuple[str, int | None], list[Hashable]] = {}
    for name, memory_mib, parent in gpus:
        parents.setdefault((name, memory_mib), []).append(parent)
    return tuple(
        GpuType(*kind, count=len(listed), parents=len({*listed} - {None}))
        for kind, listed in parents.items()
    )


def sum_types(types: Iterable[GpuType]) -> tuple[GpuType, ...]:
    """Return the types of several nodes, each once, in the order of first occurrence."""
    sums: dict[tuple[str, int | None], GpuType] = {}
    for kind in types:
        before = sums.get((kind.name, kind.memory_mib), replace(kind, count=0, parents=0))
        sums[kind.name, kind.memory_mib] = replace(
            kind, count=before.count + kind.count, parents=before.parents + kind.parents
        )
    return tuple(sums.values())


@dataclass(frozen=True)
class GpuNode:
    """A node with GPUs.

    Attributes:
        host: name of the host.
        state: YARN's state, such as "RUNNING"; a machine without YARN is "RUNNING" too.
        label: its node label; "" if it has none.
        types: the products; empty if the NodeManager does not report them.
        driver: version of NVIDIA's driver; "" if it is not reported.
        total: number of GPUs that YARN has there.
        used: number of GPUs that containers have.
        free: number of GPUs that containers may get; 0 unless the node is running.
        unhealthy: number of unused GPUs of an UNHEALTHY, LOST, REBOOTED or SHUTDOWN node; on a
            machine without YARN, of bad GPUs.
        health: what its health check reports if it is not well.
    """

    __module__ = "hopsgpu.types"

    host: str
    state: str
    label: str
    types: tuple[GpuType, ...]
    driver: str
    total: int
    used: int
    free: int
    unhealthy: int
    health: str


@dataclass(frozen=True)
class GpuUser:
    """A running application that has GPUs.

    Attributes:
        id: YARN's application id.
        name: the name that its user gave.
        user: the user who runs it.
        queue: path of its queue.
        gpus: number of GPUs that it has.
        since: when the oldest of its containers with GPUs was granted, in seconds since the epoch;
            None if YARN does not show it.
        started: when the application was submitted, in seconds since the epoch.
        hosts: number of GPUs by host; empty if YARN does not show it.
    """

    __module__ = "hopsgpu.types"

    id: str
    name: str
    user: str
    queue: str
    gpus: int
    since: float | None
    started: float
    hosts: Mapping[str, int]


@dataclass(frozen=True)
class GpuQueue:
    """A queue, on the nodes of one label.

    Attributes:
        path: its path from the root.
        label: the node label; "" for nodes without one.
        state: "RUNNING", or "DRAINING" or "STOPPED", its own or a parent's, in which it takes no
            new applications.
        leaf: whether applications can be in it.
        guaranteed: number of GPUs that it is guaranteed.
        maximum: number of GPUs that it may have.
        used: number of GPUs that its applications have.
        pending: number of GPUs that its applications request and lack; None if not reported.
        obtainable: number of GPUs that the user would be granted in it now, for launch()'s default
            executors, if nobody else asked and nothing were preempted; None for a parent.
        bound: what limits that number: "nodes" (the room there), "queue", "user" (the user's
            limit), "container" (executors exceed the queue's largest), "state"; "" for a parent.
        bound_queue: path of the queue whose limit it is, for "queue" and "user".
    """

    __module__ = "hopsgpu.types"

    path: str
    label: str
    state: str
    leaf: bool
    guaranteed: int
    maximum: int
    used: int
    pending: int | None
    obtainable: int | None
    bound: str
    bound_queue: str


@dataclass(frozen=True)
class ClusterGpus:
    """A cluster's GPUs at one moment, or those of a machine without YARN.

    Attributes:
        time: when they were observed, in seconds since the epoch.
        user: the user for whom `obtainable` holds.
        nodes: the nodes with GPUs.
        nodes_without: number of running nodes without GPUs.
        users: the applications that have GPUs, those with the most first.
        queues: the queues that may have GPUs, each parent before its children.
        unexplained: number of GPUs used by applications that YARN does not show the caller, or that
            have just ended.
        acls: whether access to queues is controlled. Only administrators see who has access, so
            `obtainable` does not say whether the user may submit there. None if YARN does not
            report it.
        executor: what an executor of `obtainable` asks of YARN, in words; "" without YARN.
        problems: facts that could not be determined, one line each.
        resource: name of the YARN resource that counts GPUs; "" without YARN.
        obtainable_without_queues: number of GPUs that the user would be granted now on a standalone
            master, under the assumptions of `GpuQueue.obtainable`; None otherwise.
    """

    __module__ = "hopsgpu.types"

    time: float
    user: str
    nodes: tuple[GpuNode, ...]
    nodes_without: int
    users: tuple[GpuUser, ...]
    queues: tuple[GpuQueue, ...]
    unexplained: int
    acls: bool | None
    executor: str
    problems: tuple[str, ...]
    resource: str = ""
    obtainable_without_queues: int | None = None

    @property
    def total(self) -> int:
        """Return the number of GPUs of all nodes."""
        return sum(node.total for node in self.nodes)

    @property
    def used(self) -> int:
        """Return the number of GPUs that containers have."""
        return sum(node.used for node in self.nodes)

    @property
    def free(self) -> int:
        """Return the number of GPUs that containers may get."""
        return sum(node.free for node in self.nodes)

    @property
    def unhealthy(self) -> int:
        """Return the number of GPUs on broken nodes; without YARN, of bad GPUs.

        A broken node is UNHEALTHY, LOST, REBOOTED or SHUTDOWN. GPUs that its containers still have
        do not count.
        """
        return sum(node.unhealthy for node in self.nodes)

    @property
    def types(self) -> tuple[GpuType, ...]:
        """Return the products of all nodes."""
        return sum_types(kind for node in self.nodes for kind in node.types)

    @property
    def obtainable(self) -> int | None:
        """Return the most GPUs that the user would get now, in one queue if there are queues.

        None on a machine without a cluster manager.
        """
        counts = (q.obtainable for q in self.queues if q.obtainable is not None)
        return max(counts, default=self.obtainable_without_queues)

    def __repr__(self) -> str:
        obtainable = self.obtainable
        could = "" if obtainable is None else f", {self.user} could get {obtainable} now"
        kinds = ", ".join(map(str, self.types))
        nodes = count_of(len(self.nodes), "node") + (f" ({kinds})" if kinds else "")
        return (
            f"ClusterGpus({self.free} of {count_of(self.total, 'GPU')} free, {self.used} used,"
            f" {self.unhealthy} unhealthy; {nodes},"
            f" {count_of(len(self.users), 'user')}{could})"
        )

    def _repr_html_(self) -> str:
        nodes = ([n.host, n.state, _gpu_types_text(n), n.used, n.free, n.total] for n in self.nodes)
        users = [[u.id, u.name, u.user, u.queue, u.gpus] for u in self.users]
        headers = ("application", "name", "user", "queue", "GPUs")
        return html.box(
            html.title("GPUs", f"{self.free} of {self.total} free", f"{self.used} used"),
            html.table(("node", "state", "GPUs", "used", "free", "total"), nodes),
            *([html.table(headers, users)] if users else []),
            *(html.element("div", problem) for problem in self.problems),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the same as JSON values, with the sums."""
        gpus = {
            name: getattr(self, name)
            for name in ("total", "used", "free", "unhealthy", "unexplained", "obtainable")
        }
        return {"gpus": gpus, "types": [asdict(kind) for kind in self.types], **asdict(self)}


def _gpu_types_text(node: GpuNode) -> str:
    return ", ".join(map(str, node.types))
