"""The preferred hosts of a gang's executors. Pure."""

from __future__ import annotations

import itertools

from hopsgpu.cluster_managers.demand import Demand
from hopsgpu.cluster_managers.snapshot import Snapshot


def preferred_hosts(demand: Demand, snapshot: Snapshot) -> tuple[str, ...]:
    """Return a host for each executor, if all executors fit now.

    The nodes of a spread gang differ. Otherwise each executor goes to the fullest node with enough
    capacity, so that large nodes stay free for gangs that need them.

    Returns:
        Hosts, one per executor. If not all executors fit, the result is empty, and the cluster
        manager chooses; but for a snapshot with limited hosts, the result is these hosts in turn,
        the one with the most free GPUs first.
    """
    container = snapshot.granted_size(demand.container)
    free = {node.host: node.total - node.used for node in snapshot.running}
    chosen: list[str] = []
    for _ in range(demand.executors):
        fitting = [
            host
            for host, amount in free.items()
            if container.is_within(amount) and not (demand.is_spread and host in chosen)
        ]
        if not fitting:
            if snapshot.hosts is None:
                return ()
            gpus = {node.host: (node.total - node.used).gpus for node in snapshot.running}
            hosts = sorted(snapshot.hosts, key=lambda host: (-gpus.get(host, 0), host))
            return tuple(itertools.islice(itertools.cycle(hosts), demand.executors))
        host = min(fitting, key=lambda h: (free[h].gpus, free[h].memory_mib, h))
        free[host] = free[host] - container
        chosen.append(host)
    return tuple(chosen)
