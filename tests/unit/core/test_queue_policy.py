"""The line of waiting gangs: decisions on names and times, without a lake."""

from __future__ import annotations

import dataclasses

import pytest

from hopsgpu.core.queue_policy import (
    LEASE_SECONDS,
    MOST_PASSES,
    Bound,
    Entry,
    Line,
    Own,
    Ticket,
    asking_name,
    count_passes,
    decide_turn,
    queue_tag,
    read_line,
    stale_entries,
    ticket_of,
    turn_name,
)

NOW = 1_800_000_000_000
NODES = (2, 2)


def ticket(number: int, executors: int = 1, gpus: int = 1, **other: object) -> Ticket:
    made = Ticket(
        filed=NOW - 100_000 + number,
        id=f"{number:08x}",
        grows=False,
        executors=executors,
        gpus=gpus,
        queue=queue_tag("root.default"),
        bound=Bound.NONE,
        passed=0,
        application=f"application_1_{number:04d}",
    )
    return dataclasses.replace(made, **other)  # type: ignore[arg-type]


def line(*tickets: Ticket, generation: int = 0, asking: str | None = None) -> Line:
    ordered = sorted(tickets, key=lambda t: t.order)
    return Line(tuple((t, "alice") for t in ordered), generation, asking)


def entry(name: str, age: float = 0.0, owner: str = "alice") -> Entry:
    return Entry(name, NOW - int(age * 1000), owner)


CHAIN = (queue_tag("root.default"), queue_tag("root"))


def of(own: Ticket, user: str = "alice", queues: tuple[str, ...] = CHAIN) -> Own:
    return Own(own, user, queues)


def takes(own: Ticket, *others: Ticket, probe: bool = False, **by: object) -> bool:
    return decide_turn(of(own, **by), line(own, *others), NODES, probe).take  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", Bound)
def test_a_ticket_is_read_from_its_name(bound: Bound) -> None:
    given = ticket(7, 3, 2, bound=bound, passed=2, grows=True)
    assert ticket_of(given.name) == given
    assert len(given.name) < 255


@pytest.mark.parametrize(
    "name",
    ["ticket-1", "turn-000000000001", "README", ticket(1).name + "x-y", "ticket-" + "0" * 15],
)
def test_other_files_are_no_tickets(name: str) -> None:
    assert ticket_of(name) is None


def test_the_line_is_in_order_of_filing_and_the_dead_do_not_count() -> None:
    first, second, dead = ticket(1), ticket(2), ticket(0)
    entries = [
        entry(second.name, owner="bob"),
        entry(first.name, LEASE_SECONDS - 1),
        entry(dead.name, LEASE_SECONDS + 1),
        entry("somebody's notes"),
    ]
    seen = read_line(entries, NOW)
    assert seen.standing == ((first, "alice"), (second, "bob"))
    assert (seen.generation, seen.asking) == (0, None)


def test_the_highest_generation_counts_and_even_ones_are_free() -> None:
    taken = [entry(turn_name(2)), entry(turn_name(3)), entry(asking_name(3, "application_9"))]
    seen = read_line(taken, NOW)
    assert seen.asking == "application_9 of alice"
    assert seen.next_generation == 5
    free = read_line([*taken, entry(turn_name(4), 9999)], NOW)
    assert free.asking is None
    assert free.next_generation == 5


def test_a_turn_that_is_not_renewed_is_free() -> None:
    assert read_line([entry(turn_name(3), LEASE_SECONDS - 1)], NOW).asking is not None
    assert read_line([entry(turn_name(3), LEASE_SECONDS + 1)], NOW).asking is None


def test_litter_is_ones_own_and_never_the_highest_turn() -> None:
    entries = [
        entry(turn_name(1), 999),
        entry(turn_name(2), 999, "bob"),
        entry(asking_name(1, "application_1")),
        entry(turn_name(4), 999),
        entry(ticket(1).name, LEASE_SECONDS + 1),
        entry(ticket(2).name, LEASE_SECONDS - 1),
        entry(ticket(3).name, LEASE_SECONDS + 1, "bob"),
        entry("draft-00000000", LEASE_SECONDS + 1),
    ]
    found = stale_entries(entries, "alice", NOW)
    assert found == (
        turn_name(1),
        asking_name(1, "application_1"),
        ticket(1).name,
        "draft-00000000",
    )


def test_first_come_first_served() -> None:
    assert takes(ticket(1))
    assert takes(ticket(1), ticket(2))
    assert not takes(ticket(2), ticket(1))


def test_while_another_asks_nobody_does() -> None:
    turn = decide_turn(of(ticket(1)), line(asking="application_9 of bob"), NODES, True)
    assert not turn.take
    assert "another gang's turn: application_9 of bob" in turn.why


