"""What each agent is told of an attempt."""

from __future__ import annotations

import itertools
from typing import Any

from hopsgpu.call import Call
from hopsgpu.frameworks.endpoints import endpoints_of
from hopsgpu.gang import Container, assign_ranks
from hopsgpu.meeting import Meeting
from hopsgpu.modules import PackedModules
from hopsgpu.run_message import run_messages
from hopsgpu.stores.lake import Lake


def messages(data: list[bytes]) -> dict[int, tuple[list[bytes], list[dict[str, Any]]]]:
    """By agent the parts of its payload, and the contexts of its ranks."""
    hosts = ("node1", "node1", "node2")
    world = assign_ranks(
        [Container(n, f"c{n}", host, "10.0.0.1", ()) for n, host in enumerate(hosts)], 2, 1
    )
    modules = PackedModules(b"modules", 1, ())
    call = Call(b"call", modules, {}, "run-1", Lake("file:///runs/run-1"), 0, data=data)
    ports = {key: range(7000, 7020) for key in range(3)}
    told = {}
    for message in run_messages(call, Meeting(world, endpoints_of(world, ports, None))):
        ranks = message.fields["ranks"]
        sizes = [message.fields["call_bytes"], message.fields["modules_bytes"]]
        sizes += [rank["data_bytes"] for rank in ranks]
        ends = itertools.accumulate(sizes, initial=0)
        parts = [message.payload[begin:end] for begin, end in itertools.pairwise(ends)]
        assert sum(sizes) == len(message.payload)
        told[message.key] = parts, [rank["context"] for rank in ranks]
    return told


def test_each_rank_gets_its_own_data_and_a_parameter_server_none() -> None:
    told = messages([b"zero", b"one", b"two", b"three", b"four", b"five"])
    # The first container has the parameter server too.
    assert [parts for parts, _ in told.values()] == [
        [b"call", b"modules", b"zero", b"one", b""],
        [b"call", b"modules", b"two", b"three"],
        [b"call", b"modules", b"four", b"five"],
    ]
    assert [c["role"] for c in told[0][1]] == ["worker", "worker", "ps"]


def test_without_data_nothing_more_travels() -> None:
    assert {tuple(parts[2:]) for parts, _ in messages([]).values()} == {
        (b"", b"", b""),
        (b"", b""),
    }


def test_a_rank_knows_with_how_many_it_shares_its_nodes_disk() -> None:
    contexts = [context for _, found in messages([]).values() for context in found]
    workers = [c for c in contexts if c["role"] == "worker"]
    assert [c["disk_sharers"] for c in workers] == [4, 4, 4, 4, 2, 2]
