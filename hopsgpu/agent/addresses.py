"""Addresses at which other containers reach this one, and ports reserved for its ranks.

Linux only: interfaces and their addresses come from ioctl(SIOCGIFCONF), netdevice(7), and from
/proc/net/if_inet6, whose columns are address, index, prefix length, scope, flags and name.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ConfigError

_SIOCGIFCONF = 0x8912
# struct ifconf {int length; pointer} and struct ifreq {char name[16]; struct sockaddr, padded}.
_IFCONF = struct.Struct("iP")
_IFREQ = struct.Struct("16s4x4s16x")
_MOST_ADDRESSES = 4096
_IF_INET6 = Path("/proc/net/if_inet6")
_TRIES = 20


@dataclass(frozen=True)
class AgentAddress:
    """How other containers reach this one.

    Attributes:
        address: IPv4 or IPv6.
        interface: interface that has the address.
    """

    address: str
    interface: str


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Return the interfaces of this node with their addresses, IPv4 before IPv6.

    An interface without an address has an empty tuple. IPv6 link-local addresses are left out,
    because other nodes cannot use them.
    """
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, address in (*_ipv4_addresses(), *_ipv6_addresses()):
        found.setdefault(name, []).append(address)
    return {name: tuple(addresses) for name, addresses in found.items()}


def _ipv4_addresses() -> Iterator[tuple[str, str]]:
    room = array.array("b", bytes(_IFREQ.size * _MOST_ADDRESSES))
    where, length = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, _IFCONF.pack(length, where))
    filled, _ = _IFCONF.unpack(answer)
    for name, address in _IFREQ.iter_unpack(room.tobytes()[:filled]):
        # "eth0:1" labels a second address of eth0.
        label = name.rstrip(b"\0").decode()
        yield label.partition(":")[0], socket.inet_ntop(socket.AF_INET, address)


def _ipv6_addresses() -> Iterator[tuple[str, str]]:
    if not _IF_INET6.exists():
        return
    for line in _IF_INET6.read_text().splitlines():
        address, *_, name = line.split()
        parsed = ipaddress.IPv6Address(int(address, 16))
        if not parsed.is_link_local:
            yield name, str(parsed)


def _owner(address: str, interfaces: Mapping[str, Sequence[str]]) -> str:
    """Return the interface that has an IPv4 or IPv6 address; "lo" has all of 127.0.0.0/8."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 4 and wanted.is_loopback:
        wanted = ipaddress.ip_address("127.0.0.1")
    for name, addresses in interfaces.items():
        if wanted in map(ipaddress.ip_address, addresses):
            return name
    raise ConfigError(f"no interface of this node has {address}: {_shown(interfaces)}")


def address_towards(peer: str) -> str:
    """Return the address of this node from which it reaches a peer, as the kernel routes.

    Nothing is sent: connect() of a datagram socket only looks up the route, udp(7).

    Args:
        peer: address or name of another node.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def reach(address: str, interface: str | None = None, others: Sequence[str] = ()) -> AgentAddress:
    """Return how other containers reach this one.

    Args:
        address: address of this end of the connection to the driver.
        interface: interface that the administrator chose (`spark.hopsgpu.interface`), or None for
            the one that has the address.
        others: addresses with which the gang's other containers introduced themselves.

    Raises:
        ConfigError: this node lacks the interface, or it has no address; the message lists what is
            available.
        OSError: there is no route to the others.
    """
    peer = peer_to_reach(address, others)
    own = address if peer is None else address_towards(peer)
    return choose(own, interface, interface_addresses())


def choose(
    address: str, interface: str | None, interfaces: Mapping[str, Sequence[str]]
) -> AgentAddress:
    """Like `reach`, with the node's interfaces and their addresses given.

    If the chosen interface has several addresses, one of the given address's family is taken.
    """
    if not interface:
        return AgentAddress(address, _owner(address, interfaces))
    if not interfaces.get(interface):
        problem = "has no address" if interface in interfaces else "is not on this node"
        raise ConfigError(
            f"spark.hopsgpu.interface={interface!r} {problem}; available: {_shown(interfaces)}"
        )
    addresses = interfaces[interface]
    if address in addresses:
        return AgentAddress(address, interface)
    version = ipaddress.ip_address(address).version
    same = [a for a in addresses if ipaddress.ip_address(a).version == version]
    return AgentAddress((same or list(addresses))[0], interface)


def _shown(interfaces: Mapping[str, Sequence[str]]) -> str:
    shown = (f"{name} ({', '.join(a) or 'no address'})" for name, a in interfaces.items())
    return ", ".join(shown)


def peer_to_reach(address: str, others: Sequence[str]) -> str | None:
    """Return the peer towards which a container finds its real address; None if it has one.

    A driver's host name may be a loopback address on the driver's own node (127.0.1.1 in Debian's
    /etc/hosts). A container there introduces itself with an address that means another machine to
    the others; it then calls `address_towards` with one of them.

    Args:
        address: address with which the container introduced itself.
        others: addresses of the gang's other containers.
    """
    if not ipaddress.ip_address(address).is_loopback:
        return None
    return next((a for a in others if not ipaddress.ip_address(a).is_loopback), None)


class HeldPorts:
    """Ports reserved for a rank, which no other process gets. Made by `held_ports`."""

    def __init__(self, holders: Mapping[int, socket.socket], address: str) -> None:
        self._holders = dict(holders)
        self._address = address

    @property
    def ports(self) -> tuple[int, ...]:
        """The held ports, in the order in which they were bound."""
        return tuple(self._holders)

    def check(self) -> None:
        """Bind each port as the next rank will.

        Raises:
            OSError: a port is in use, for example by a process that an earlier rank left running.
        """
        for port in self.ports:
            try:
                _try(self._address, port)
            except OSError as error:
                raise OSError(error.errno, f"port {port}: {error.strerror}") from None

    def release(self, port: int) -> None:
        """Release one port.

        Raises:
            KeyError: it is not held.
        """
        self._holders.pop(port).close()

    def close(self) -> None:
        """Release all ports."""
        for port in self.ports:
            self.release(port)


@contextlib.contextmanager
def held_ports(count: int, address: str = "") -> Iterator[HeldPorts]:
    """Reserve a number of free TCP ports.

    The ports are bound with SO_REUSEADDR and do not listen: another program that binds with
    SO_REUSEADDR (the servers of torch, grpc and Python) gets a port, other programs and the
    kernel's own choice do not, and a stray connection is refused. Like those servers, the ports are
    bound on every address, IPv4 and IPv6. A port that cannot also be bound at the address itself is
    released, and another one is tried.

    Args:
        count: number of ports.
        address: address at which the others will reach them; "" for any.

    Raises:
        OSError: this node does not have the address, or no port is free.
    """
    with contextlib.ExitStack() as stack:
        holders: dict[int, socket.socket] = {}
        for _ in range(count):
            holder = _held(address)
            stack.callback(holder.close)
            holders[int(holder.getsockname()[1])] = holder
        yield HeldPorts(holders, address)


def _held(address: str) -> socket.socket:
    for _ in range(_TRIES):
        holder = _everywhere()
        try:
            _try(address, int(holder.getsockname()[1]))
        except OSError as error:
            holder.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return holder
    raise OSError(errno.EADDRINUSE, f"no port could be reserved on {address} in {_TRIES} attempts")


def _everywhere() -> socket.socket:
    both = socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("", 0))
    except BaseException:
        holder.close()
        raise
    return holder


def _try(address: str, port: int) -> None:
    """Bind and listen as a rank will."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as rank:
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind((address, port))
        rank.listen()
