"""A master's JSON: workers that were restarted, and answers in other forms."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.snapshot import Node
from hopsgpu.cluster_managers.standalone.master_answers import read_master
from tests.unit.cluster_managers.standalone import masters


def test_workers_are_nodes() -> None:
    state = read_master(masters.state("two_profiles"), "gpu")
    assert state.status == "ALIVE"
    assert state.nodes == (
        Node(
            masters.FIRST,
            "127.0.0.1",
            "RUNNING",
            Amount(2, 6, 8192),
            Amount(2, 1, 512),
            web="127.0.0.1:17281",
        ),
        Node(
            masters.SECOND,
            "127.0.0.1",
            "RUNNING",
            Amount(2, 6, 8192),
            Amount(2, 2, 1024),
            web="127.0.0.1:17282",
        ),
    )
    assert read_master(masters.state("gang"), "fpga").nodes[0].other_resources == {"gpu"}
    (first, second) = state.active
    assert (first.name, first.user, first.cores) == (masters.NAME_OF_MALLORYS, "mallory", 1)
    assert (second.id, second.started) == (masters.OURS, 1796051018.646)


def test_a_dead_worker_is_lost_and_has_nothing() -> None:
    node = read_master(masters.state("dead"), "gpu").nodes[1]
    assert (node.state, node.total.gpus, node.used) == ("LOST", 2, NOTHING)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 2),
        ({"port": 17199}, 2),
        ({"port": 17199, "webuiaddress": "http://127.0.0.1:17299"}, 3),
        ({"host": "node2"}, 3),
        ({"state": "UNKNOWN"}, 3),
    ],
)
def test_a_worker_that_was_restarted_counts_once(changes: dict[str, Any], count: int) -> None:
    answer = masters.state("dead")
    restarted = {**copy.deepcopy(answer["workers"][1]), "id": "worker-2", "state": "ALIVE"}
    answer["workers"].append({**restarted, **changes})
    assert len(read_master(answer, "gpu").nodes) == count


@pytest.mark.parametrize(
    ("state", "of_node"),
    [("ALIVE", "RUNNING"), ("UNKNOWN", "LOST"), ("DECOMMISSIONED", "DECOMMISSIONED")],
)
def test_states_of_workers(state: str, of_node: str) -> None:
    answer = masters.state("gang")
    answer["workers"][0]["state"] = state
    assert read_master(answer, "gpu").nodes[0].state == of_node


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("status",), 7, "status is not a text"),
        (("workers",), {}, "workers is not a list"),
        (("workers", 0), 1, r"workers\[0\] is not an object"),
        (("workers", 1, "cores"), -1, r"workers\[1\].cores is not a whole number"),
        (("workers", 1, "cores"), True, r"workers\[1\].cores is not a whole number"),
        (("workers", 1, "memory"), 10**20, r"workers\[1\].memory is not a whole number"),
        (("workers", 0, "resources"), [1], r"workers\[0\].resources is not an object"),
        (("activeapps", 0, "id"), "<b>", r"activeapps\[0\].id is not an ID"),
        (("activeapps", 0, "starttime"), "now", r"activeapps\[0\].starttime is not a whole"),
    ],
)
def test_another_form_is_refused_by_name(path: tuple[Any, ...], value: Any, reason: str) -> None:
    answer = masters.state("gang")
    place = answer
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=reason):
        read_master(answer, "gpu")
    del place[path[-1]]
    if isinstance(path[-1], str) and path[-1] not in ("resources", "id"):
        with pytest.raises(ValueError, match=f"{path[-1]} is missing"):
            read_master(answer, "gpu")


def test_long_names_of_others_are_cut() -> None:
    answer = masters.state("gang")
    answer["activeapps"][0]["name"] = "x" * 10**6
    assert len(read_master(answer, "gpu").active[0].name) == 200
