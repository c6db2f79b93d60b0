"""A snapshot of a cluster manager as values: nodes, queues, the user's limit, applications.

Source of the fields: answers of Hadoop 3.5.0, kept in tests/unit/hadoop_answers. A standalone
master has the same fields, without partitions, parents of queues and limits of users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hopsgpu.cluster_managers.resources import NOTHING, Amount, total
from hopsgpu.core.gang import Exclusions


@dataclass(frozen=True)
class Node:
    """A NodeManager or a worker, as the cluster manager sees it.

    Attributes:
        id: host and port of a NodeManager; Spark's ID of a worker.
        state: its state; only a "RUNNING" one gets containers.
        partition: its node label; "" if it has none.
        web: host and port of its HTTP interface; "" if it has none now.
        health: what its health check reported last; "" if all is well.
        other_resources: names of its resources besides GPUs, cores and memory.
    """

    id: str
    host: str
    state: str
    total: Amount
    used: Amount
    partition: str = ""
    web: str = ""
    health: str = ""
    other_resources: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Queue:
    """A queue in one partition; `maximum` and `guaranteed` are its effective limits.

    Attributes:
        path: its path from the root, such as "root.a".
        state: "RUNNING", "DRAINING" (no new applications) or "STOPPED"; the FairScheduler's queues
            always run.
        is_leaf: whether applications can be in it.
        used: resources of all applications in it, including reservations.
        largest: the largest container that it grants.
        can_create_children: whether the scheduler creates requested queues below it.
        pending: resources that its applications request and lack; None if not reported.
        fair_share: the FairScheduler's present share for it.
        is_preemptable: whether YARN may take from it what it has above its share.
        is_setting: whether this is no queue, but a setting with the name `path` that limits one
            application, as `spark.cores.max` on a standalone master.
    """

    path: str
    state: str
    is_leaf: bool
    maximum: Amount
    guaranteed: Amount
    used: Amount
    largest: Amount
    can_create_children: bool = False
    pending: Amount | None = None
    fair_share: Amount = NOTHING
    is_preemptable: bool = False
    is_setting: bool = False

    @property
    def title(self) -> str:
        """Return how a sentence names the limit."""
        return self.path if self.is_setting else f"queue {self.path}"

    @property
    def share(self) -> Amount:
        """Return the share up to which YARN preempts other queues for this one."""
        return self.guaranteed.max_with(self.fair_share)


@dataclass(frozen=True)
class User:
    """A user's share of a queue.

    Attributes:
        used: resources of the user's applications in the queue.
        limit: the amount above which the user gets no more containers, even in an idle queue; the
            container that exceeds it is still granted. None for no limit.
    """

    name: str
    used: Amount = NOTHING
    limit: Amount | None = None


@dataclass(frozen=True)
class App:
    """A running application.

    Attributes:
        id: the cluster manager's application id.
        queue: path of its queue; "" without queues.
        used: resources of its containers; nothing if access control hides them.
        started: when it was submitted, in seconds since the epoch.
        containers: number of its running containers; 0 if access control hides it.
    """

    id: str
    name: str
    user: str
    queue: str
    used: Amount
    started: float = 0.0
    containers: int = 0


@dataclass(frozen=True)
class Container:
    """A container of an application.

    Attributes:
        node: id of its node.
        granted: when it was granted, in seconds since the epoch.
    """

    node: str
    id: str
    size: Amount
    granted: float


@dataclass(frozen=True)
class Master:
    """The container of our application master, which exists as long as the application does.

    Attributes:
        node: id of its node.
    """

    node: str
    size: Amount


@dataclass(frozen=True)
class Rounding:
    """The smallest container, and the amount of which containers are multiples."""

    smallest: Amount = NOTHING
    step: Amount = NOTHING


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a cluster manager, for one application, or for a user in a queue.

    Attributes:
        application_id: our application's id; "" for a user who has none yet.
        partition: the node label for which we ask; "" for none.
        nodes: all nodes, whatever their state.
        shared: other partitions whose idle nodes we may get, in addition to the queues' limits.
        queues: the queue in question first, then its parents up to the root; without queues, the
            setting that limits our application.
        user: our user, in that queue.
        applications: all running applications that the cluster manager shows us.
        master: our application master's container; None if it is not shown.
        hosts: the usable hosts; None for all.
        exclusions: hosts and GPUs that get no rank.
        preemptable: what YARN may take from other leaf queues for requests in the queue.
        problems: warnings about facts missing in the cluster manager's answers.
    """

    application_id: str
    partition: str
    nodes: tuple[Node, ...]
    queues: tuple[Queue, ...]
    user: User
    applications: tuple[App, ...] = ()
    master: Master | None = None
    shared: frozenset[str] = frozenset()
    rounding: Rounding = Rounding()
    hosts: frozenset[str] | None = None
    exclusions: Exclusions = Exclusions()
    preemptable: Amount = NOTHING
    problems: tuple[str, ...] = ()

    @property
    def running(self) -> tuple[Node, ...]:
        """Return the usable running nodes, without excluded GPUs."""
        lost = Counter(host for host, _ in self.exclusions.gpus)
        return tuple(
            replace(node, total=node.total - Amount(lost[node.host], 0, 0))
            for node in self.nodes
            if node.state == "RUNNING"
            and (node.partition == self.partition or node.partition in self.shared)
            and (self.hosts is None or node.host in self.hosts)
            and node.host not in self.exclusions.hosts
        )

    def excluding(self, exclusions: Exclusions) -> Snapshot:
        """Return this snapshot with more exclusions; `cluster` still includes them."""
        return replace(self, exclusions=self.exclusions | exclusions)

    def limited_to(self, hosts: frozenset[str] | None) -> Snapshot:
        return replace(self, hosts=hosts)

    @property
    def cluster(self) -> Amount:
        """Return the resources of all partitions."""
        return total(node.total for node in self.nodes if node.state == "RUNNING")

    @property
    def largest(self) -> Amount:
        return self.queues[0].largest

    def master_on(self, node: Node) -> Amount:
        if self.master is None or self.master.node != node.id:
            return NOTHING
        return self.master.size

    @property
    def master_in_queue(self) -> Amount:
        """Return the resources of our application master in the queues of our partition."""
        inside = (node for node in self.nodes if node.partition == self.partition)
        return total(self.master_on(node) for node in inside)

    def granted_size(self, container: Amount) -> Amount:
        """Return the size that YARN grants for a container: rounded up, within the largest."""
        rounded = container.max_with(self.rounding.smallest).round_up(self.rounding.step)
        return rounded.min_with(self.largest).max_with(container)


@dataclass(frozen=True)
class Overview:
    """A snapshot of the whole of a cluster manager, for a user.

    Attributes:
        queues: the queues by node label, for the labels of nodes with GPUs; each parent before its
            children. Empty without queues.
        user_snapshots: snapshots for the user in each leaf queue, by node label; without queues,
            one snapshot for the label "".
        applications: all running applications that the cluster manager shows the caller.
        containers: containers by application id, of applications that have GPUs and report it.
        acls: whether queues have access control; None if that is not reported.
        problems: warnings about facts missing in the cluster manager's answers.
    """

    nodes: tuple[Node, ...]
    queues: Mapping[str, tuple[Queue, ...]]
    user_snapshots: Mapping[str, tuple[Snapshot, ...]]
    applications: tuple[App, ...]
    containers: Mapping[str, Sequence[Container]]
    acls: bool | None = None
    problems: tuple[str, ...] = ()
