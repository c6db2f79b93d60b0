"""The hosts on which a gang best asks for its executors. Pure."""

from __future__ import annotations

import itertools

from hopsgpu.yarn.demand import Demand
from hopsgpu.yarn.snapshot import Snapshot


def preferred_hosts(demand: Demand, snapshot: Snapshot) -> tuple[str, ...]:
    """Return a host for each executor, as far as there is room now.

    With `spread`, the nodes differ; otherwise each executor goes to the fullest node that has room
    for it, so that large nodes stay whole for gangs that need them.

    Args:
        demand: the executors.
        snapshot: a snapshot of the ResourceManager.

    Returns:
        Hosts, one per executor. If not all executors find room, the result is empty and YARN
            chooses; but if only some hosts will do, the result is those in turn, the one with the
            most free GPUs first.
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
            if snapshot.hosts is None:
                return ()
            room = {node.host: (node.total - node.used).gpus for node in snapshot.running}
            by_room = sorted(snapshot.hosts, key=lambda host: (-room.get(host, 0), host))
            return tuple(itertools.islice(itertools.cycle(by_room), demand.executors))
        host = min(fitting, key=lambda h: (free[h].gpus, free[h].memory_mib, h))
        free[host] = free[host] - one
        chosen.append(host)
    return tuple(chosen)
