from __future__ import annotations

from hopsgpu.cluster_managers.demand import Demand
from hopsgpu.cluster_managers.placement import preferred_hosts
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from tests.unit.cluster_managers.test_capacity import node, snap

ONE = Amount(1, 2, 5120)
TWO_GPUS = Amount(2, 4, 9728)
WHOLE = Amount(2, 6, 14336)


def test_the_fullest_node_that_fits_is_preferred() -> None:
    there = snap(node("a", WHOLE, used=NOTHING), node("b", WHOLE, used=Amount(1, 2, 5120)))
    assert preferred_hosts(Demand(ONE, 1), there) == ("b",)
    assert preferred_hosts(Demand(ONE, 2), there) == ("b", "a")
    assert preferred_hosts(Demand(TWO_GPUS, 1), there) == ("a",)


def test_a_node_takes_as_many_as_it_has_room_for() -> None:
    there = snap(node("a", WHOLE, used=NOTHING), node("b", WHOLE, used=NOTHING))
    assert preferred_hosts(Demand(ONE, 4), there) == ("a", "a", "b", "b")


def test_spread_takes_nodes_that_differ() -> None:
    there = snap(node("a", WHOLE, used=NOTHING), node("b", WHOLE, used=Amount(1, 2, 5120)))
    assert preferred_hosts(Demand(ONE, 2, is_spread=True), there) == ("b", "a")


def test_without_room_for_all_it_is_left_to_yarn() -> None:
    there = snap(node("a", WHOLE, used=Amount(2, 4, 10240)), node("b", WHOLE, used=NOTHING))
    assert preferred_hosts(Demand(ONE, 3), there) == ()
    assert preferred_hosts(Demand(ONE, 2, is_spread=True), there) == ()


def test_where_only_some_hosts_will_do_they_are_asked_for_even_when_full() -> None:
    full, half = Amount(2, 4, 10240), Amount(1, 2, 5120)
    nodes = (node("a", WHOLE, full), node("b", WHOLE, half), node("c", WHOLE))
    there = snap(*nodes).limited_to(frozenset({"a", "b"}))
    assert preferred_hosts(Demand(ONE, 1), there) == ("b",)
    assert preferred_hosts(Demand(ONE, 3), there) == ("b", "a", "b")
