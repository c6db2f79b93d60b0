"""The message why a gang waits: who holds the resources, what is scarce, what is free. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hopsgpu.units import count_of
from hopsgpu.yarn.demand import Demand
from hopsgpu.yarn.resources import Amount, total
from hopsgpu.yarn.snapshot import App, Snapshot

_HOLDERS_SHOWN = 3
_CPU_EXECUTORS = "Spark ends its CPU executors once they are idle and keep no shuffle files"


@dataclass(frozen=True)
class WaitFacts:
    """The parts of the message why a gang waits.

    Attributes:
        holders: who holds the resources; "" if nobody does.
        free: what is free in the cluster, and in queues whose limits are below the whole cluster.
        short: the scarce resource; "" if there is enough, or if the caller names it.
    """

    holders: str
    free: str
    short: str = ""

    def message(self, *why: str) -> str:
        """Return the message in one line, with further reasons after the holders."""
        return "; ".join(part for part in (self.holders, *why, self.short, self.free) if part)


def wait_facts(
    snapshot: Snapshot,
    demand: Demand,
    held: int = 0,
    named_queue: str = "",
    *,
    is_gpu_shortage: bool = True,
) -> WaitFacts:
    """Return the holders and what is free: GPUs if the gang wants some, else cores and memory.

    Args:
        held: number of executors that the gang has.
        named_queue: path of a queue whose limit the message names already.
        is_gpu_shortage: False if a gang with GPUs lacks only cores or memory; then the holders of
            these are named.
    """
    has_gpus = demand.container.gpus > 0
    nodes, resources = snapshot.running, total(node.total for node in snapshot.running)
    used = total(node.used for node in nodes)
    # For example "4 of 8 GPUs free, 0 of 4 in queue root.a".
    what = "GPUs free" if has_gpus else "free"
    free = [f"{_of(resources - used, resources, has_gpus)} {what}"]
    if any(
        queue.path == named_queue and resources.is_within(queue.maximum)
        for queue in snapshot.queues
    ):
        # For a queue that may have the whole cluster, its rest equals what is free.
        free = []
    for queue in snapshot.queues[:-1]:
        # The rest of a queue that may have the whole cluster does not limit anything.
        if queue.path != named_queue and not resources.is_within(queue.maximum):
            remaining = queue.maximum - queue.used
            free.append(f"{_of(remaining, queue.maximum, has_gpus)} in queue {queue.path}")
    held_resources = snapshot.granted_size(demand.container) * held
    holders = _holders(snapshot, used, held_resources, held, has_gpus and is_gpu_shortage)
    return WaitFacts(holders, ", ".join(free))


def _of(free: Amount, total_: Amount, has_gpus: bool) -> str:
    if has_gpus:
        return f"{max(free.gpus, 0)} of {total_.gpus}"
    cores = f"{max(free.cores, 0)} of {count_of(total_.cores, 'core')}"
    return f"{cores} and {max(free.memory_mib, 0)} of {total_.memory_mib} MiB"


def _holders(
    snapshot: Snapshot, used: Amount, held_resources: Amount, held: int, has_gpus: bool
) -> str:
    def key(amount: Amount) -> tuple[int, ...]:
        return amount.parts[:1] if has_gpus else amount.parts[1:]

    # Do not count the gang's own containers as holders.
    apps = [
        replace(app, used=app.used - held_resources, containers=app.containers - held)
        if app.id == snapshot.application_id
        else app
        for app in snapshot.applications
    ]
    holding = [app for app in apps if any(part > 0 for part in key(app.used))]
    holding.sort(key=lambda app: key(app.used), reverse=True)
    texts = [_holder(app, snapshot.application_id, has_gpus) for app in holding]
    shown = texts[:_HOLDERS_SHOWN]
    if len(texts) > _HOLDERS_SHOWN:
        shown.append(f"{len(texts) - _HOLDERS_SHOWN} more")
    hidden = used - total(app.used for app in snapshot.applications)
    if key(hidden)[0] > 0:
        # Resources count as used until the node has reported the end of the container.
        size = _size(hidden, has_gpus)
        shown.append(f"applications that are not shown or just ended ({size})")
    return f"held by {', '.join(shown)}" if shown else ""


def _holder(app: App, own_id: str, has_gpus: bool) -> str:
    size = _size(app.used, has_gpus)
    if app.id == own_id and not has_gpus and app.containers > 1:
        # More containers than the application master.
        return f"this application ({size}; {_CPU_EXECUTORS})"
    if app.id == own_id:
        return f"this application ({size})"
    # People know the application's name; `yarn application -kill` takes its ID.
    if app.name:
        return f"'{app.name}' of {app.user} ({size}, {app.id})"
    return f"{app.id} of {app.user} ({size})"


def _size(amount: Amount, has_gpus: bool) -> str:
    return (
        count_of(amount.gpus, "GPU")
        if has_gpus
        else f"{count_of(amount.cores, 'core')}, {amount.memory_mib} MiB"
    )
