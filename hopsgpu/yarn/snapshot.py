"""A snapshot of the ResourceManager as values: nodes, queues, the user's limit, applications.

Source of the fields: answers of Hadoop 3.5.0, kept in tests/unit/hadoop_answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hopsgpu.core.gang import Exclusions
from hopsgpu.yarn.resources import NOTHING, Amount, total


@dataclass(frozen=True)
class Node:
    """A NodeManager, as the ResourceManager sees it.

    Attributes:
        id: host and port.
        host: name of the host.
        state: its state; only a "RUNNING" one gets containers.
        total: what it has.
        used: what its containers have.
        partition: its node label; "" if it has none.
        web: host and port of its HTTP interface; "" if it has none now.
        health: what its health check reported last; "" if all is well.
        others: names of the resources that it has beside GPUs, cores and memory.
    """

    id: str
    host: str
    state: str
    total: Amount
    used: Amount
    partition: str = ""
    web: str = ""
    health: str = ""
    others: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Queue:
    """A queue, in one partition.

    Attributes:
        path: its path from the root, such as "root.a".
        state: "RUNNING", "DRAINING" (no new applications) or "STOPPED"; the FairScheduler's queues
            always run.
        leaf: whether applications can be in it.
        maximum: its effective maximum.
        guaranteed: its effective minimum.
        used: what all applications in it have, with what is reserved for them.
        largest: the largest container that it grants.
        children: whether the scheduler makes queues below it that are asked for.
        pending: what applications in it ask for and do not have; None if that is not reported.
    """

    path: str
    state: str
    leaf: bool
    maximum: Amount
    guaranteed: Amount
    used: Amount
    largest: Amount
    children: bool = False
    pending: Amount | None = None


@dataclass(frozen=True)
class User:
    """What a user has in a queue.

    Attributes:
        name: the user's name.
        used: what the user's applications in the queue have.
        limit: the amount above which the user gets no more containers, however idle the queue is;
            the container that exceeds it is still granted. None for no limit.
    """

    name: str
    used: Amount = NOTHING
    limit: Amount | None = None


@dataclass(frozen=True)
class App:
    """A running application.

    Attributes:
        id: YARN's application id.
        name: the name that its user gave.
        user: the user who runs it.
        queue: path of its queue.
        used: what its containers have; nothing if access control hides it.
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
        id: YARN's container id.
        size: its resources.
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
        size: resources of the container.
    """

    node: str
    size: Amount


@dataclass(frozen=True)
class Rounding:
    """What containers are rounded up to.

    Attributes:
        smallest: the smallest container.
        step: the amount of which containers are multiples.
    """

    smallest: Amount = NOTHING
    step: Amount = NOTHING


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of the ResourceManager, for one application, or for a user in a queue.

    Attributes:
        application_id: our application's id; "" for a user who has none yet.
        partition: the node label for which we ask; "" for none.
        nodes: all nodes, whatever their state.
        shared: other partitions whose idle nodes we may get, beside every queue's limit.
        queues: the application's queue, or the queue in question, first; then its parents up to the
            root.
        user: our user, in that queue.
        applications: all running applications that we are shown.
        master: our application master's container; None if it is not shown.
        rounding: rounding of containers.
        hosts: the only hosts that will do; None for all.
        avoided: hosts and GPUs that get no rank.
        problems: what the ResourceManager's answers do not tell, as warnings.
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
    avoided: Exclusions = Exclusions()
    problems: tuple[str, ...] = ()

    @property
    def running(self) -> tuple[Node, ...]:
        """Return the nodes whose containers will do, without their GPUs that are to be avoided."""
        lost = Counter(host for host, _ in self.avoided.gpus)
        return tuple(
            replace(node, total=node.total - Amount(lost[node.host], 0, 0))
            for node in self.nodes
            if node.state == "RUNNING"
            and (node.partition == self.partition or node.partition in self.shared)
            and (self.hosts is None or node.host in self.hosts)
            and node.host not in self.avoided.hosts
        )

    def without(self, avoid: Exclusions) -> Snapshot:
        """Return the same for a gang whose ranks avoid something; YARN's shares still count it."""
        return replace(self, avoided=self.avoided | avoid)

    def only(self, hosts: frozenset[str] | None) -> Snapshot:
        """Return the same for a gang that wants these nodes only; None for any."""
        return replace(self, hosts=hosts)

    @property
    def cluster(self) -> Amount:
        """Return all that the scheduler has, in every partition."""
        return total(node.total for node in self.nodes if node.state == "RUNNING")

    @property
    def largest(self) -> Amount:
        """Return the largest container that the queue grants."""
        return self.queues[0].largest

    def master_on(self, node: Node) -> Amount:
        """Return what our application master takes of a node."""
        mine = self.master is not None and self.master.node == node.id
        return self.master.size if self.master is not None and mine else NOTHING

    @property
    def master_in_queue(self) -> Amount:
        """Return what our application master takes of the queues in our partition."""
        inside = (node for node in self.nodes if node.partition == self.partition)
        return total(self.master_on(node) for node in inside)

    def granted(self, container: Amount) -> Amount:
        """Return what YARN grants for a requested container: rounded up, within the largest."""
        up = container.most(self.rounding.smallest).rounded_up(self.rounding.step)
        return up.least(self.largest).most(container)


@dataclass(frozen=True)
class Overview:
    """A snapshot of the whole of YARN, for a user.

    Attributes:
        nodes: all nodes, whatever their state.
        queues: the queues by node label, for the labels of nodes with GPUs; each parent before its
            children.
        standings: what the user would find in each leaf queue, by node label.
        applications: all running applications that the caller is shown.
        containers: containers by application id, of applications that have GPUs and report it.
        acls: whether queues have access control; None if that is not reported.
        problems: what the ResourceManager's answers do not tell, as warnings.
    """

    nodes: tuple[Node, ...]
    queues: Mapping[str, tuple[Queue, ...]]
    standings: Mapping[str, tuple[Snapshot, ...]]
    applications: tuple[App, ...]
    containers: Mapping[str, Sequence[Container]]
    acls: bool | None = None
    problems: tuple[str, ...] = ()
