"""YARN's queues: one with its parents, what others can lose to it, what takes applications."""

from __future__ import annotations

from collections.abc import Sequence

from hopsgpu.cluster_managers.resources import NOTHING, Amount, total
from hopsgpu.cluster_managers.snapshot import Queue
from hopsgpu.errors import CapacityError, HopsGpuError


def chain_of(queues: Sequence[Queue], name: str) -> tuple[Queue, ...]:
    """Return a queue and its parents, up to the root.

    Args:
        name: the queue's path, or the last part of it.

    Raises:
        HopsGpuError: no queue has the name, or several have it.
    """
    matches = _find_queues(queues, name)
    if len(matches) != 1:
        raise HopsGpuError(
            f"the ResourceManager has {'several queues' if matches else 'no queue'} {name}; it has:"
            f" {', '.join(q.path for q in queues)}"
        )
    by_path = {queue.path: queue for queue in queues}
    parts = matches[0].path.split(".")
    paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return tuple(by_path[path] for path in paths if path in by_path)


def preemptable_amount(queues: Sequence[Queue], path: str) -> Amount:
    """Return what YARN may take from other leaf queues for one: what they have above their shares.

    Args:
        path: path of the one queue.
    """
    preemptable = (q for q in queues if q.is_leaf and q.is_preemptable and q.path != path)
    return total((q.used - q.share).max_with(NOTHING) for q in preemptable)


def _find_queues(queues: Sequence[Queue], name: str) -> list[Queue]:
    # The CapacityScheduler accepts "x" for "root.p.x", but does not know "p.x".
    exact = [queue for queue in queues if queue.path == name]
    return exact or [queue for queue in queues if queue.path.rpartition(".")[2] == name]


def queue_path(name: str, paths: Sequence[str]) -> str:
    """Return the path of a queue, which an application may name by the last part alone.

    Args:
        name: the queue, as the application named it; "" for none.
    """
    if not name or name in paths:
        return name
    ending = [path for path in paths if path.rpartition(".")[2] == name]
    if len(ending) == 1:
        return ending[0]
    # The queue was removed, or the ResourceManager has not answered yet.
    return name if name == "root" or name.startswith("root.") else f"root.{name}"


def check_queue(name: str, queues: Sequence[Queue]) -> None:
    """Check that an application can be submitted to a queue.

    A missing queue passes if the scheduler can create it. A missing "default" passes too, because
    the CapacityScheduler may map that name to another queue.

    Raises:
        CapacityError: the queue is unknown, ambiguous or a parent, or it or a parent does not run.
    """
    matches = _find_queues(queues, name)
    if not matches:
        if name == "default" or _can_be_created(queues, name):
            return
        raise _refusal(f"there is no queue {name}", queues)
    if len(matches) > 1:
        raise _refusal(f"queue {name} is ambiguous: {', '.join(q.path for q in matches)}", queues)
    queue = matches[0]
    if not queue.is_leaf:
        raise _refusal(f"queue {queue.path} is a parent and takes no applications", queues)
    for ancestor in chain_of(queues, queue.path):
        if ancestor.state != "RUNNING":
            raise _refusal(
                f"queue {ancestor.path} is {ancestor.state} and takes no new applications", queues
            )


def _can_be_created(queues: Sequence[Queue], name: str) -> bool:
    full = name if name.partition(".")[0] == "root" else f"root.{name}"
    return any(queue.can_create_children and full.startswith(f"{queue.path}.") for queue in queues)


def _refusal(problem: str, queues: Sequence[Queue]) -> CapacityError:
    leaves = (chain_of(queues, queue.path) for queue in queues if queue.is_leaf)
    run = [chain[0].path for chain in leaves if all(queue.state == "RUNNING" for queue in chain)]
    return CapacityError(
        f"{problem}. Running queues: {', '.join(run) or 'none'}; name one in spark.yarn.queue"
    )
