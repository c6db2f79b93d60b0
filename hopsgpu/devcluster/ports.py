"""Chooses free ports by binding them, and holds a port until the daemon has bound it too."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hopsgpu.devcluster.layout import (
    CONTAINERD,
    DATANODE,
    DOCKERD,
    FAILOVER_CONTROLLERS,
    KDC,
    KUBERNETES_DAEMONS,
    MASTER,
    NAMENODES,
    RESOURCEMANAGERS,
    SPARK_MASTERS,
    ZOOKEEPER,
    address_of,
)
from hopsgpu.errors import ClusterError

_MASTER_PORTS = {
    KDC: ("rpc",),
    # Both listen on Unix sockets.
    **dict.fromkeys((CONTAINERD, DOCKERD), ()),
    ZOOKEEPER: ("rpc",),
    **dict.fromkeys(NAMENODES, ("rpc", "web")),
    **dict.fromkeys(FAILOVER_CONTROLLERS, ("rpc",)),
    DATANODE: ("data", "ipc", "web"),
    **dict.fromkeys(RESOURCEMANAGERS, ("rpc", "scheduler", "tracker", "admin", "web")),
    **dict.fromkeys(SPARK_MASTERS, ("rpc", "web")),
    # In a network of their own, all ports are free.
    **dict.fromkeys(KUBERNETES_DAEMONS, ()),
}
_NODE_PORTS, _WORKER_PORTS = ("rpc", "localizer", "web"), ("rpc", "web")
_MIN_PORT = 10240
_MAX_TRIES = 200


def port_names(daemons: Collection[str]) -> tuple[str, ...]:
    """Return every port of a cluster's daemons, as "daemon.use"."""
    of_nodes: tuple[str, ...] = _NODE_PORTS
    if not set(SPARK_MASTERS).isdisjoint(daemons):
        of_nodes = _WORKER_PORTS
    elif not set(KUBERNETES_DAEMONS).isdisjoint(daemons):
        of_nodes = ()
    return tuple(
        f"{daemon}.{use}" for daemon in daemons for use in _MASTER_PORTS.get(daemon, of_nodes)
    )


def candidates(ephemeral_from: int, rng: random.Random) -> Iterator[int]:
    """Yield new ports to try; after some tries yield 0 ("any").

    Ports below the ephemeral range come first: no outgoing connection takes these while the cluster
    is down.
    """
    if ephemeral_from > _MIN_PORT + 1000:
        for _ in range(_MAX_TRIES):
            yield rng.randrange(_MIN_PORT, ephemeral_from)
    yield 0


@contextmanager
def held_ports(
    names: Sequence[str],
    before: Mapping[str, int],
    rng: random.Random | None = None,
    master: str = MASTER,
) -> Iterator[dict[str, int]]:
    """Hold one free port for each name, the previous one if it is still free; yield the ports.

    A new port is bound without SO_REUSEADDR, so two clusters never choose the same port. A previous
    port is bound with this option, because old connections may still occupy the port. The option is
    then set on every held port. The daemon also sets it, so it can bind the held port.

    Args:
        names: names as in `port_names`; the daemon's name determines the address.
        before: previous ports.
        master: the address of all daemons but those of nodes.
    """
    rng = rng or random.Random()
    ephemeral = _ephemeral_from()
    with ExitStack() as stack:
        ports: dict[str, int] = {}
        # Previous ports first: otherwise another name could get one of them.
        for name in sorted(names, key=lambda name: name not in before):
            address = address_of(name.partition(".")[0], master)
            holder = _hold(address, before.get(name), candidates(ephemeral, rng))
            stack.enter_context(holder)
            ports[name] = int(holder.getsockname()[1])
        yield {name: ports[name] for name in names}


def _hold(address: str, before: int | None, fresh: Iterator[int]) -> socket.socket:
    for port in itertools.chain([before] if before else [], fresh):
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port == before))
            holder.bind((address, port))
        except OSError as e:
            holder.close()
            refused = e
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return holder
    raise ClusterError(f"no free port on {address}: {refused}")


def _ephemeral_from() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
