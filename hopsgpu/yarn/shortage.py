"""The tightest bound, which is what a gang waits for now. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hopsgpu.core.queue_policy import Bound
from hopsgpu.units import count_of
from hopsgpu.yarn.demand import Demand, places_on, user_room
from hopsgpu.yarn.resources import Amount, total
from hopsgpu.yarn.snapshot import Node, Queue, Snapshot

# The last has no other form in the plural.
_NAMES = ("GPU", "core", "MiB")
_NODES_SHOWN = 4


@dataclass(frozen=True)
class Shortage:
    """The tightest bound now.

    Attributes:
        bound: the kind of bound.
        text: the bound in words with numbers; "" for Bound.NONE.
        queue: path of the queue whose limit it is, for Bound.QUEUE and Bound.USER.
        by_gpus: whether GPUs are short; False if only cores or memory are.
    """

    bound: Bound
    text: str
    queue: str = ""
    by_gpus: bool = True


def shortage(demand: Demand, snapshot: Snapshot, held: int = 0) -> Shortage:
    """Return what keeps YARN from granting all executors that a gang still lacks at once, now.

    Args:
        demand: the whole gang.
        snapshot: a snapshot of the ResourceManager.
        held: number of its executors that the gang has; the snapshot counts them as used.
    """
    wanted = demand.executors - held
    bounds, on_nodes = _bounds(demand, snapshot, wanted)
    room, tightest = min(bounds, key=lambda bound: bound[0])
    if room >= wanted:
        return Shortage(Bound.NONE, "")
    if on_nodes[0] < wanted:
        # The nodes lack room too, which depends on other queues and users, whatever else bounds the
        # gang.
        return replace(tightest, bound=on_nodes[1].bound)
    return tightest


def obtainable(container: Amount, snapshot: Snapshot) -> tuple[int, Shortage]:
    """Return how many executors YARN would grant now, and the tightest bound, which stops more.

    This assumes that nobody else asks meanwhile, and that nothing is preempted.

    Args:
        container: what each executor asks for, with at least one GPU.
        snapshot: a snapshot of the ResourceManager.
    """
    most = total(node.total for node in snapshot.running).gpus // container.gpus
    bounds, _ = _bounds(Demand(container, most + 1), snapshot, most + 1)
    room, tightest = min(bounds, key=lambda bound: bound[0])
    return max(room, 0), tightest


_Bound = tuple[int, Shortage]


def _bounds(demand: Demand, snapshot: Snapshot, wanted: int) -> tuple[list[_Bound], _Bound]:
    """Return each bound with its room for executors, and again the bound of the nodes."""
    container = snapshot.granted(demand.container)
    free = {node: node.total - node.used for node in snapshot.running}
    places = {node: places_on(amount, container, demand.spread) for node, amount in free.items()}
    shared_room = sum(room for node, room in places.items() if node.partition != snapshot.partition)
    # The first of equal bounds is reported: more room on nodes would not help against the queue.
    bounds = [_queue(queue, container, wanted, shared_room) for queue in snapshot.queues[:-1]]
    bounds.append(_user(snapshot, container, wanted, shared_room))
    on_nodes = sum(places.values()), _nodes(demand, free, places, container, wanted)
    bounds.append(on_nodes)
    bounds.append(_queue(snapshot.queues[-1], container, wanted, shared_room))
    return bounds, on_nodes


def _queue(queue: Queue, container: Amount, wanted: int, shared_room: int) -> tuple[int, Shortage]:
    left = queue.maximum - queue.used
    _, name, spare, used, most = min(
        (own // each, name, own, used, most)
        for own, each, name, used, most in zip(
            left.parts, container.parts, _NAMES, queue.used.parts, queue.maximum.parts, strict=True
        )
        if each
    )
    each = dict(zip(_NAMES, container.parts, strict=True))[name]
    if spare <= 0:
        text = f"queue {queue.path} is at its limit ({used} of {_counted(most, name)} in use)"
    else:
        text = f"queue {queue.path} has {spare} of {_counted(most, name)} left,"
        text = f"{text} {each * wanted} {_are(each * wanted)} needed"
    missing = Shortage(Bound.QUEUE, text, queue.path, by_gpus=name == _NAMES[0])
    return shared_room + left.room_for(container), missing


def _user(
    snapshot: Snapshot, container: Amount, wanted: int, shared_room: int
) -> tuple[int, Shortage]:
    user, path = snapshot.user, snapshot.queues[0].path
    room = user_room(snapshot, user.used, container, wanted)
    if room:
        text = (
            f"user {user.name} gets {room} more of {count_of(wanted, 'executor')} in queue {path}"
        )
    else:
        text = f"user {user.name} is at the user limit in queue {path}"
    text = f"{text} (has {user.used}, limit {user.limit})"
    return shared_room + room, Shortage(Bound.USER, text, path)


def _nodes(
    demand: Demand,
    free: dict[Node, Amount],
    places: dict[Node, int],
    container: Amount,
    wanted: int,
) -> Shortage:
    spare, whole = total(free.values()), container * wanted
    # The resource that is scarce by nature is named first.
    for name, have, want in zip(_NAMES, spare.parts, whole.parts, strict=True):
        if have < want:
            by_gpus = name == _NAMES[0]
            text = f"{have} of {_counted(want, name)} needed {_are(want)} free"
            # The rest of the message says how many GPUs are free.
            return Shortage(
                Bound.CLUSTER,
                f"needs {_counted(want, name)}" if by_gpus else text,
                by_gpus=by_gpus,
            )
    if demand.spread and sum(places.values()) < wanted:
        nodes = f"{sum(places.values())} of {count_of(wanted, 'node')} needed"
        verb = "has" if wanted == 1 else "have"
        return Shortage(
            Bound.NODES, f"{nodes} {verb} room for an executor ({_each(free, container)})"
        )
    if container.gpus and sum(amount.gpus // container.gpus for amount in free.values()) < wanted:
        return Shortage(Bound.NODES, _scattered(free, container, wanted))
    if container.gpus:
        starved = [
            f"{node.host} has {count_of(amount.gpus, 'GPU')} free but only"
            f" {_lacking(node, amount, container)}"
            for node, amount in free.items()
            if places[node] < amount.gpus // container.gpus
        ]
        return Shortage(Bound.NODES, _first(starved, _NODES_SHOWN, "; "), by_gpus=False)
    return Shortage(Bound.NODES, _scattered(free, container, wanted))


def _scattered(free: dict[Node, Amount], container: Amount, wanted: int) -> str:
    if container.gpus:
        room = sum(amount.gpus // container.gpus for amount in free.values())
        what = count_of(container.gpus, "GPU")
    else:
        room = sum(amount.room_for(container) for amount in free.values())
        what = f"{count_of(container.cores, 'core')} and {container.memory_mib} MiB"
    if room:
        executors = count_of(wanted, "executor")
        return f"room for {room} of {executors} with {what} each ({_each(free, container)})"
    return f"no node with {what} free ({_each(free, container)})"


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


def _counted(number: int, name: str) -> str:
    return f"{number} MiB" if name == "MiB" else count_of(number, name)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _lacking(node: Node, free: Amount, container: Amount) -> str:
    fit = free.gpus // container.gpus
    lacks = [
        f"{own} of {_counted(whole, name)}"
        for name, own, each, whole in zip(
            _NAMES, free.parts, container.parts, node.total.parts, strict=True
        )
        if own < each * fit
    ]
    return " and ".join(lacks)


def _first(parts: Iterable[str], most: int, between: str) -> str:
    listed = list(parts)
    more = [f"and {len(listed) - most} more"] if len(listed) > most else []
    return between.join(listed[:most] + more)
