"""Why a gang cannot be granted now: what is missing, who has it, what is free. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hopsgpu.cluster_managers.demand import Demand
from hopsgpu.cluster_managers.resources import Amount, total
from hopsgpu.cluster_managers.shortage import Shortage
from hopsgpu.cluster_managers.snapshot import App, Snapshot
from hopsgpu.core.queue_policy import Bound
from hopsgpu.core.wait_reasons import (
    LONGEST_SENTENCE,
    NO_WAIT,
    WaitReason,
    capitalise,
    name_application,
)
from hopsgpu.units import count_of

_HOLDERS_SHOWN = 3
_DAY_SECONDS = 86400.0
_CPU_EXECUTORS = "Spark ends its CPU executors once they are idle and keep no shuffle files"


def shortage_reason(
    snapshot: Snapshot,
    demand: Demand,
    missing: Shortage,
    held: int,
    now: float,
    why_requested: str | None = None,
) -> WaitReason:
    """Return why the cluster manager cannot grant the missing executors of a gang now.

    Args:
        missing: the tightest bound.
        held: number of executors that the gang has.
        now: seconds since the epoch.
        why_requested: why the executors are requested although they do not fit, "" if they fitted;
            None if they are not requested.
    """
    if missing.bound is Bound.NONE:
        return NO_WAIT
    has_gpus = demand.container.gpus > 0
    held_resources = snapshot.granted_size(demand.container) * held
    is_by_gpus = has_gpus and missing.is_gpu_shortage
    holders = _holders(snapshot, missing, held_resources, held, is_by_gpus=is_by_gpus)
    what = capitalise(missing.text)
    first = holders[0] if holders else None
    sentence = what
    for phrase in () if first is None else (first.phrase(now, len(holders) - 1), first.short):
        if len(longer := f"{what}; {phrase}") <= LONGEST_SENTENCE:
            sentence = longer
            break
    details = [missing.details, _used_by(holders, now), _free(snapshot, missing, has_gpus=has_gpus)]
    if first is not None and first.note:
        details.append(first.note)
    if why_requested:
        details.insert(0, f"requested nevertheless: {why_requested}")
    elif why_requested is None and is_by_gpus and demand.executors - held > 1:
        details.append("takes none before it can have all")
    lack = " of ".join(filter(None, (missing.lack, first.lack if first else "")))
    return WaitReason(sentence, (), lack).with_details(*details)


@dataclass(frozen=True)
class _Holder:
    """An application that has what is missing, or all that are not shown.

    Attributes:
        who: the application, for people.
        size: what it has, with units.
        id: the cluster manager's ID; "" for this application and for those that are not shown.
        started: when it was submitted, in seconds since the epoch; 0.0 if that is unknown.
        note: what will end its hold; "" if that is unknown.
    """

    who: str
    size: str
    id: str = ""
    started: float = 0.0
    note: str = ""

    @property
    def short(self) -> str:
        return f"{self.who} uses {self.size}"

    @property
    def lack(self) -> str:
        return self.id or self.who

    def phrase(self, now: float, other_count: int) -> str:
        since = f" (started {_clock_time(self.started, now)})" if self.started else ""
        more = ", others the rest" if other_count else ""
        return f"{self.who}{since} uses {self.size}{more}"

    def detail(self, now: float) -> str:
        since = f"since {_clock_time(self.started, now)}" if self.started else ""
        about = ", ".join(filter(None, (self.size, self.id, since)))
        return f"{self.who} ({about})"


def _used_by(holders: Sequence[_Holder], now: float) -> str:
    if not holders:
        return ""
    shown = [holder.detail(now) for holder in holders[:_HOLDERS_SHOWN]]
    if len(holders) > _HOLDERS_SHOWN:
        shown.append(f"{len(holders) - _HOLDERS_SHOWN} more")
    return f"used by {', '.join(shown)}"


def _clock_time(seconds: float, now: float) -> str:
    """Return a local time: "12:16" within a day, else "Nov 28 12:16"."""
    form = "%H:%M" if now - seconds < _DAY_SECONDS else "%b %d %H:%M"
    return time.strftime(form, time.localtime(seconds))


def _free(snapshot: Snapshot, missing: Shortage, *, has_gpus: bool) -> str:
    """Return what is free, without the numbers that the sentence has.

    For example "4 of 8 GPUs free, 0 of 4 in queue root.a".
    """
    nodes = snapshot.running
    resources, used = total(n.total for n in nodes), total(n.used for n in nodes)
    what = "GPUs free" if has_gpus else "free"
    free = [f"{_of(resources - used, resources, has_gpus)} {what}"]
    is_whole = any(
        queue.path == missing.queue and resources.is_within(queue.maximum)
        for queue in snapshot.queues
    )
    # For a queue that may have the whole cluster, its rest equals what is free.
    if is_whole or (missing.bound is Bound.CLUSTER and not missing.queue):
        free = []
    for queue in snapshot.queues[:-1]:
        # The rest of a queue that may have the whole cluster does not limit anything.
        if queue.path != missing.queue and not resources.is_within(queue.maximum):
            remaining = queue.maximum - queue.used
            free.append(f"{_of(remaining, queue.maximum, has_gpus)} in queue {queue.path}")
    return ", ".join(free)


def _of(free: Amount, total_: Amount, has_gpus: bool) -> str:
    if has_gpus:
        return f"{max(free.gpus, 0)} of {total_.gpus}"
    cores = f"{max(free.cores, 0)} of {count_of(total_.cores, 'core')}"
    return f"{cores} and {max(free.memory_mib, 0)} of {total_.memory_mib} MiB"


def _holders(
    snapshot: Snapshot, missing: Shortage, held_resources: Amount, held: int, *, is_by_gpus: bool
) -> list[_Holder]:
    """Return who has what the gang misses, the largest first, below the limit that binds it."""

    def key(amount: Amount) -> tuple[int, ...]:
        return amount.parts[:1] if is_by_gpus else amount.parts[1:]

    is_setting = any(q.is_setting and q.path == missing.queue for q in snapshot.queues)
    # Only this application counts against a setting of its own.
    below = [
        app
        for app in snapshot.applications
        if _is_below(app.queue, missing.queue)
        and (app.id == snapshot.application_id or not is_setting)
    ]
    # Do not count the gang's own containers as holders.
    apps = [
        replace(app, used=app.used - held_resources, containers=app.containers - held)
        if app.id == snapshot.application_id
        else app
        for app in below
    ]
    holding = [app for app in apps if any(part > 0 for part in key(app.used))]
    holding.sort(key=lambda app: key(app.used), reverse=True)
    holders = [_holder(app, snapshot.application_id, is_by_gpus) for app in holding]
    in_queue = (queue.used for queue in snapshot.queues if queue.path == missing.queue)
    used = next(in_queue, total(node.used for node in snapshot.running))
    hidden = used - total(app.used for app in below)
    if key(hidden)[0] > 0:
        # Resources count as used until the node has reported the end of the container.
        who = "an application that is not shown or just ended"
        holders.append(_Holder(who, _size(hidden, is_by_gpus)))
    return holders


def _is_below(path: str, queue: str) -> bool:
    """Return whether a queue is another one or below it; a path without its parents may be."""
    return "." not in path or f"{path}.".startswith(f"{queue}.") or not queue


def _holder(app: App, own_id: str, has_gpus: bool) -> _Holder:
    size = _size(app.used, has_gpus)
    if app.id == own_id:
        # More containers than the application master.
        note = _CPU_EXECUTORS if not has_gpus and app.containers > 1 else ""
        return _Holder("this application", size, note=note)
    # People know the application's name; `yarn application -kill` takes its ID.
    return _Holder(name_application(app.name, app.user, app.id), size, app.id, app.started)


def _size(amount: Amount, has_gpus: bool) -> str:
    return (
        count_of(amount.gpus, "GPU")
        if has_gpus
        else f"{count_of(amount.cores, 'core')}, {amount.memory_mib} MiB"
    )
