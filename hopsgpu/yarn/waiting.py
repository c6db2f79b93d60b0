"""What is free, and who holds the rest. Pure."""

from __future__ import annotations

from hopsgpu.units import counted
from hopsgpu.yarn.amounts import Amount, total
from hopsgpu.yarn.demand import Demand
from hopsgpu.yarn.snapshot import App, Snapshot

_HOLDERS_SHOWN = 3


def waiting_facts(snapshot: Snapshot, demand: Demand) -> str:
    """One line: what is free in the cluster and in the queue, and who holds the rest.

    Of GPUs where the gang wants some, else of cores and memory.
    """
    with_gpus = demand.container.gpus > 0
    nodes, whole = snapshot.running, total(node.total for node in snapshot.running)
    used = total(node.used for node in nodes)
    where = [f"{_of(whole - used, whole, with_gpus)} in the cluster"]
    for queue in snapshot.queues[:-1]:
        if queue is snapshot.queues[0] or not whole.within(queue.maximum):
            left = _of(queue.maximum - queue.used, queue.maximum, with_gpus)
            where.append(f"{left} in queue {queue.path}")
    what = "GPUs free" if with_gpus else "free"
    return f"{what}: {', '.join(where)}{_holders(snapshot, used, with_gpus)}"


def _of(free: Amount, whole: Amount, with_gpus: bool) -> str:
    if with_gpus:
        return f"{max(free.gpus, 0)} of {whole.gpus}"
    cores = f"{max(free.cores, 0)} of {counted(whole.cores, 'core')}"
    return f"{cores} and {max(free.memory_mib, 0)} of {whole.memory_mib} MiB"


def _holders(snapshot: Snapshot, used: Amount, with_gpus: bool) -> str:
    def key(amount: Amount) -> tuple[int, ...]:
        return amount.parts[:1] if with_gpus else amount.parts[1:]

    holding = [app for app in snapshot.applications if any(key(app.used))]
    holding.sort(key=lambda app: key(app.used), reverse=True)
    said = [_holder(app, snapshot.application_id, with_gpus) for app in holding]
    shown = said[:_HOLDERS_SHOWN]
    if len(said) > _HOLDERS_SHOWN:
        shown.append(f"and {len(said) - _HOLDERS_SHOWN} more")
    hidden = used - total(app.used for app in snapshot.applications)
    if key(hidden)[0] > 0:
        # A node's share is used until the node has reported the container's end.
        size = _size(hidden, with_gpus)
        shown.append(f"applications that are not shown or just ended ({size})")
    return f"; held by {', '.join(shown)}" if shown else ""


def _holder(app: App, own: str, with_gpus: bool) -> str:
    if app.id == own:
        return f"this application ({_size(app.used, with_gpus)})"
    name = f" '{app.name}'" if app.name else ""
    return f"{app.id}{name} of {app.user} ({_size(app.used, with_gpus)})"


def _size(amount: Amount, with_gpus: bool) -> str:
    return (
        f"{amount.gpus}"
        if with_gpus
        else f"{counted(amount.cores, 'core')}, {amount.memory_mib} MiB"
    )
