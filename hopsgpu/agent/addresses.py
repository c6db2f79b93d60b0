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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ConfigError

_SIOCGIFCONF = 0x8912
# struct ifconf {int length; pointer} and struct ifreq {char name[16]; struct sockaddr, padded}.
_IFCONF = struct.Struct("iP")
_IFREQ = struct.Struct("16s4x4s16x")
_MAX_ADDRESSES = 4096
_IF_INET6 = Path("/proc/net/if_inet6")
_TRIES = 20


@dataclass(frozen=True)
class AgentAddress:
    """An address (IPv4 or IPv6) at which other containers reach this one, and its interface."""

    address: str
    interface: str


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each interface of this node, IPv4 before IPv6.

    IPv6 link-local addresses are left out, because other nodes cannot use them.
    """
    by_interface: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, address in (*_ipv4_addresses(), *_ipv6_addresses()):
        by_interface.setdefault(name, []).append(address)
    return {name: tuple(addresses) for name, addresses in by_interface.items()}


def _ipv4_addresses() -> Iterator[tuple[str, str]]:
    buffer = array.array("b", bytes(_IFREQ.size * _MAX_ADDRESSES))
    buffer_address, length = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, _IFCONF.pack(length, buffer_address))
    filled, _ = _IFCONF.unpack(answer)
    for name, address in _IFREQ.iter_unpack(buffer.tobytes()[:filled]):
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


def _interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str:
    """Return the interface of an address; every address of 127.0.0.0/8 belongs to "lo"."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 4 and wanted.is_loopback:
        wanted = ipaddress.ip_address("127.0.0.1")
    for name, addresses in interfaces.items():
        if wanted in map(ipaddress.ip_address, addresses):
            return name
    raise ConfigError(f"no interface of this node has {address}: {_format_interfaces(interfaces)}")


def address_towards(peer: str) -> str:
    """Return the address of this node from which the kernel's routes lead to a peer.

    Nothing is sent: connect() of a datagram socket only looks up the route, udp(7).
    """
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def find_agent_address(
    address: str, interface: str | None = None, peer_addresses: Sequence[str] = ()
) -> AgentAddress:
    """Return the address at which other containers reach this one.

    Args:
        address: address of this end of the connection to the driver.
        interface: value of `spark.hopsgpu.interface`; None for the interface of the address.
        peer_addresses: addresses that the gang's other containers sent in their hello.

    Raises:
        ConfigError: the node lacks the interface, or the interface has no address.
        OSError: there is no route to the other containers.
    """
    peer = peer_to_reach(address, peer_addresses)
    local_address = address if peer is None else address_towards(peer)
    return address_on_interface(local_address, interface, interface_addresses())


def address_on_interface(
    address: str, interface: str | None, interfaces: Mapping[str, Sequence[str]]
) -> AgentAddress:
    """Return the address of an interface, of the same family as `address` if possible."""
    if not interface:
        return AgentAddress(address, _interface_of(address, interfaces))
    if not interfaces.get(interface):
        problem = "has no address" if interface in interfaces else "is not on this node"
        available = _format_interfaces(interfaces)
        raise ConfigError(
            f"spark.hopsgpu.interface={interface!r} {problem}; available: {available}"
        )
    addresses = interfaces[interface]
    if address in addresses:
        return AgentAddress(address, interface)
    version = ipaddress.ip_address(address).version
    same_version = [a for a in addresses if ipaddress.ip_address(a).version == version]
    return AgentAddress((same_version or list(addresses))[0], interface)


def _format_interfaces(interfaces: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(a) or 'no address'})" for name, a in interfaces.items())


def peer_to_reach(address: str, peer_addresses: Sequence[str]) -> str | None:
    """Return the address of a peer on another node, or None if `address` is not a loopback address.

    The name of the driver's host may be a loopback address on that host (127.0.1.1 in Debian's
    /etc/hosts). A container there needs the address from which it reaches other nodes.
    """
    if not ipaddress.ip_address(address).is_loopback:
        return None
    return next((a for a in peer_addresses if not ipaddress.ip_address(a).is_loopback), None)


class HeldPorts:
    """The ports that `held_ports` has reserved."""

    def __init__(self, sockets: Mapping[int, socket.socket], address: str) -> None:
        self._sockets = dict(sockets)
        self._address = address

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(self._sockets)

    def check(self) -> None:
        """Bind each port as the next rank will.

        Raises:
            OSError: a port is in use, for example by a process that an earlier rank left running.
        """
        for port in self.ports:
            try:
                _try_bind(self._address, port)
            except OSError as error:
                raise OSError(error.errno, f"port {port}: {error.strerror}") from None

    def release(self, port: int) -> None:
        self._sockets.pop(port).close()

    def close(self) -> None:
        for port in self.ports:
            self.release(port)


def _bind_everywhere() -> socket.socket:
    has_both = socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if has_both else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if has_both:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", 0))
    except BaseException:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def held_ports(
    count: int, address: str = "", bind: Callable[[], socket.socket] = _bind_everywhere
) -> Iterator[HeldPorts]:
    """Reserve free TCP ports, which only programs that bind with SO_REUSEADDR can use meanwhile.

    The servers of torch, grpc and Python do so. The kernel never chooses a reserved port, and
    refuses connections to it. Ports are bound on every IPv4 and IPv6 address, as by these servers.

    Args:
        address: address at which other containers will reach the ports; "" for any.
        bind: binds a socket to a free port.

    Raises:
        OSError: this node does not have the address, or no port is free.
    """
    with contextlib.ExitStack() as stack:
        sockets: dict[int, socket.socket] = {}
        for _ in range(count):
            bound = _reserve_port(address, bind)
            stack.callback(bound.close)
            sockets[int(bound.getsockname()[1])] = bound
        yield HeldPorts(sockets, address)


def _reserve_port(address: str, bind: Callable[[], socket.socket]) -> socket.socket:
    for _ in range(_TRIES):
        bound = bind()
        try:
            _try_bind(address, int(bound.getsockname()[1]))
        except OSError as error:
            bound.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return bound
    raise OSError(errno.EADDRINUSE, f"no port could be reserved on {address} in {_TRIES} attempts")


def _try_bind(address: str, port: int) -> None:
    """Bind and listen as a rank will."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as rank:
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind((address, port))
        rank.listen()
