"""The status of a cluster: daemons from their processes, nodes from the cluster manager."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hopsgpu.devcluster import probe
from hopsgpu.devcluster.docker import socket_of
from hopsgpu.devcluster.layout import ClusterLayout, address_of
from hopsgpu.devcluster.state import ClusterState, load


@dataclass(frozen=True)
class DaemonStatus:
    """The status of a daemon; `rpc` is host:port, and `web` the URL of its pages, or ""."""

    name: str
    pid: int
    alive: bool
    rpc: str
    web: str
    log: str


@dataclass(frozen=True)
class ClusterStatus:
    """A cluster at one moment.

    Attributes:
        healthy: whether every daemon is alive, and every node runs according to the
            ResourceManager or Master.
        resourcemanager_answers: whether the ResourceManager, or an ALIVE Master, answers; if not,
            the nodes are unknown.
        masters: Master → its state, such as "ALIVE" or "STANDBY", "" if it does not answer; empty
            on YARN.
        gpus: "real", "simulated" or "none", and why.
    """

    directory: str
    running: bool
    healthy: bool
    resourcemanager_answers: bool
    gpus: str
    gpus_total: int
    gpus_used: int
    daemons: tuple[DaemonStatus, ...]
    nodes: tuple[probe.NodeStatus, ...]
    masters: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def status(dir: str | Path | None = None) -> ClusterStatus:
    """Return the status of a cluster, from its processes and its ResourceManager or Masters."""
    layout = ClusterLayout.at(dir)
    state = load(layout)
    daemons = _daemons(layout, state) if state else ()
    ask = probe.probe_of(layout, state) if state and daemons else None
    reported = ask.nodes() if ask else None
    dead = {d.name for d in daemons if not d.alive}
    # The ResourceManager takes ten minutes to notice that a NodeManager has ended, and a Master
    # that was started again 10 s for a Worker.
    nodes = [replace(n, state="DEAD") if n.name in dead else n for n in reported or ()]
    running = [n for n in nodes if n.is_running]
    return ClusterStatus(
        directory=str(layout.root),
        running=any(d.alive for d in daemons),
        healthy=bool(state and daemons and not state.missing and len(running) >= state.spec.nodes),
        resourcemanager_answers=reported is not None,
        gpus=state.gpus if state and daemons else "none",
        gpus_total=sum(n.gpus for n in running),
        gpus_used=sum(n.gpus_used for n in running),
        daemons=daemons,
        nodes=tuple(nodes),
        masters=ask.masters() if ask else {},
    )


def _daemons(layout: ClusterLayout, state: ClusterState) -> tuple[DaemonStatus, ...]:
    daemons = []
    for name, process in state.processes.items():
        address, ports = address_of(name), state.ports
        web = ports.get(f"{name}.web")
        rpc = ports.get(f"{name}.rpc") or ports.get(f"{name}.data")
        daemons.append(
            DaemonStatus(
                name=name,
                pid=process.pid,
                alive=process.alive,
                # containerd and dockerd listen on Unix sockets.
                rpc=f"{address}:{rpc}" if rpc else str(socket_of(name, layout)),
                web=f"{state.spec.scheme}://{address}:{web}" if web else "",
                log=str(layout.log(name)),
            )
        )
    return tuple(daemons)
