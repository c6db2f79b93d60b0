"""Addresses, interfaces and ports of this very machine."""

from __future__ import annotations

import errno
import itertools
import socket

import pytest

from hopsgpu.agent.addresses import (
    AgentAddress,
    address_on_interface,
    address_towards,
    find_agent_address,
    held_ports,
    interface_addresses,
    peer_to_reach,
)
from hopsgpu.errors import ConfigError

# With ::1 where this machine has IPv6.
LOOPBACK = interface_addresses()["lo"]
NODE = {
    "lo": ("127.0.0.1", "::1"),
    "eth0": ("10.0.0.5", "10.0.1.5", "fd00::5"),
    "ib0": ("fd01::5", "10.9.0.5"),
    "down0": (),
}


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def bound(address: str, port: int, *, reuse: bool) -> socket.socket:
    """A listening socket."""
    taker = socket.socket(family_of(address))
    try:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        if taker.family == socket.AF_INET6:
            taker.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        taker.bind((address, port))
        taker.listen()
    except OSError:
        taker.close()
        raise
    return taker


# --- Interfaces --------------------------------------------------------------------------


def interface_of(address: str) -> str:
    return find_agent_address(address).interface


def test_every_address_of_this_machine_leads_to_its_interface() -> None:
    found = interface_addresses()
    assert "127.0.0.1" in found["lo"]
    assert found.keys() >= {name for _, name in socket.if_nameindex()}
    for name, own in found.items():
        for address in own:
            assert interface_of(address) == name
            # It is an address of this machine, or binding it fails.
            bound(address, 0, reuse=False).close()


def test_all_of_127_is_the_loopback_interface() -> None:
    assert interface_of("127.0.0.12") == "lo"


def test_address_of_another_machine_is_refused_with_the_available_ones() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.9: .*lo \(127\.0\.0\.1"):
        interface_of("203.0.113.9")


@pytest.mark.parametrize(
    ("address", "wanted", "found"),
    [
        ("10.0.1.5", None, AgentAddress("10.0.1.5", "eth0")),
        ("10.0.1.5", "", AgentAddress("10.0.1.5", "eth0")),
        ("10.0.1.5", "eth0", AgentAddress("10.0.1.5", "eth0")),
        # The address has the family of the address that reaches the driver, if there is one.
        ("10.0.0.5", "ib0", AgentAddress("10.9.0.5", "ib0")),
        ("fd00::5", "ib0", AgentAddress("fd01::5", "ib0")),
        ("fd00:0::5", None, AgentAddress("fd00:0::5", "eth0")),
        ("127.0.0.12", None, AgentAddress("127.0.0.12", "lo")),
    ],
)
def test_address_on_interface_has_the_same_family_if_possible(
    address: str, wanted: str | None, found: AgentAddress
) -> None:
    assert address_on_interface(address, wanted, NODE) == found


def test_absent_interface_is_refused_with_the_available_ones() -> None:
    with pytest.raises(ConfigError, match="'eth9' .*: lo .*eth0 "):
        address_on_interface("10.0.0.5", "eth9", NODE)
    with pytest.raises(ConfigError, match="'down0' has no address"):
        address_on_interface("10.0.0.5", "down0", NODE)
    with pytest.raises(ConfigError, match="'eth9'"):
        find_agent_address("127.0.0.1", "eth9")


def test_this_machine_is_reached_by_loopback() -> None:
    assert find_agent_address(address_towards("127.0.0.1")) == AgentAddress("127.0.0.1", "lo")


def test_route_to_an_own_address_begins_at_that_address() -> None:
    """The driver may run on this very node."""
    for address in itertools.chain.from_iterable(interface_addresses().values()):
        assert address_towards(address) == address


def test_unknown_host_has_no_route() -> None:
    with pytest.raises(OSError):
        address_towards("no-such-host.invalid")


def test_peer_to_reach_is_not_a_loopback_address() -> None:
    assert peer_to_reach("127.0.1.1", ["10.0.0.6", "10.0.0.7"]) == "10.0.0.6"
    assert peer_to_reach("127.0.1.1", ["127.0.0.2", "10.0.0.7"]) == "10.0.0.7"
    assert peer_to_reach("10.0.0.5", ["10.0.0.6"]) is None
    # All on one machine: the loopback interface reaches them.
    assert peer_to_reach("127.0.0.11", ["127.0.0.12"]) is None
    assert peer_to_reach("127.0.0.1", []) is None


def test_loopback_address_is_replaced_by_the_one_that_reaches_peers() -> None:
    outer = [a for own in interface_addresses().values() for a in own if not a.startswith("127.")]
    for address in (a for a in outer if a != "::1"):
        found = find_agent_address("127.0.1.1", peer_addresses=["127.0.0.1", address])
        assert found == AgentAddress(address, interface_of(address))
    assert find_agent_address("127.0.1.1", peer_addresses=["127.0.0.1"]) == AgentAddress(
        "127.0.1.1", "lo"
    )


# --- Ports -------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [*LOOPBACK, "0.0.0.0", *(["::"] if "::1" in LOOPBACK else [])])
def test_held_port_can_only_be_bound_with_reuse(address: str) -> None:
    with held_ports(1, "127.0.0.1") as held:
        (port,) = held.ports
        with pytest.raises(OSError) as refused:
            bound(address, port, reuse=False)
        assert refused.value.errno == errno.EADDRINUSE
        with bound(address, port, reuse=True) as rank:
            # A connection reaches the rank.
            near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
            with socket.create_connection((near, port), 5):
                rank.accept()[0].close()
    bound(address, port, reuse=True).close()


def test_a_stray_connection_is_refused() -> None:
    with held_ports(1) as held:
        for address in LOOPBACK:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, held.ports[0]), 5)


def test_ports_are_released_one_by_one_and_then_all() -> None:
    with held_ports(3) as held:
        first, second, third = held.ports
        held.release(second)
        assert held.ports == (first, third)
        bound("0.0.0.0", second, reuse=False).close()
        with pytest.raises(OSError):
            bound("0.0.0.0", first, reuse=False)
        with pytest.raises(KeyError):
            held.release(second)
    for port in (first, second, third):
        bound("0.0.0.0", port, reuse=False).close()


def test_many_holders_never_share_a_port() -> None:
    with held_ports(200) as one, held_ports(200) as other:
        assert len({*one.ports, *other.ports}) == 400


def test_address_of_another_machine_cannot_be_reserved() -> None:
    with pytest.raises(OSError) as refused, held_ports(1, "203.0.113.9"):
        pass
    assert refused.value.errno == errno.EADDRNOTAVAIL


def test_port_in_conflict_is_released_for_another() -> None:
    tried: list[int] = []

    def bind() -> socket.socket:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(bool(tried)))
        holder.bind(("", 0))
        tried.append(holder.getsockname()[1])
        return holder

    with held_ports(1, "127.0.0.1", bind) as held:
        assert held.ports == (tried[1],)
        bound("0.0.0.0", tried[0], reuse=False).close()


def test_search_for_a_port_without_conflict_ends() -> None:
    def bind_in_conflict() -> socket.socket:
        holder = socket.socket()
        holder.bind(("", 0))
        return holder

    with pytest.raises(OSError, match="20 attempts") as refused:
        held_ports(1, "127.0.0.1", bind_in_conflict).__enter__()
    assert refused.value.errno == errno.EADDRINUSE
