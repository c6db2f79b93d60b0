"""One look at the ResourceManager, as values: nodes, queues, the user's limit, applications.

Source of the fields: answers of Hadoop 3.5.0, kept in tests/unit/hadoop_answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hopsgpu.core.gang import Avoid
from hopsgpu.yarn.resources import NOTHING, Amount, total


@dataclass(frozen=True)
class Node:
    """A NodeManager, as the ResourceManager sees it.

    Attributes:
        id: host and port.
        host: its name.
        state: "RUNNING" alone gets containers.
        total: what it has.
        used: what its containers have.
        partition: its node label, "" without one.
        web: host and port of its HTTP interface; "" where it has none now.
        health: what its health check reported last; "" where all is well.
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
        path: from the root, as "root.a".
        state: "RUNNING", "DRAINING" (no new applications) or "STOPPED"; the FairScheduler's
            queues always run.
        leaf: whether applications can be in it.
        maximum: its effective maximum.
        guaranteed: its effective minimum.
        used: what all applications in it have, with what is reserved for them.
        largest: the largest container that it grants.
        children: whether it makes queues that are asked for below it.
        pending: what applications in it ask for and do not have; None where that is not told.
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
        name: of the user.
        used: what the user's applications in the queue have.
        limit: above it the user gets no more container, however idle the queue; the one with
            which it is passed is still granted. None for no limit.
    """

    name: str
    used: Amount = NOTHING
    limit: Amount | None = None


@dataclass(frozen=True)
class App:
    """A running application.

    Attributes:
        id: YARN's.
        name: that its user gave.
        user: who runs it.
        queue: path of its queue.
        used: what its containers have; nothing where access control hides it.
        started: when it was submitted, seconds since the epoch.
    """

    id: str
    name: str
    user: str
    queue: str
    used: Amount
    started: float = 0.0


@dataclass(frozen=True)
class Container:
    """A container of an application.

    Attributes:
        node: id of its node.
        id: YARN's.
        size: of it.
        granted: when it was, seconds since the epoch.
    """

    node: str
    id: str
    size: Amount
    granted: float


@dataclass(frozen=True)
class Master:
    """The container of our application master, there as long as the application is.

    Attributes:
        node: id of its node.
        size: of the container.
    """

    node: str
    size: Amount


@dataclass(frozen=True)
class Rounding:
    """What containers are rounded up to.

    Attributes:
        smallest: the smallest container.
        step: containers are multiples of it.
    """

    smallest: Amount = NOTHING
    step: Amount = NOTHING


@dataclass(frozen=True)
class Snapshot:
    """One look at the ResourceManager, for one application, or for a user in a queue.

    Attributes:
        application_id: ours; "" for a user who has none yet.
        partition: the node label for which we ask, "" for none.
        nodes: all, whatever their state.
        shared: other partitions whose idle nodes we may get, beside every queue's limit.
        queues: the application's queue, or the one that is meant, first, then its parents up to
            the root.
        user: ours, in that queue.
        applications: all that run and that we are shown.
        master: our application master's container; None where it is not shown.
        rounding: of containers.
        hosts: the only ones that will do; None for all.
        avoided: what gets no rank.
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
    avoided: Avoid = Avoid()

    @property
    def running(self) -> tuple[Node, ...]:
        """Nodes on which we can get containers that will do, with what will do of them."""
        lost = Counter(host for host, _ in self.avoided.gpus)
        return tuple(
            replace(node, total=node.total - Amount(lost[node.host], 0, 0))
            for node in self.nodes
            if node.state == "RUNNING"
            and (node.partition == self.partition or node.partition in self.shared)
            and (self.hosts is None or node.host in self.hosts)
            and node.host not in self.avoided.hosts
        )

    def without(self, avoid: Avoid) -> Snapshot:
        """The same for a gang of which no rank may have this; YARN's shares are of all."""
        return replace(self, avoided=self.avoided | avoid)

    def only(self, hosts: frozenset[str] | None) -> Snapshot:
        """The same for a gang that wants these nodes only; None for any."""
        return replace(self, hosts=hosts)

    @property
    def cluster(self) -> Amount:
        """All that the scheduler has, in every partition."""
        return total(node.total for node in self.nodes if node.state == "RUNNING")

    @property
    def largest(self) -> Amount:
        """The largest container that the queue grants."""
        return self.queues[0].largest

    def master_on(self, node: Node) -> Amount:
        """What our application master takes of a node."""
        mine = self.master is not None and self.master.node == node.id
        return self.master.size if self.master is not None and mine else NOTHING

    @property
    def master_in_queue(self) -> Amount:
        """What our application master takes of the queues in our partition."""
        inside = (node for node in self.nodes if node.partition == self.partition)
        return total(self.master_on(node) for node in inside)

    def granted(self, container: Amount) -> Amount:
        """What YARN grants to one who asks for a container: rounded up, within the largest."""
        up = container.most(self.rounding.smallest).rounded_up(self.rounding.step)
        return up.least(self.largest).most(container)


@dataclass(frozen=True)
class Overview:
    """One look at the whole of YARN, for a user.

    Attributes:
        nodes: all, whatever their state.
        queues: by node label, of the labels that nodes with GPUs have; each parent before its
            children.
        standings: what the user would find in each leaf queue, by node label.
        applications: all that run and that the caller is shown.
        containers: by application id, of those that have GPUs and tell it.
        acls: whether queues have access control; None where that is not told.
    """

    nodes: tuple[Node, ...]
    queues: Mapping[str, tuple[Queue, ...]]
    standings: Mapping[str, tuple[Snapshot, ...]]
    applications: tuple[App, ...]
    containers: Mapping[str, Sequence[Container]]
    acls: bool | None = None
