"""A cluster's GPUs as values: where they are, who has them, and what one could get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hopsgpu.core import html
from hopsgpu.units import counted


@dataclass(frozen=True)
class GpuType:
    """GPUs of one product.

    Attributes:
        name: the product's, as "NVIDIA A100-SXM4-80GB".
        memory_mib: of each, MiB; None where the NodeManager does not tell.
        count: how many.
    """

    __module__ = "hopsgpu"

    name: str
    memory_mib: int | None
    count: int


def types_of(gpus: Iterable[tuple[str, int | None, int]]) -> tuple[GpuType, ...]:
    """Types from (name, MiB, how many), in the order in which they come."""
    found: Counter[tuple[str, int | None]] = Counter()
    for name, memory_mib, count in gpus:
        found[name, memory_mib] += count
    return tuple(GpuType(name, memory_mib, count) for (name, memory_mib), count in found.items())


@dataclass(frozen=True)
class GpuNode:
    """A node with GPUs.

    Attributes:
        host: its name.
        state: YARN's, as "RUNNING", which a machine without YARN is too.
        label: its node label, "" without one.
        types: the products; empty where the NodeManager does not tell.
        driver: NVIDIA's version; "" where it is not told.
        total: GPUs that YARN has there.
        used: that containers have.
        free: that containers may get; of running nodes alone.
        unhealthy: that nobody gets, for the node is UNHEALTHY, LOST, REBOOTED or SHUTDOWN; on a
            machine without YARN those that are bad themselves.
        health: what its health check says, where it is not well.
    """

    __module__ = "hopsgpu"

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
        name: that its user gave.
        user: who runs it.
        queue: path of its queue.
        gpus: how many it has.
        since: when the first of the containers with GPUs that it has now was granted, seconds
            since the epoch; None where YARN does not tell the caller.
        started: when the application was submitted, seconds since the epoch.
        hosts: GPUs by host; empty where YARN does not tell the caller.
    """

    __module__ = "hopsgpu"

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
        path: from the root.
        label: the node label, "" for nodes without one.
        state: "RUNNING", or "DRAINING" or "STOPPED", its own or a parent's: no new applications.
        leaf: whether applications can be in it.
        guaranteed: GPUs.
        maximum: GPUs that it may have.
        used: GPUs that its applications have.
        pending: GPUs that they ask for and do not have; None where YARN does not tell.
        obtainable: GPUs that the user would be granted in it now, for launch()'s default
            executors, if nobody else asked and nothing were preempted; None of a parent.
        bound: what keeps it from being more: "nodes" (the room there), "queue", "user" (the user's
            limit), "container" (executors are above the queue's largest), "state"; "" of a
            parent.
        bound_queue: path of the queue whose limit it is, for "queue" and "user".
    """

    __module__ = "hopsgpu"

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
        time: of the look, seconds since the epoch.
        user: for whom `obtainable` holds.
        nodes: those with GPUs.
        nodes_without: how many running nodes have none.
        users: applications that have GPUs, those with the most first.
        queues: that may have GPUs, each parent before its children.
        unexplained: GPUs in use by applications that YARN does not show the caller, or that have
            just ended.
        acls: whether access to queues is controlled; only administrators are shown to whom, so
            `obtainable` does not say whether the user may submit there. None where YARN does not
            tell.
        executor: what an executor of `obtainable` asks of YARN, in words; "" without YARN.
        problems: what could not be found out, a line each.
    """

    __module__ = "hopsgpu"

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

    @property
    def total(self) -> int:
        """GPUs of all nodes."""
        return sum(node.total for node in self.nodes)

    @property
    def used(self) -> int:
        """GPUs that containers have."""
        return sum(node.used for node in self.nodes)

    @property
    def free(self) -> int:
        """GPUs that containers may get."""
        return sum(node.free for node in self.nodes)

    @property
    def unhealthy(self) -> int:
        """GPUs on nodes that are UNHEALTHY, LOST, REBOOTED or SHUTDOWN; without YARN bad ones."""
        return sum(node.unhealthy for node in self.nodes)

    @property
    def types(self) -> tuple[GpuType, ...]:
        """The products of all nodes."""
        return types_of(
            (each.name, each.memory_mib, each.count) for node in self.nodes for each in node.types
        )

    @property
    def obtainable(self) -> int | None:
        """The most GPUs that the user would be granted in one queue now; None without queues."""
        found = [queue.obtainable for queue in self.queues if queue.obtainable is not None]
        return max(found, default=None)

    def __repr__(self) -> str:
        obtainable = self.obtainable
        could = "" if obtainable is None else f", {self.user} could get {obtainable} now"
        kinds = ", ".join(f"{each.count} × {each.name}" for each in self.types)
        nodes = counted(len(self.nodes), "node") + (f" ({kinds})" if kinds else "")
        return (
            f"ClusterGpus({self.free} of {counted(self.total, 'GPU')} free, {self.used} used,"
            f" {self.unhealthy} unhealthy; {nodes},"
            f" {counted(len(self.users), 'user')}{could})"
        )

    def _repr_html_(self) -> str:
        nodes = ([n.host, n.state, _kinds(n), n.used, n.free, n.total] for n in self.nodes)
        users = [[u.id, u.name, u.user, u.queue, u.gpus] for u in self.users]
        headers = ("application", "name", "user", "queue", "GPUs")
        return html.box(
            html.title("GPUs", f"{self.free} of {self.total} free", f"{self.used} used"),
            html.table(("node", "state", "GPUs", "used", "free", "total"), nodes),
            *([html.table(headers, users)] if users else []),
            *(html.element("div", problem) for problem in self.problems),
        )

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values, with the sums."""
        gpus = {
            name: getattr(self, name)
            for name in ("total", "used", "free", "unhealthy", "unexplained", "obtainable")
        }
        return {"gpus": gpus, "types": [asdict(each) for each in self.types], **asdict(self)}


def _kinds(node: GpuNode) -> str:
    return ", ".join(f"{each.count} × {each.name}" for each in node.types)
