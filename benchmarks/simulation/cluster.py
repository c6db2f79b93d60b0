"""The nodes of a simulated cluster, as a ResourceManager would show them to hopsgpu's decisions."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.backends.spark.queued_gang import largest_fit
from hopsgpu.cluster_managers.demand import Demand
from hopsgpu.cluster_managers.placement import preferred_hosts
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.shortage import shortage
from hopsgpu.cluster_managers.snapshot import Node, Queue, Snapshot, User
from hopsgpu.core.queue_policy import Bound

# So much of each that GPUs alone are short.
_CORES, _MEMORY_MIB = 16, 64 * 1024
# The Philly cluster had 2,490 GPUs in 552 machines of 2 and of 8 GPUs, so 321 and 231.
_PAPER_SMALL, _PAPER_LARGE = 321, 231
_SMALL, _LARGE = 2, 8
_PAPER_GPUS = _SMALL * _PAPER_SMALL + _LARGE * _PAPER_LARGE


def nodes_like_philly(gpus: int) -> list[int]:
    """Return the GPUs of each node of a cluster of about so many GPUs, mixed as Philly's was."""
    large = max(round(gpus * _PAPER_LARGE / _PAPER_GPUS), 1)
    return [_LARGE] * large + [_SMALL] * max((gpus - _LARGE * large) // _SMALL, 0)


@dataclass(frozen=True)
class Placed:
    """A container.

    Attributes:
        host: its node.
        gpus: number of its GPUs.
        queue: the queue whose it is.
    """

    host: str
    gpus: int
    queue: str


class Cluster:
    """The GPUs of a cluster; a container is placed on the node that `preferred_hosts` names.

    Args:
        node_gpus: number of GPUs of each node.
        queue_share: largest share of all GPUs that a queue may have.

    Attributes:
        node_gpus: as given.
        total: number of all GPUs.
        free: number of free GPUs.
        has_queue_limits: whether a queue may not have all GPUs.
    """

    def __init__(self, node_gpus: Sequence[int], queue_share: float = 1.0) -> None:
        self.node_gpus = tuple(node_gpus)
        self.total = self.free = sum(node_gpus)
        self.has_queue_limits = queue_share < 1
        self._whole = {f"node{number:04d}": gpus for number, gpus in enumerate(node_gpus)}
        self._free = dict(self._whole)
        # The hosts that have so many free GPUs, in order.
        self._levels: dict[int, list[str]] = defaultdict(list)
        for host, gpus in self._whole.items():
            insort(self._levels[gpus], host)
        self._maximum = _amount(int(queue_share * self.total))
        self._used: Counter[str] = Counter()
        self._largest = _amount(max(node_gpus))
        self._nodes: dict[tuple[str, int], Node] = {}
        self._bounds: dict[tuple[int, int, str], Bound] = {}

    @property
    def free_on(self) -> Mapping[str, int]:
        """Return the number of free GPUs of each node, by host."""
        return self._free

    def held_by(self, queue: str) -> int:
        """Return the number of GPUs that a queue has."""
        return self._used[queue]

    def bound(self, container: Amount, executors: int, queue: str) -> Bound:
        """Return what keeps YARN from granting so many containers to a queue at once, now."""
        if executors * container.gpus > self.free:
            return Bound.CLUSTER
        gpus = container.gpus
        if sum(n // gpus * len(hosts) for n, hosts in self._levels.items()) < executors:
            # Decisions do not tell one kind of lack of room from another.
            return Bound.NODES
        key = gpus, executors, queue if self.has_queue_limits else ""
        if (known := self._bounds.get(key)) is None:
            demand = Demand(container, executors)
            known = shortage(demand, self.snapshot(queue, executors)).bound
            self._bounds[key] = known
        return known

    def room(self, container: Amount, least: int, most: int, queue: str) -> int:
        """Return how many containers in [least, most] would be granted now; else `least`."""
        return largest_fit(
            least, most, lambda count: self.bound(container, count, queue) is Bound.NONE
        )

    def place(self, container: Amount, executors: int, queue: str) -> list[Placed]:
        """Place so many containers, or as many as find room, and return them."""
        count = self.room(container, 0, executors, queue)
        if not count:
            return []
        hosts = preferred_hosts(Demand(container, count), self.snapshot(queue, count))
        for host in hosts:
            self._change(host, queue, container.gpus)
        return [Placed(host, container.gpus, queue) for host in hosts]

    def remove(self, placed: Placed) -> None:
        """Free the GPUs of a container."""
        self._change(placed.host, placed.queue, -placed.gpus)

    def _change(self, host: str, queue: str, taken: int) -> None:
        before = self._free[host]
        level = self._levels[before]
        del level[bisect_left(level, host)]
        self._free[host] = before - taken
        if not 0 <= self._free[host] <= self._whole[host]:
            raise RuntimeError(f"{host} has {self._free[host]} of {self._whole[host]} GPUs free")
        insort(self._levels[before - taken], host)
        self._used[queue] += taken
        self.free -= taken
        self._bounds.clear()

    def snapshot(self, queue: str, executors: int) -> Snapshot:
        """Return what a gang of so many executors has to know of the cluster.

        Of the nodes that have equally many free GPUs, only as many are shown as could matter: one
        for each executor, the first by name.
        """
        path = f"root.{queue}"
        held = self.total - self.free
        return Snapshot(
            "",
            "",
            tuple(self._shown(executors)),
            (
                self._queue(path, True, self._used[queue], self._maximum),
                self._queue("root", False, held, _amount(self.total)),
            ),
            User(queue),
        )

    def empty(self, queue: str = "any") -> Snapshot:
        """Return what the whole cluster would show to a gang if it were idle."""
        nodes = tuple(_node(host, gpus, gpus) for host, gpus in self._whole.items())
        queues = (
            self._queue(f"root.{queue}", True, 0, self._maximum),
            self._queue("root", False, 0, _amount(self.total)),
        )
        return Snapshot("", "", nodes, queues, User(queue))

    def _queue(self, path: str, leaf: bool, used: int, maximum: Amount) -> Queue:
        return Queue(path, "RUNNING", leaf, maximum, NOTHING, _amount(used), self._largest)

    def _shown(self, executors: int) -> Iterator[Node]:
        for free, hosts in self._levels.items():
            if free:
                for host in hosts[:executors]:
                    key = host, free
                    if key not in self._nodes:
                        self._nodes[key] = _node(host, self._whole[host], free)
                    yield self._nodes[key]

    def check(self) -> None:
        """Check that no GPU was lost or is there twice.

        Raises:
            RuntimeError: one was.
        """
        held = sum(self._used.values())
        if self.free + held != self.total or sum(self._free.values()) != self.free:
            raise RuntimeError(f"{self.free} GPUs free, {held} held, of {self.total}")


def _amount(gpus: int) -> Amount:
    return Amount(gpus, gpus * _CORES, gpus * _MEMORY_MIB)


def _node(host: str, whole: int, free: int) -> Node:
    return Node(host, host, "RUNNING", _amount(whole), _amount(whole - free))
