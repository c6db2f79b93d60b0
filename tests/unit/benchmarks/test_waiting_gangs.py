"""What waiting gangs cost a NameNode: the simulation counts what the places in the line do."""

from __future__ import annotations

import pytest

from benchmarks.simulation.name_node import NameNode
from benchmarks.simulation.waiting_gangs import WaitingGangs, cost_of
from hopsgpu.backends.gang_queue import QueueMember
from hopsgpu.core.queue_policy import Bound, QueueSnapshot, poll_seconds, queue_tag, renewal_seconds

QUEUE = queue_tag("root.open")
NODES = (8,)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(clock: Clock) -> NameNode:
    return NameNode(lambda: 1_800_000_000.0 + clock.now)


def place(node: NameNode, clock: Clock, number: int) -> QueueMember:
    return QueueMember(
        node.directory("alice"),
        application=f"application_1_{number:04d}",
        executors=1,
        gpus=1,
        clock=lambda: clock.now,
    )


def ask(one: QueueMember, bound: Bound = Bound.CLUSTER) -> bool:
    return one.request_turn(bound, QUEUE, (QUEUE,), NODES, False).may_take


def line_of(clock: Clock, node: NameNode, gangs: int) -> list[QueueMember]:
    places = []
    for number in range(gangs):
        clock.now += 0.001
        places.append(place(node, clock, number))
        ask(places[-1])
    return places


def test_a_look_costs_a_listing_and_a_renewal_two_operations_more(
    node: NameNode, clock: Clock
) -> None:
    one = place(node, clock, 1)
    ask(one)
    node.operations.clear()
    clock.now += 0.4
    ask(one)
    assert node.operations == {"getListing": 1}
    clock.now += renewal_seconds(0)
    ask(one)
    assert node.operations == {"getListing": 2, "create": 1, "complete": 1}
    # It says another bound.
    ask(one, Bound.NODES)
    assert node.operations["rename2"] == 1 and node.operations["getListing"] == 3


def test_a_gang_far_back_renews_rarely_and_counts(node: NameNode, clock: Clock) -> None:
    places = line_of(clock, node, 30)
    assert [one.rank for one in places] == list(range(30))
    last, first = places[-1], places[0]
    for _ in range(4):
        clock.now += 15
        for one in places[:-1]:
            ask(one)
        assert len(first.poll().tickets) == 30
        node.operations.clear()
        ask(last)
        assert node.operations == {"getListing": 1}


def test_a_gang_that_comes_to_the_front_at_once_has_its_place_when_it_looks(
    node: NameNode, clock: Clock
) -> None:
    *ahead, last = line_of(clock, node, 30)
    later = place(node, clock, 99)
    ask(later)
    clock.now += 25
    for one in ahead:
        one.leave()
    # Nobody is ahead of it now, and it has not renewed its ticket for longer than such a gang may:
    # it does not count, and whoever of the same user leaves removes its file.
    assert ask(later, Bound.NONE)
    later.leave()
    assert not any(name.startswith("ticket") for name in node.names)
    assert not ask(last) and last.rank == 0
    assert [name for name in node.names if name.startswith("ticket")] == [last.ticket.name]
    assert ask(last, Bound.NONE)


def test_the_dead_stop_nobody_for_longer_than_20_seconds_once_they_are_first(
    node: NameNode, clock: Clock
) -> None:
    *ahead, dead, later = line_of(clock, node, 40)
    began = clock.now
    for number, one in enumerate(ahead):
        # One a second is served.
        clock.now += 1
        assert ask(one, Bound.NONE), number
        one.leave()
        for other in ahead[number + 1 :]:
            ask(other)
    assert clock.now - began > 20
    assert ask(later, Bound.NONE), "the dead one has been silent for longer, and was the first"


def test_turns_are_counted_in_the_ticket(node: NameNode, clock: Clock) -> None:
    first, second = line_of(clock, node, 2)
    for turns in (1, 2):
        assert ask(first, Bound.NONE)
        first.give_back_turn()
        ask(first)
        assert first.ticket.turns == turns
        # It stands ahead, so it passed nobody.
        ask(second)
        assert second.ticket.passed == 0


def test_whoever_is_next_takes_the_turn_within_its_look() -> None:
    cost = cost_of(WaitingGangs(gangs=40, served_seconds=4.0), 20.0, 40.0)
    assert len(cost.delays) >= 9
    assert max(cost.delays) <= 1.2 * poll_seconds(1)


def test_many_kinds_and_killed_drivers_cost_what_the_ranks_say() -> None:
    given = WaitingGangs(60, (1, 2, 4), limited=2, share_limited=0.3, killed_seconds=7.0)
    cost = cost_of(given, 20.0, 40.0)
    assert cost.delays, "nobody was served"
    assert cost.per_second < 50
    assert sum(cost.operations.values()) >= cost.looks


def test_the_line_is_in_order(node: NameNode, clock: Clock) -> None:
    places = line_of(clock, node, 5)
    seen = places[0].poll()
    assert isinstance(seen, QueueSnapshot)
    assert [t.application for t, _ in seen.tickets] == [p.ticket.application for p in places]
