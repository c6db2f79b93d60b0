"""Addresses, interfaces and ports of this very machine."""

from __future__ import annotations

import errno
import itertools
import socket

import pytest

from hopsgpu.agent import addresses
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


def test_an_address_of_another_machine_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"has 203\.0\.113\.9: .*lo \(127\.0\.0\.1"):
        interface_of("203.0.113.9")


@pytest.mark.parametrize(
    ("address", "wanted", "found"),
    [
        ("10.0.1.5", None, AgentAddress("10.0.1.5", "eth0")),
        ("10.0.1.5", "", AgentAddress("10.0.1.5", "eth0")),
        ("10.0.1.5", "eth0", AgentAddress("10.0.1.5", "eth0")),
        # The family of the address that the driver is reached from, where there is one.
        ("10.0.0.5", "ib0", AgentAddress("10.9.0.5", "ib0")),
        ("fd00::5", "ib0", AgentAddress("fd01::5", "ib0")),
        ("fd00:0::5", None, AgentAddress("fd00:0::5", "eth0")),
        ("127.0.0.12", None, AgentAddress("127.0.0.12", "lo")),
    ],
)
def test_what_others_are_told(address: str, wanted: str | None, found: AgentAddress) -> None:
    assert address_on_interface(address, wanted, NODE) == found


def test_a_wanted_interface_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="'eth9' is not on this node; available: lo .*eth0 "):
        address_on_interface("10.0.0.5", "eth9", NODE)
    with pytest.raises(ConfigError, match="'down0' has no address"):
        address_on_interface("10.0.0.5", "down0", NODE)
    with pytest.raises(ConfigError, match="'eth9'"):
        find_agent_address("127.0.0.1", "eth9")


def test_this_machine_is_reached_by_loopback() -> None:
    assert find_agent_address(address_towards("127.0.0.1")) == AgentAddress("127.0.0.1", "lo")


def test_the_way_to_an_own_address_is_that_address() -> None:
    """As where the driver runs on this very node."""
    for address in itertools.chain.from_iterable(interface_addresses().values()):
        assert address_towards(address) == address


def test_nowhere_to_go() -> None:
    with pytest.raises(OSError):
        address_towards("no-such-host.invalid")


def test_a_loopback_address_among_others_is_not_told_to_them() -> None:
    assert peer_to_reach("127.0.1.1", ["10.0.0.6", "10.0.0.7"]) == "10.0.0.6"
    assert peer_to_reach("127.0.1.1", ["127.0.0.2", "10.0.0.7"]) == "10.0.0.7"
    assert peer_to_reach("10.0.0.5", ["10.0.0.6"]) is None
    # All on one machine: the loopback interface reaches them.
    assert peer_to_reach("127.0.0.11", ["127.0.0.12"]) is None
    assert peer_to_reach("127.0.0.1", []) is None


def test_a_loopback_address_is_changed_for_the_way_to_the_others() -> None:
    outer = [a for own in interface_addresses().values() for a in own if not a.startswith("127.")]
    for address in (a for a in outer if a != "::1"):
        found = find_agent_address("127.0.1.1", peer_addresses=["127.0.0.1", address])
        assert found == AgentAddress(address, interface_of(address))
    assert find_agent_address("127.0.1.1", peer_addresses=["127.0.0.1"]) == AgentAddress(
        "127.0.1.1", "lo"
    )


# --- Ports -------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [*LOOPBACK, "0.0.0.0", *(["::"] if "::1" in LOOPBACK else [])])
def test_a_held_port_is_kept_for_who_may_reuse_it(address: str) -> None:
    with held_ports(1, "127.0.0.1") as held:
        (port,) = held.ports
        with pytest.raises(OSError) as refused:
            bound(address, port, reuse=False)
        assert refused.value.errno == errno.EADDRINUSE
        with bound(address, port, reuse=True) as rank:
            # Whoever connects comes to the rank.
            near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
            with socket.create_connection((near, port), 5):
                rank.accept()[0].close()
    bound(address, port, reuse=True).close()


def test_a_stray_connection_is_refused() -> None:
    with held_ports(1) as held:
        for address in LOOPBACK:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, held.ports[0]), 5)


def test_ports_are_let_go_one_by_one_and_then_all() -> None:
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


def test_ports_are_let_go_when_one_cannot_be_had() -> None:
    with pytest.raises(OSError) as refused, held_ports(1, "203.0.113.9"):
        pass
    assert refused.value.errno == errno.EADDRNOTAVAIL


def test_a_port_in_conflict_is_let_go_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = addresses._bind_everywhere
    given: list[int] = []

    def first_one_in_conflict() -> socket.socket:
        holder = everywhere()
        given.append(holder.getsockname()[1])
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(len(given) > 1))
        return holder

    monkeypatch.setattr(addresses, "_bind_everywhere", first_one_in_conflict)
    with held_ports(1, "127.0.0.1") as held:
        assert held.ports == (given[1],)
        bound("0.0.0.0", given[0], reuse=False).close()


def test_conflicts_without_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_conflict() -> socket.socket:
        holder = socket.socket()
        holder.bind(("", 0))
        return holder

    monkeypatch.setattr(addresses, "_bind_everywhere", in_conflict)
    with pytest.raises(OSError, match="no port could be reserved on 127.0.0.1 in 20 attempts"):
        held_ports(1, "127.0.0.1").__enter__()
