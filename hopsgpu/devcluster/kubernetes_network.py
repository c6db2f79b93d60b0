"""The network of a cluster on Kubernetes: a namespace of its own, whose addresses pods have too.

A pair of virtual interfaces connects the namespace to the machine. Pods reach drivers and HDFS at
the address `host`, and drivers reach pods. Nothing leads from the pods to other machines.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.devcluster.config import MAX_KUBERNETES_NODES
from hopsgpu.devcluster.daemons import last_lines, run_logged
from hopsgpu.errors import ClusterError

# Each node has this many addresses for pods, and the nodes begin with this one.
_PODS_PER_NODE, _FIRST_POD = 48, 16
_BRIDGE_ADDRESS = "02:68:6f:70:73:01"
_SECONDS = 30.0
_NAMESPACES = Path("/run/netns")
# The machine's interface to a cluster has a name that begins so.
INTERFACE = "hg"


@dataclass(frozen=True)
class ClusterNetwork:
    """The addresses of a cluster, which follow from its directory.

    Attributes:
        name: name of the network namespace.
        prefix: the first three numbers of the addresses of daemons and pods.
        host: the machine's address, at which pods reach it.
        peer: the address at the namespace's end of the same pair of interfaces.
    """

    name: str
    prefix: str
    host: str
    peer: str

    @property
    def api_server(self) -> str:
        """The address of the API server."""
        return f"{self.prefix}.1"

    @property
    def pods(self) -> str:
        """The network of daemons and pods."""
        return f"{self.prefix}.0/24"

    @property
    def services(self) -> str:
        """The addresses of services; the first one is the API server's."""
        return f"{self.prefix}.0/28"

    def node(self, number: int) -> str:
        """Return the address of a node, counted from 1."""
        return f"{self.prefix}.{1 + number}"

    def pods_of(self, number: int) -> tuple[str, str]:
        """Return the first and the last address of a node's pods."""
        first = _FIRST_POD + _PODS_PER_NODE * (number - 1)
        return f"{self.prefix}.{first}", f"{self.prefix}.{first + _PODS_PER_NODE - 1}"

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return a command that runs another one inside the namespace."""
        return ["nsenter", f"--net={_NAMESPACES / self.name}", *argv]


def network_of(root: Path) -> ClusterNetwork:
    """Return the network of the cluster in a directory."""
    digest = hashlib.sha256(str(root).encode()).digest()
    first, second = 64 + digest[0] % 64, digest[1] & 0xFE
    return ClusterNetwork(
        name=f"hopsgpu-{digest[:4].hex()}",
        prefix=f"10.{first}.{second}",
        host=f"10.{first}.{second + 1}.1",
        peer=f"10.{first}.{second + 1}.2",
    )


def create_network(network: ClusterNetwork, log: Path) -> None:
    """Create the namespace and its interfaces, unless they exist.

    Raises:
        ClusterError: a command failed; the message has the end of the log.
    """
    if (_NAMESPACES / network.name).exists():
        return
    ours, theirs = _interfaces(network)
    inside = ("ip", "-n", network.name)
    commands = [
        ["ip", "netns", "add", network.name],
        ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", network.name],
        ["ip", "addr", "add", f"{network.host}/30", "dev", ours],
        ["ip", "link", "set", ours, "up"],
        [*inside, "link", "set", "lo", "up"],
        [*inside, "addr", "add", f"{network.peer}/30", "dev", theirs],
        [*inside, "link", "set", theirs, "up"],
        [*inside, "route", "add", "default", "via", network.host],
        # Without an address of its own, a bridge takes that of a pod, and another one as pods end:
        # others would send to the old one for a while.
        [*inside, "link", "add", "pods", "address", _BRIDGE_ADDRESS, "type", "bridge"],
        *(
            [*inside, "addr", "add", f"{address}/24", "dev", "pods"]
            for address in (
                network.api_server,
                *map(network.node, range(1, MAX_KUBERNETES_NODES + 1)),
            )
        ),
        [*inside, "link", "set", "pods", "up"],
        network.command(["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"]),
        ["ip", "route", "add", network.pods, "via", network.peer],
    ]
    try:
        for command in commands:
            run_logged(command, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, log)
    except OSError as error:
        remove_network(network)
        raise ClusterError(f"{command[0]} cannot be run: {error}\n{last_lines(log)}") from error
    except BaseException:
        # Also after Ctrl-C: the next call would take half of a network for all of it.
        remove_network(network)
        raise


def remove_network(network: ClusterNetwork) -> None:
    """Remove the namespace, and with it its interfaces; do nothing without one."""
    if (_NAMESPACES / network.name).exists():
        # The other end goes with it; an interface that is named goes at once.
        for command in (
            ["ip", "link", "del", _interfaces(network)[0]],
            ["ip", "netns", "del", network.name],
        ):
            subprocess.run(command, timeout=_SECONDS, check=False, capture_output=True)


def _interfaces(network: ClusterNetwork) -> tuple[str, str]:
    digest = network.name.rpartition("-")[2]
    return f"{INTERFACE}{digest}", "machine"
