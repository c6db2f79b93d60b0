"""The network of a cluster on Kubernetes: its addresses, and the commands that create it."""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.devcluster import kubernetes_network
from hopsgpu.devcluster.config import MAX_KUBERNETES_NODES
from hopsgpu.devcluster.kubernetes_network import create_network, network_of, remove_network
from hopsgpu.errors import ClusterError

NETWORK = network_of(Path("/clusters/a"))
LOG = Path("/clusters/a/network.log")
NODES = range(1, MAX_KUBERNETES_NODES + 1)
_INTERFACE_NAME = 15


@pytest.fixture
def namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the machine's namespaces, which is empty."""
    monkeypatch.setattr(kubernetes_network, "_NAMESPACES", tmp_path)
    return tmp_path


@pytest.fixture
def commands(namespaces: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; one adds the namespace, and none does anything else."""
    executed: list[list[str]] = []

    def run_logged(argv: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        executed.append(list(argv))
        if "netns" in argv and "add" in argv[:3]:
            (namespaces / argv[-1]).touch()

    def run(argv: Sequence[str], **_: Any) -> None:
        executed.append(list(argv))
        if list(argv[:3]) == ["ip", "netns", "del"]:
            (namespaces / argv[-1]).unlink()

    monkeypatch.setattr(kubernetes_network, "run_logged", run_logged)
    monkeypatch.setattr(subprocess, "run", run)
    return executed


def test_addresses_follow_from_the_directory() -> None:
    assert network_of(Path("/clusters/a")) == NETWORK
    networks = [network_of(Path(f"/clusters/{number}")) for number in range(200)]
    assert len({network.name for network in networks}) == 200
    assert len({network.prefix for network in networks}) > 150


@pytest.mark.parametrize("root", [f"/clusters/{number}" for number in range(0, 200, 20)])
def test_no_two_addresses_are_the_same(root: str) -> None:
    network = network_of(Path(root))
    pods = ipaddress.IPv4Network(network.pods)
    outside = ipaddress.IPv4Network(f"{network.host}/30", strict=False)
    assert {ipaddress.IPv4Address(a) for a in (network.host, network.peer)} == set(outside.hosts())
    assert not pods.overlaps(outside)
    assert pods.is_private and outside.is_private
    single = [network.api_server, *map(network.node, NODES)]
    assert len(set(single)) == 1 + MAX_KUBERNETES_NODES
    addresses = [ipaddress.IPv4Address(address) for address in single]
    for number in NODES:
        first, last = map(ipaddress.IPv4Address, network.pods_of(number))
        assert first > max(addresses) and first in pods and last in pods
        assert int(last) - int(first) >= 40
        addresses.append(last)
    assert addresses[-1] != pods.broadcast_address


def test_the_first_service_is_the_api_server() -> None:
    services = ipaddress.IPv4Network(NETWORK.services)
    assert str(services.network_address + 1) == NETWORK.api_server
    first_pod, _ = NETWORK.pods_of(1)
    assert ipaddress.IPv4Address(first_pod) not in services


def test_a_command_runs_inside_the_namespace() -> None:
    assert NETWORK.command(["kubelet", "-v"]) == [
        "nsenter",
        f"--net=/run/netns/{NETWORK.name}",
        "kubelet",
        "-v",
    ]


def test_a_network_is_created_once(commands: list[list[str]], namespaces: Path) -> None:
    create_network(NETWORK, LOG)
    assert commands[0] == ["ip", "netns", "add", NETWORK.name]
    assert commands[-1] == ["ip", "route", "add", NETWORK.pods, "via", NETWORK.peer]
    added = [argv[argv.index("addr") + 2] for argv in commands if "addr" in argv]
    inside = [NETWORK.api_server, *map(NETWORK.node, NODES)]
    assert added == [f"{NETWORK.host}/30", f"{NETWORK.peer}/30", *(f"{a}/24" for a in inside)]
    count = len(commands)
    create_network(NETWORK, LOG)
    assert len(commands) == count


def test_nothing_of_the_machine_is_changed_but_an_interface_and_a_route(
    commands: list[list[str]],
) -> None:
    create_network(NETWORK, LOG)
    inside = ("-n", NETWORK.name)
    of_machine = [argv for argv in commands if argv[0] != "nsenter" and tuple(argv[1:3]) != inside]
    kinds = [" ".join(argv[1:3]) for argv in of_machine]
    assert kinds == ["netns add", "link add", "addr add", "link set", "route add"]
    interface = of_machine[1][3]
    assert len(interface) <= _INTERFACE_NAME and NETWORK.name.endswith(interface[2:])


def test_a_network_that_fails_is_removed(
    commands: list[list[str]], namespaces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(argv: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        if "route" in argv:
            raise ClusterError("RTNETLINK answers: File exists")
        (namespaces / NETWORK.name).touch()

    monkeypatch.setattr(kubernetes_network, "run_logged", fail)
    with pytest.raises(ClusterError, match="File exists"):
        create_network(NETWORK, LOG)
    assert [argv[1:3] for argv in commands] == [["link", "del"], ["netns", "del"]]
    assert list(namespaces.iterdir()) == []


def test_a_network_that_lacks_a_program_is_removed(
    commands: list[list[str]], namespaces: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_logged(argv: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        if argv[0] == "nsenter":
            raise FileNotFoundError(2, "No such file or directory")
        (namespaces / NETWORK.name).touch()

    monkeypatch.setattr(kubernetes_network, "run_logged", run_logged)
    with pytest.raises(ClusterError, match="nsenter cannot be run: .*No such file"):
        create_network(NETWORK, tmp_path / "log")
    assert [argv[1:3] for argv in commands] == [["link", "del"], ["netns", "del"]]
    assert list(namespaces.iterdir()) == []


def test_a_program_that_is_absent_is_named(
    namespaces: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_logged(argv: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(kubernetes_network, "run_logged", run_logged)
    with pytest.raises(ClusterError, match="ip cannot be run: .*No such file"):
        create_network(NETWORK, tmp_path / "log")


def test_without_a_network_nothing_is_removed(commands: list[list[str]], namespaces: Path) -> None:
    (namespaces / "hopsgpu-another").touch()
    remove_network(NETWORK)
    assert commands == []
    create_network(NETWORK, LOG)
    remove_network(NETWORK)
    assert [path.name for path in namespaces.iterdir()] == ["hopsgpu-another"]
