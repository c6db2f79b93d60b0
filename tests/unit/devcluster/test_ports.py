"""Ports: free, held against other programs, and left to their daemon."""

from __future__ import annotations

import itertools
import random
import socket

import pytest

from hopsgpu.devcluster.config import ClusterSpec
from hopsgpu.devcluster.ports import candidates, held_ports, port_names


def bound(address: str, port: int, reuse: bool) -> socket.socket:
    taker = socket.socket()
    try:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        taker.bind((address, port))
        taker.listen()
    except OSError:
        taker.close()
        raise
    return taker


def test_names_cover_every_daemon() -> None:
    names = port_names(ClusterSpec().daemons)
    assert len(set(names)) == len(names) == 10 + 2 * 3
    standalone = ClusterSpec(is_standalone=True, has_master_ha=True)
    assert set(port_names(standalone.daemons)) >= {"master.rpc", "master2.web", "node1.web"}
    assert "node1.localizer" not in port_names(standalone.daemons)
    for spec in (ClusterSpec(), ClusterSpec(kerberos=True, namenode_ha=True), standalone):
        assert {n.partition(".")[0] for n in port_names(spec.daemons)} == {*spec.daemons}


def test_new_ports_lie_below_the_ephemeral_ones_and_end_with_any() -> None:
    tried = list(candidates(32768, random.Random(1)))
    assert tried[-1] == 0
    assert all(10240 <= port < 32768 for port in tried[:-1])
    assert list(candidates(1024, random.Random(1))) == [0]


def test_a_held_port_keeps_others_out_and_lets_its_daemon_in() -> None:
    with held_ports(["namenode.rpc", "node1.rpc"], {}) as ports:
        with pytest.raises(OSError, match="in use"):
            bound("127.0.0.1", ports["namenode.rpc"], reuse=False)
        # As Java binds.
        bound("127.0.0.1", ports["namenode.rpc"], reuse=True).close()
        bound("127.0.0.11", ports["node1.rpc"], reuse=True).close()
    bound("127.0.0.1", ports["namenode.rpc"], reuse=False).close()


def test_two_clusters_never_choose_the_same_port() -> None:
    names = port_names(ClusterSpec().daemons)
    # The same generator: both try the same numbers.
    with held_ports(names, {}, random.Random(7)) as a, held_ports(names, {}, random.Random(7)) as b:
        for x, y in itertools.product(a.items(), b.items()):
            assert x[1] != y[1] or x[0].startswith("node") != y[0].startswith("node")
        assert not {a[n] for n in names if n.startswith("node1")} & {
            b[n] for n in names if n.startswith("node1")
        }


def test_the_ports_of_the_last_time_come_back_unless_taken() -> None:
    names = ["namenode.rpc", "namenode.web"]
    with held_ports(names, {}) as first:
        pass
    with held_ports(names, first) as again:
        assert again == first
    with bound("127.0.0.1", first["namenode.rpc"], reuse=True), held_ports(names, first) as third:
        assert third["namenode.rpc"] != first["namenode.rpc"]
        assert third["namenode.web"] == first["namenode.web"]


def test_a_port_with_a_lingering_connection_comes_back() -> None:
    with held_ports(["namenode.rpc"], {}) as first:
        pass
    with bound("127.0.0.1", first["namenode.rpc"], reuse=True) as server:
        client = socket.create_connection(("127.0.0.1", first["namenode.rpc"]))
        served, _ = server.accept()
        # The server closes first, so TIME_WAIT is at its port.
        served.close()
        client.close()
    with held_ports(["namenode.rpc"], first) as again:
        assert again == first


def test_nothing_stays_held_after_an_interrupt() -> None:
    taken: list[int] = []

    def body() -> None:
        with held_ports(["namenode.rpc"], {}) as ports:
            taken.append(ports["namenode.rpc"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        body()
    bound("127.0.0.1", taken[0], reuse=False).close()
