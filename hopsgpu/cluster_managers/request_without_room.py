"""Whether YARN may grant a gang that does not fit now, if the gang requests it anyway. Pure.

Such a request takes what is free, and other gangs cannot use it meanwhile. Therefore a gang makes
it only where it can change what YARN grants.
"""

from __future__ import annotations

from hopsgpu.cluster_managers.demand import Demand, user_capacity
from hopsgpu.cluster_managers.resources import Amount, exceeds_share, total
from hopsgpu.cluster_managers.shortage import Shortage
from hopsgpu.cluster_managers.snapshot import Snapshot
from hopsgpu.core.queue_policy import Bound


def why_request_without_room(
    demand: Demand, snapshot: Snapshot, missing: Shortage, held: int = 0
) -> str:
    """Return why YARN may grant a gang that does not fit; "" if a request cannot help.

    Args:
        missing: the gang's tightest bound in this snapshot.
        held: number of executors that the gang has.
    """
    if missing.bound is Bound.NONE:
        return ""
    if _can_preempt(demand, snapshot, missing, held):
        return "YARN preempts other queues that are above their shares"
    if _is_limit_exceeded(snapshot, missing):
        return f"more is used than the limit in {_title(snapshot, missing)} allows"
    return ""


def _title(snapshot: Snapshot, missing: Shortage) -> str:
    titles = (queue.title for queue in snapshot.queues if queue.path == missing.queue)
    return next(titles, f"queue {missing.queue}")


def _can_preempt(demand: Demand, snapshot: Snapshot, missing: Shortage, held: int) -> bool:
    """Return whether YARN can preempt enough for the whole gang.

    YARN preempts for a queue only until it has its share. A gang that needs more would get a part,
    and the preempted work would be lost for nothing.
    """
    container, wanted = snapshot.granted_size(demand.container), demand.executors - held
    has_gpus = missing.is_gpu_shortage and container.gpus > 0

    def scarce(amount: Amount) -> Amount:
        if has_gpus:
            return Amount(amount.gpus, 0, 0)
        return Amount(0, amount.cores, amount.memory_mib)

    free = total(node.total - node.used for node in snapshot.running)
    obtainable = scarce(free + snapshot.preemptable)
    shares = [scarce(queue.share - queue.used) for queue in snapshot.queues[:-1]]
    return (
        any(scarce(snapshot.preemptable).parts)
        and obtainable.capacity_for(scarce(container)) >= wanted
        and any(share.capacity_for(scarce(container)) >= wanted for share in shares)
        and user_capacity(snapshot, snapshot.user.used, container, wanted) >= wanted
    )


def _is_limit_exceeded(snapshot: Snapshot, missing: Shortage) -> bool:
    """Return whether more is used than the limit that binds the gang allows.

    Then the numbers have proved wrong: YARN does not enforce that limit. YARN itself exceeds the
    limit of a user by one container.
    """
    match missing.bound:
        case Bound.QUEUE:
            return any(
                not queue.used.is_within(queue.maximum)
                for queue in snapshot.queues
                if queue.path == missing.queue
            )
        case Bound.USER:
            limit = snapshot.user.limit
            without_last = snapshot.user.used - snapshot.largest
            return limit is not None and exceeds_share(without_last, limit, snapshot.cluster)
    return False
