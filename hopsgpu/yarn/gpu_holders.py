"""What is free, and who holds the rest. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hopsgpu.units import count_of
from hopsgpu.yarn.demand import Demand
from hopsgpu.yarn.resources import Amount, total
from hopsgpu.yarn.snapshot import App, Snapshot

_HOLDERS_SHOWN = 3
_CPU_EXECUTORS = "Spark ends its CPU executors once they are idle and keep no shuffle files"


@dataclass(frozen=True)
class GpuFacts:
    """Who holds what a gang waits for, and what is free.

    Attributes:
        holders: who holds it; "" if nobody does.
        free: what is free in the cluster, and in the queues whose limits are below the whole
            cluster.
        short: the resource of which there is too little, in words; "" if there is enough, or if the
            caller says it.
    """

    holders: str
    free: str
    short: str = ""

    def around(self, *why: str) -> str:
        """Return one line: who holds the rest, why that is too much, what is free."""
        return "; ".join(part for part in (self.holders, *why, self.short, self.free) if part)


def waiting_facts(
    snapshot: Snapshot,
    demand: Demand,
    held: int = 0,
    named_queue: str = "",
    *,
    by_gpus: bool = True,
) -> GpuFacts:
    """Return what is free, and who holds the rest.

    These are GPUs if the gang wants some, else cores and memory.

    Args:
        snapshot: a snapshot of the ResourceManager.
        demand: the whole gang.
        held: number of its executors that the gang has.
        named_queue: path of a queue whose limit the message names already.
        by_gpus: False if a gang with GPUs lacks only cores or memory, whose holders are then named.
    """
    with_gpus = demand.container.gpus > 0
    nodes, whole = snapshot.running, total(node.total for node in snapshot.running)
    used = total(node.used for node in nodes)
    # For example "4 of 8 GPUs free, 0 of 4 in queue root.a".
    what = "GPUs free" if with_gpus else "free"
    free = [f"{_of(whole - used, whole, with_gpus)} {what}"]
    if any(queue.path == named_queue and whole.within(queue.maximum) for queue in snapshot.queues):
        # If that queue may have the whole cluster, what it has left is what is free.
        free = []
    for queue in snapshot.queues[:-1]:
        # If a queue may have the whole cluster, what it lacks does not tell what it can get.
        if queue.path != named_queue and not whole.within(queue.maximum):
            left = queue.maximum - queue.used
            free.append(f"{_of(left, queue.maximum, with_gpus)} in queue {queue.path}")
    own = snapshot.granted(demand.container) * held
    holders = _holders(snapshot, used, own, held, with_gpus and by_gpus)
    return GpuFacts(holders, ", ".join(free))


def _of(free: Amount, whole: Amount, with_gpus: bool) -> str:
    if with_gpus:
        return f"{max(free.gpus, 0)} of {whole.gpus}"
    cores = f"{max(free.cores, 0)} of {count_of(whole.cores, 'core')}"
    return f"{cores} and {max(free.memory_mib, 0)} of {whole.memory_mib} MiB"


def _holders(snapshot: Snapshot, used: Amount, own: Amount, held: int, with_gpus: bool) -> str:
    def key(amount: Amount) -> tuple[int, ...]:
        return amount.parts[:1] if with_gpus else amount.parts[1:]

    # What the gang itself has is not what it waits for.
    apps = [
        replace(app, used=app.used - own, containers=app.containers - held)
        if app.id == snapshot.application_id
        else app
        for app in snapshot.applications
    ]
    holding = [app for app in apps if any(part > 0 for part in key(app.used))]
    holding.sort(key=lambda app: key(app.used), reverse=True)
    texts = [_holder(app, snapshot.application_id, with_gpus) for app in holding]
    shown = texts[:_HOLDERS_SHOWN]
    if len(texts) > _HOLDERS_SHOWN:
        shown.append(f"{len(texts) - _HOLDERS_SHOWN} more")
    hidden = used - total(app.used for app in snapshot.applications)
    if key(hidden)[0] > 0:
        # A node's share counts as used until the node has reported the container's end.
        size = _size(hidden, with_gpus)
        shown.append(f"applications that are not shown or just ended ({size})")
    return f"held by {', '.join(shown)}" if shown else ""


def _holder(app: App, own_id: str, with_gpus: bool) -> str:
    size = _size(app.used, with_gpus)
    if app.id == own_id and not with_gpus and app.containers > 1:
        # Besides the application master.
        return f"this application ({size}; {_CPU_EXECUTORS})"
    if app.id == own_id:
        return f"this application ({size})"
    # Its name tells a person more; its id is what `yarn application -kill` takes.
    if app.name:
        return f"'{app.name}' of {app.user} ({size}, {app.id})"
    return f"{app.id} of {app.user} ({size})"


def _size(amount: Amount, with_gpus: bool) -> str:
    return (
        count_of(amount.gpus, "GPU")
        if with_gpus
        else f"{count_of(amount.cores, 'core')}, {amount.memory_mib} MiB"
    )
