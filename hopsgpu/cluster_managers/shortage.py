"""The tightest bound of a gang, for which it waits now. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hopsgpu.cluster_managers.demand import Demand, node_capacity, user_capacity
from hopsgpu.cluster_managers.resources import Amount, total
from hopsgpu.cluster_managers.snapshot import Node, Queue, Snapshot
from hopsgpu.core.queue_policy import Bound
from hopsgpu.units import count_of

# The last name has no plural.
_NAMES = ("GPU", "core", "MiB")
_PLURALS = {"GPU": "GPUs", "core": "cores", "MiB": "memory"}
_NODES_SHOWN = 4


@dataclass(frozen=True)
class Shortage:
    """The tightest bound now.

    Attributes:
        text: the bound in words with numbers, a clause; "" for Bound.NONE.
        queue: path of the queue, or name of the setting, whose limit it is, for Bound.QUEUE and
            Bound.USER.
        is_gpu_shortage: whether GPUs are scarce; False if only cores or memory are.
        details: further numbers, in words; "" for none.
        lack: what is scarce, without numbers.
    """

    bound: Bound
    text: str
    queue: str = ""
    is_gpu_shortage: bool = True
    details: str = ""
    lack: str = "GPUs"


def shortage(demand: Demand, snapshot: Snapshot, held: int = 0) -> Shortage:
    """Return what keeps the cluster manager from granting all missing executors of a gang now.

    The text of a limit does not count what the gang itself has as used.

    Args:
        held: number of executors that the gang has; the snapshot counts them as used.
    """
    wanted = demand.executors - held
    bounds, on_nodes = _bounds(demand, snapshot, held)
    room, tightest = min(bounds, key=lambda bound: bound[0])
    if room >= wanted:
        return Shortage(Bound.NONE, "")
    if on_nodes[0] <= room and _may_have_all(snapshot, tightest):
        return on_nodes[1]
    if on_nodes[0] < wanted:
        # The nodes lack capacity, too, which depends on all queues and users. So the kind of the
        # bound is that of the nodes.
        return replace(tightest, bound=on_nodes[1].bound)
    return tightest


def _may_have_all(snapshot: Snapshot, missing: Shortage) -> bool:
    """Return whether the bound is a queue that may have all nodes, and is full because they are."""
    nodes = total(node.total for node in snapshot.running)
    limits = (queue.maximum for queue in snapshot.queues if queue.path == missing.queue)
    return missing.bound is Bound.QUEUE and any(map(nodes.is_within, limits))


def obtainable(container: Amount, snapshot: Snapshot) -> tuple[int, Shortage]:
    """Return how many executors with GPUs would be granted now, and the bound that stops more.

    This assumes that nobody else requests any, and that nothing is preempted.
    """
    most = total(node.total for node in snapshot.running).gpus // container.gpus
    bounds, _ = _bounds(Demand(container, most + 1), snapshot, 0)
    room, tightest = min(bounds, key=lambda bound: bound[0])
    return max(room, 0), tightest


_Bound = tuple[int, Shortage]


def _bounds(demand: Demand, snapshot: Snapshot, held: int) -> tuple[list[_Bound], _Bound]:
    """Return each bound with its capacity for executors, and separately that of the nodes."""
    container = snapshot.granted_size(demand.container)
    free = {node: node.total - node.used for node in snapshot.running}
    capacities = {
        node: node_capacity(amount, container, demand.is_spread) for node, amount in free.items()
    }
    shared_capacity = sum(
        room for node, room in capacities.items() if node.partition != snapshot.partition
    )
    # The first of equal bounds is reported: more capacity of nodes would not help a full queue.
    of_queues = [
        _queue(queue, container, demand.executors, held, shared_capacity)
        for queue in snapshot.queues
    ]
    of_user = _user(snapshot, container, demand.executors, held, shared_capacity)
    missing = _nodes(demand, free, capacities, container, held)
    on_nodes = sum(capacities.values()), missing
    return [*of_queues[:-1], of_user, on_nodes, of_queues[-1]], on_nodes


def _queue(
    queue: Queue, container: Amount, executors: int, held: int, shared_capacity: int
) -> tuple[int, Shortage]:
    used_by_others = queue.used - container * held
    remaining = queue.maximum - used_by_others
    _, name, spare, used, most = min(
        (rest // size, name, rest, used, most)
        for rest, size, name, used, most in zip(
            remaining.parts,
            container.parts,
            _NAMES,
            used_by_others.parts,
            queue.maximum.parts,
            strict=True,
        )
        if size
    )
    needed = dict(zip(_NAMES, container.parts, strict=True))[name] * executors
    if queue.is_setting:
        text = f"the setting {queue.path} allows at most {_count_text(most, name)}"
        text = f"{text}, {used} {_are(used)} in use"
        text = text if spare <= 0 else f"{text}, {needed} {_are(needed)} needed"
    elif spare <= 0:
        text = f"queue {queue.path} is at its limit ({used} of {_count_text(most, name)} in use)"
    else:
        text = f"queue {queue.path} has {spare} of {_count_text(most, name)} left,"
        text = f"{text} {needed} {_are(needed)} needed"
    missing = Shortage(
        Bound.QUEUE,
        text,
        queue.path,
        is_gpu_shortage=name == _NAMES[0],
        lack=f"{_PLURALS[name]} in {queue.title}",
    )
    room = (queue.maximum - queue.used).capacity_for(container)
    return shared_capacity + room, missing


def _user(
    snapshot: Snapshot, container: Amount, executors: int, held: int, shared_capacity: int
) -> tuple[int, Shortage]:
    user, path = snapshot.user, snapshot.queues[0].path
    room = user_capacity(snapshot, user.used, container, executors - held)
    if room + held:
        count = count_of(executors, "executor")
        text = f"user {user.name} gets {room + held} more of {count} in queue {path}"
    else:
        text = f"user {user.name} is at the user limit in queue {path}"
    missing = Shortage(
        Bound.USER,
        text,
        path,
        details=f"{user.name} has {user.used - container * held}; the limit is {user.limit}",
        lack=f"the user limit in queue {path}",
    )
    return shared_capacity + room, missing


def _nodes(
    demand: Demand,
    free: dict[Node, Amount],
    capacities: dict[Node, int],
    container: Amount,
    held: int,
) -> Shortage:
    wanted, more = demand.executors - held, "more " if held else ""
    spare, needed = total(free.values()), container * wanted
    # GPUs are named first, because they are the scarcest resource.
    for name, have, want in zip(_NAMES, spare.parts, needed.parts, strict=True):
        if have < want:
            return Shortage(
                Bound.CLUSTER,
                f"needs {_count_text(want, name, more)}, {max(have, 0)} {_are(have)} free",
                is_gpu_shortage=name == _NAMES[0],
                lack=_PLURALS[name],
            )
    free_text = f"free: {_each(free, container)}"
    if demand.is_spread and (room := sum(capacities.values())) < wanted:
        text = (
            f"needs {count_of(wanted, 'node')} with room for an executor, {room} {_have(room)} it"
        )
        return Shortage(Bound.NODES, text, details=free_text, lack="nodes")
    if container.gpus and sum(amount.gpus // container.gpus for amount in free.values()) < wanted:
        text = _scatter_text(free, container, wanted)
        return Shortage(Bound.NODES, text, details=free_text, lack="GPUs on one node")
    if container.gpus:
        starved = [
            f"{node.host} has {count_of(amount.gpus, 'GPU')} free but only"
            f" {_short_resources(node, amount, container)}"
            for node, amount in free.items()
            if capacities[node] < amount.gpus // container.gpus
        ]
        return Shortage(
            Bound.NODES,
            "".join(starved[:1]),
            is_gpu_shortage=False,
            details=_first(starved[1:], _NODES_SHOWN, "; "),
            lack="cores or memory beside GPUs",
        )
    text = _scatter_text(free, container, wanted)
    return Shortage(Bound.NODES, text, details=free_text, lack="cores and memory on one node")


def _scatter_text(free: dict[Node, Amount], container: Amount, wanted: int) -> str:
    if container.gpus:
        room = sum(amount.gpus // container.gpus for amount in free.values())
        what = count_of(container.gpus, "GPU")
    else:
        room = sum(amount.capacity_for(container) for amount in free.values())
        what = f"{count_of(container.cores, 'core')} and {container.memory_mib} MiB"
    if room:
        executors = count_of(wanted, "executor")
        return f"room for {room} of {executors}, each of which needs {what} on one node"
    return f"no node has {what} free"


def _each(free: dict[Node, Amount], container: Amount) -> str:
    """Return each node's free part: its GPUs, or cores and memory if the request has no GPU."""
    if container.gpus:
        parts = [f"{n.host} {a.gpus} of {n.total.gpus}" for n, a in free.items() if n.total.gpus]
    else:
        parts = [
            f"{n.host} {a.cores} of {count_of(n.total.cores, 'core')}, {a.memory_mib} of"
            f" {n.total.memory_mib} MiB"
            for n, a in free.items()
        ]
    return _first(parts, _NODES_SHOWN, ", " if container.gpus else "; ")


def _count_text(number: int, name: str, more: str = "") -> str:
    return f"{number} {more}MiB" if name == "MiB" else count_of(number, f"{more}{name}")


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _have(number: int) -> str:
    return "has" if number == 1 else "have"


def _short_resources(node: Node, free: Amount, container: Amount) -> str:
    fit = free.gpus // container.gpus
    lacks = [
        f"{rest} of {_count_text(all_, name)}"
        for name, rest, size, all_ in zip(
            _NAMES, free.parts, container.parts, node.total.parts, strict=True
        )
        if rest < size * fit
    ]
    return " and ".join(lacks)


def _first(parts: Iterable[str], most: int, between: str) -> str:
    listed = list(parts)
    more = [f"and {len(listed) - most} more"] if len(listed) > most else []
    return between.join(listed[:most] + more)
