"""Where a gang's executors are best asked for: pure."""

from __future__ import annotations

from hopsgpu.yarn.demand import Demand
from hopsgpu.yarn.snapshot import Snapshot


def preferred_hosts(demand: Demand, snapshot: Snapshot) -> tuple[str, ...]:
    """A host for each executor, as far as there is room now.

    Spread takes nodes that differ; otherwise each executor goes to the fullest node that has
    room for it, so that large nodes stay whole for those who need them.

    Args:
        demand: the executors.
        snapshot: a look at the ResourceManager.

    Returns:
        Hosts, one per executor; empty where not all find room, which leaves it to YARN.
    """
    one = snapshot.granted(demand.container)
    free = {node.host: node.total - node.used for node in snapshot.running}
    chosen: list[str] = []
    for _ in range(demand.executors):
        fitting = [
            host
            for host, left in free.items()
            if one.within(left) and not (demand.spread and host in chosen)
        ]
        if not fitting:
            return ()
        host = min(fitting, key=lambda h: (free[h].gpus, free[h].memory_mib, h))
        free[host] = free[host] - one
        chosen.append(host)
    return tuple(chosen)