def test_what_does_not_fit_does_not_ask_but_to_probe_when_it_is_first() -> None:
    blocked = ticket(2, 4, bound=Bound.CLUSTER)
    assert not takes(blocked)
    assert takes(blocked, probe=True)
    assert not takes(blocked, ticket(1, 4, bound=Bound.CLUSTER), probe=True)


def test_a_later_gang_passes_one_that_is_blocked_and_fits_beside_it() -> None:
    waits_for_three = ticket(1, 3, bound=Bound.CLUSTER)
    assert takes(ticket(2, 1), waits_for_three)
    assert not takes(ticket(2, 2), waits_for_three)  # 2 + 3 of 4 GPUs
    assert not takes(ticket(2, 1), ticket(1, 4, bound=Bound.CLUSTER))


def test_fitting_beside_is_by_nodes() -> None:
    two_whole_nodes = ticket(1, 1, 2, bound=Bound.NODES)
    assert takes(ticket(2, 2), two_whole_nodes)
    assert not takes(ticket(2, 3), two_whole_nodes)
    assert not takes(ticket(2, 2, 2), two_whole_nodes)


def test_nobody_is_passed_for_ever() -> None:
    for passed in range(MOST_PASSES):
        assert takes(ticket(2), ticket(1, 3, bound=Bound.CLUSTER, passed=passed))
    assert not takes(ticket(2), ticket(1, 3, bound=Bound.CLUSTER, passed=MOST_PASSES))


def test_a_limit_that_is_not_ones_own_stops_nobody() -> None:
    often = MOST_PASSES + 9
    at_queue_limit = ticket(1, 4, bound=Bound.QUEUE, passed=often)
    elsewhere = (queue_tag("root.b"), queue_tag("root"))
    assert takes(ticket(2, 4), at_queue_limit, queues=elsewhere)
    assert not takes(ticket(2, 1), at_queue_limit)
    at_user_limit = ticket(1, 4, bound=Bound.USER, passed=often)
    assert takes(ticket(2, 4), at_user_limit, user="bob")
    assert takes(ticket(2, 4), at_user_limit, queues=elsewhere)
    assert not takes(ticket(2, 4), at_user_limit)


def test_siblings_share_the_limit_of_their_parent() -> None:
    parent = queue_tag("root.p")
    at_parents_limit = ticket(1, 4, bound=Bound.QUEUE, queue=parent, passed=MOST_PASSES)
    sibling = (queue_tag("root.p.b"), parent, queue_tag("root"))
    assert not takes(ticket(2, 1), at_parents_limit, queues=sibling)
    assert takes(ticket(2, 1), at_parents_limit)


def test_a_blocked_gang_probes_past_those_that_everybody_may_pass() -> None:
    blocked = ticket(2, 4, bound=Bound.CLUSTER)
    elsewhere = ticket(1, bound=Bound.QUEUE, queue=queue_tag("root.b"))
    assert takes(blocked, elsewhere, probe=True)
    assert not takes(blocked, elsewhere)
    assert not takes(blocked, ticket(1), probe=True)


def test_searches_that_grow_stand_behind_waiting_gangs() -> None:
    grows = ticket(1, grows=True)
    assert not takes(grows, ticket(2))
    assert takes(ticket(2), grows)


def test_it_says_who_is_first_and_how_many_are_before() -> None:
    turn = decide_turn(of(ticket(3)), line(ticket(1, 2), ticket(2), ticket(3)), NODES, probe=False)
    assert "2 gangs ahead of this one" in turn.why
    assert "application_1_0001 of alice (2 x 1 GPU)" in turn.why


def test_passes_are_counted_while_it_is_blocked() -> None:
    own, later = ticket(1, 3, bound=Bound.CLUSTER), ticket(2)
    before, after = line(own, later, generation=4), line(own, generation=5)
    assert count_passes(own, before, after).passed == 1
    assert count_passes(own, after, line(own, generation=6)).passed == 0
    assert count_passes(own, before, line(own, generation=9)).passed == 3
    assert count_passes(dataclasses.replace(own, bound=Bound.NONE), before, after).passed == 0


def test_those_who_stood_ahead_are_no_passes_and_those_behind_are_whoever_is_first() -> None:
    first, own, later = ticket(0), ticket(1, 3, bound=Bound.CLUSTER), ticket(2)
    before = line(first, own, later, generation=4)
    assert count_passes(own, before, line(own, later, generation=5)).passed == 0
    assert count_passes(own, before, line(first, own, generation=5)).passed == 1
    assert count_passes(own, before, line(own, generation=7)).passed == 1
