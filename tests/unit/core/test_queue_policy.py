"""The queue of gangs: decisions on names and times, without a lake."""

from __future__ import annotations

import dataclasses

import pytest

from hopsgpu.core.queue_policy import (
    MAX_PASSES,
    TICKET_TTL_SECONDS,
    Bound,
    Candidate,
    GangsAhead,
    Offer,
    Probes,
    QueueFile,
    QueueSnapshot,
    Ticket,
    TurnHolder,
    asking_name,
    count_passes,
    decide_turn,
    describe_promised,
    executors_to_give,
    parse_offer,
    parse_ticket,
    poll_seconds,
    queue_tag,
    read_queue,
    renewal_seconds,
    split_among_offers,
    stale_files,
    ticket_ttl_seconds,
    turn_name,
)

NOW = 1_800_000_000_000
NODES = (2, 2)


def ticket(number: int, executors: int = 1, gpus: int = 1, **other: object) -> Ticket:
    made = Ticket(
        filed=NOW - 100_000 + number,
        id=f"{number:08x}",
        is_growth=False,
        executors=executors,
        gpus=gpus,
        queue=queue_tag("root.default"),
        bound=Bound.NONE,
        passed=0,
        application=f"application_1_{number:04d}",
    )
    return dataclasses.replace(made, **other)  # type: ignore[arg-type]


def queue(*tickets: Ticket, generation: int = 0, asking: TurnHolder | None = None) -> QueueSnapshot:
    ordered = sorted(tickets, key=lambda t: t.order)
    return QueueSnapshot(tuple((t, "alice") for t in ordered), generation, asking)


def entry(name: str, age: float = 0.0, owner: str = "alice") -> QueueFile:
    return QueueFile(name, NOW - int(age * 1000), owner)


CHAIN = (queue_tag("root.default"), queue_tag("root"))


def of(own: Ticket, user: str = "alice", queues: tuple[str, ...] = CHAIN) -> Candidate:
    return Candidate(own, user, queues)


def takes(own: Ticket, *others: Ticket, is_probe: bool = False, **by: object) -> bool:
    return decide_turn(of(own, **by), queue(own, *others), NODES, is_probe).may_take  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", Bound)
def test_a_ticket_is_read_from_its_name(bound: Bound) -> None:
    given = ticket(7, 3, 2, bound=bound, passed=2, is_growth=True, turns=5)
    assert parse_ticket(given.name) == given
    assert len(given.name) < 255


@pytest.mark.parametrize(
    "application", ["application_1796050266592_0001", "app-20261130155739-0000", "spark-0f3a"]
)
def test_the_ids_of_every_cluster_manager_are_read(application: str) -> None:
    given = dataclasses.replace(ticket(7), application=application)
    assert parse_ticket(given.name) == given
    offer = Offer("73b6a9b1", 3, 1, 0, "9d18f9e3", application, "my-run")
    assert parse_offer(offer.name) == offer
    files = [entry(turn_name(3)), entry(asking_name(3, application))]
    assert read_queue(files, NOW).turn_holder == TurnHolder(application, "alice")


@pytest.mark.parametrize(
    "name",
    ["ticket-1", "turn-000000000001", "README", ticket(1).name + "x-y", "ticket-" + "0" * 15],
)
def test_other_files_are_no_tickets(name: str) -> None:
    assert parse_ticket(name) is None


def test_the_queue_is_in_order_of_filing_and_the_dead_do_not_count() -> None:
    first, second, dead = ticket(1), ticket(2), ticket(0)
    entries = [
        entry(second.name, owner="bob"),
        entry(first.name, TICKET_TTL_SECONDS - 1),
        entry(dead.name, TICKET_TTL_SECONDS + 1),
        entry("somebody's notes"),
    ]
    seen = read_queue(entries, NOW)
    assert seen.tickets == ((first, "alice"), (second, "bob"))
    assert (seen.generation, seen.turn_holder) == (0, None)


def test_the_highest_generation_counts_and_even_ones_are_free() -> None:
    taken = [entry(turn_name(2)), entry(turn_name(3)), entry(asking_name(3, "application_9"))]
    seen = read_queue(taken, NOW)
    assert seen.turn_holder == TurnHolder("application_9", "alice")
    assert seen.next_generation == 5
    free = read_queue([*taken, entry(turn_name(4), 9999)], NOW)
    assert free.turn_holder is None
    assert free.next_generation == 5


def test_a_turn_that_is_not_renewed_is_free() -> None:
    assert read_queue([entry(turn_name(3), TICKET_TTL_SECONDS - 1)], NOW).turn_holder is not None
    assert read_queue([entry(turn_name(3), TICKET_TTL_SECONDS + 1)], NOW).turn_holder is None


def test_litter_is_ones_own_and_never_the_highest_turn() -> None:
    entries = [
        entry(turn_name(1), 999),
        entry(turn_name(2), 999, "bob"),
        entry(asking_name(1, "application_1")),
        entry(turn_name(4), 999),
        entry(ticket(1).name, TICKET_TTL_SECONDS + 1),
        entry(ticket(2).name, TICKET_TTL_SECONDS - 1),
        entry(ticket(3).name, TICKET_TTL_SECONDS + 1, "bob"),
        entry("draft-00000000", TICKET_TTL_SECONDS + 1),
    ]
    own = (turn_name(1), asking_name(1, "application_1"), ticket(1).name, "draft-00000000")
    assert stale_files(entries, "alice", NOW) == own


def test_first_come_first_served() -> None:
    assert takes(ticket(1))
    assert takes(ticket(1), ticket(2))
    assert not takes(ticket(2), ticket(1))


def test_while_another_asks_nobody_does() -> None:
    turn = decide_turn(of(ticket(1)), queue(asking=TurnHolder("application_9", "bob")), NODES, True)
    assert not turn.may_take
    assert turn.obstacle == TurnHolder("application_9", "bob")


def test_what_does_not_fit_does_not_ask_but_to_probe_when_it_is_first() -> None:
    blocked = ticket(2, 4, bound=Bound.CLUSTER)
    assert not takes(blocked)
    assert takes(blocked, is_probe=True)
    assert not takes(blocked, ticket(1, 4, bound=Bound.CLUSTER), is_probe=True)


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
    for passed in range(MAX_PASSES):
        assert takes(ticket(2), ticket(1, 3, bound=Bound.CLUSTER, passed=passed))
    assert not takes(ticket(2), ticket(1, 3, bound=Bound.CLUSTER, passed=MAX_PASSES))


def test_passes_are_unlimited_at_the_start_of_each_hour() -> None:
    blocked, later = ticket(1, 3, bound=Bound.CLUSTER, passed=MAX_PASSES), ticket(2)
    hour = (NOW // 3_600_000 + 1) * 3_600_000

    def may_pass_at(milliseconds: int, own: Ticket = later) -> bool:
        names = (blocked.name, own.name)
        files = [QueueFile(name, milliseconds, "alice") for name in names]
        snapshot = read_queue(files, milliseconds)
        return decide_turn(of(own), snapshot, NODES, False).may_take

    assert [may_pass_at(hour + after) for after in (-1, 0, 29_999, 30_000)] == [
        False,
        True,
        True,
        False,
    ]
    # A gang that takes what the one ahead needs passes it at no time.
    assert not may_pass_at(hour, ticket(2, 2))


def test_a_limit_that_is_not_ones_own_stops_nobody() -> None:
    often = MAX_PASSES + 9
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
    at_parents_limit = ticket(1, 4, bound=Bound.QUEUE, queue=parent, passed=MAX_PASSES)
    sibling = (queue_tag("root.p.b"), parent, queue_tag("root"))
    assert not takes(ticket(2, 1), at_parents_limit, queues=sibling)
    assert takes(ticket(2, 1), at_parents_limit)


def test_a_blocked_gang_probes_past_those_that_everybody_may_pass() -> None:
    blocked = ticket(2, 4, bound=Bound.CLUSTER)
    elsewhere = ticket(1, bound=Bound.QUEUE, queue=queue_tag("root.b"))
    assert takes(blocked, elsewhere, is_probe=True)
    assert not takes(blocked, elsewhere)
    assert not takes(blocked, ticket(1), is_probe=True)


def test_searches_that_grow_stand_behind_waiting_gangs() -> None:
    grows = ticket(1, is_growth=True)
    assert not takes(grows, ticket(2))
    assert takes(ticket(2), grows)


def test_it_says_who_is_first_and_how_many_are_before() -> None:
    turn = decide_turn(of(ticket(3)), queue(ticket(1, 2), ticket(2), ticket(3)), NODES, False)
    assert turn.obstacle == GangsAhead(2, ticket(1, 2), "alice")


def test_passes_are_counted_while_it_is_blocked() -> None:
    own, later = ticket(1, 3, bound=Bound.CLUSTER), ticket(2)
    before, after = queue(own, later, generation=4), queue(own, generation=5)
    assert count_passes(own, before, after).passed == 1
    assert count_passes(own, after, queue(own, generation=6)).passed == 0
    assert count_passes(own, before, queue(own, generation=9)).passed == 3
    # More makes no difference, and each change is an operation of the NameNode.
    often = dataclasses.replace(own, passed=MAX_PASSES)
    assert count_passes(often, before, queue(own, generation=9)) == often
    assert count_passes(dataclasses.replace(own, bound=Bound.NONE), before, after).passed == 0


def test_those_who_stood_ahead_are_no_passes_and_those_behind_are_whoever_is_first() -> None:
    first, own, later = ticket(0), ticket(1, 3, bound=Bound.CLUSTER), ticket(2)
    before = queue(first, own, later, generation=4)
    assert count_passes(own, before, queue(own, later, generation=5)).passed == 0
    assert count_passes(own, before, queue(first, own, generation=5)).passed == 1
    assert count_passes(own, before, queue(own, generation=7)).passed == 1


def test_a_gang_ahead_that_gave_its_turn_back_passed_nobody() -> None:
    first, own, later = ticket(0), ticket(1, 3, bound=Bound.CLUSTER), ticket(2)
    before = queue(first, own, later, generation=4)
    again = dataclasses.replace(first, turns=2)
    assert count_passes(own, before, queue(again, own, later, generation=8)).passed == 0
    assert count_passes(own, before, queue(again, own, generation=10)).passed == 1
    # It was granted after it had given back turns; nobody behind has gone.
    assert count_passes(own, before, queue(own, later, generation=10)).passed == 0


# --- ranks: who looks how often, and how long a ticket counts --------------------------------


def ranks(*tickets: Ticket) -> list[int]:
    seen = queue(*tickets)
    return [seen.rank_of(one, "alice") for one, _ in seen.tickets]


def test_gangs_of_one_kind_rank_by_their_places() -> None:
    assert ranks(*(ticket(n) for n in range(6))) == [0, 1, 2, 3, 4, 5]


def test_the_first_of_each_size_ranks_by_the_sizes_before_it() -> None:
    large = [ticket(n, 64, bound=Bound.CLUSTER) for n in range(20)]
    small = [ticket(n + 20, bound=Bound.CLUSTER) for n in range(3)]
    assert ranks(*large, *small)[20:] == [1, 3, 5]


def test_gangs_at_a_limit_keep_none_behind_that_waits_for_the_cluster() -> None:
    limited = [
        ticket(n, n + 1, bound=Bound.QUEUE, queue=queue_tag(f"root.q{n % 4}")) for n in range(40)
    ]
    assert ranks(*limited, ticket(50), ticket(51))[40:] == [0, 1]
    by_user = [ticket(n, bound=Bound.USER) for n in range(2)]
    assert ranks(*by_user, ticket(2, bound=Bound.USER)) == [0, 1, 2]
    alices = QueueSnapshot(tuple((one, "alice") for one in by_user), 0, None)
    assert alices.rank_of(ticket(2, bound=Bound.USER), "bob") == 2
    assert alices.rank_of(ticket(2, bound=Bound.QUEUE), "alice") == 2
    assert alices.rank_of(ticket(2), "alice") == 0


def test_a_gang_looks_and_renews_more_rarely_the_lower_it_ranks() -> None:
    assert [poll_seconds(rank) for rank in (0, 1)] == [0.4, 0.4]
    looks = [poll_seconds(rank) for rank in range(1000)]
    assert looks == sorted(looks) and looks[-1] == 60
    assert [renewal_seconds(rank) for rank in (0, 1, 1000)] == [4, 4, 120]


@pytest.mark.parametrize("rank", range(500))
def test_a_ticket_counts_between_two_renewals(rank: int) -> None:
    """A gang renews when it looks, and looks later by a fifth at most."""
    assert renewal_seconds(rank) + 1.2 * poll_seconds(rank) < ticket_ttl_seconds(rank)
    # Half of the gangs ahead may have gone since it looked, unless it looks most rarely.
    half = ticket_ttl_seconds(-(-rank // 2))
    assert renewal_seconds(rank) + 1.2 * poll_seconds(rank) < half or rank > 50


def test_the_dead_count_in_the_first_ranks_no_longer_than_whoever_has_the_turn() -> None:
    assert {ticket_ttl_seconds(rank) for rank in range(4)} == {TICKET_TTL_SECONDS}
    assert max(ticket_ttl_seconds(rank) for rank in range(10_000)) == 300
    alive = [entry(ticket(n).name) for n in range(30)]
    dead = entry(ticket(30).name, TICKET_TTL_SECONDS + 1)
    assert len(read_queue([*alive, dead], NOW).tickets) == 31
    # Those ahead went: it would be the fourth gang now.
    assert len(read_queue([*alive[:3], dead], NOW).tickets) == 3
    # All of the dead are judged by where they would stand, and not by the dead ahead of them.
    crowd = [entry(ticket(n).name, TICKET_TTL_SECONDS + 1) for n in range(40)]
    assert read_queue(crowd, NOW).tickets == ()


def test_a_ticket_that_counts_is_no_litter_of_its_user() -> None:
    alive = [entry(ticket(n).name) for n in range(30)]
    rarely = entry(ticket(30).name, TICKET_TTL_SECONDS + 1)
    assert stale_files([*alive, rarely], "alice", NOW) == ()
    assert stale_files([rarely], "alice", NOW) == (rarely.name,)


@pytest.mark.parametrize("kinds", [1, 6, 12, 36, 100, 500])
def test_500_gangs_cost_the_name_node_few_operations(kinds: int) -> None:
    """A look costs a listing, and a renewal two operations (create, complete)."""
    gangs = [
        ticket(n, 1 + n % kinds % 6, bound=Bound.QUEUE, queue=queue_tag(f"root.q{n % kinds // 6}"))
        if n % kinds >= 6
        else ticket(n, 1 + n % kinds, bound=Bound.CLUSTER)
        for n in range(500)
    ]
    found = ranks(*gangs)
    listings = sum(1 / poll_seconds(rank) for rank in found)
    renewals = sum(1 / max(renewal_seconds(rank), poll_seconds(rank)) for rank in found)
    assert listings + 2 * renewals < 45, (listings, renewals)


# --- elastic gangs give way ----------------------------------------------------------------


def offer(number: int, executors: int, gpus: int = 1, promised: int = 0, run: str = "fit") -> Offer:
    tag, application = queue_tag("root.default"), f"application_1_{number:04d}"
    return Offer(f"{number:08x}", executors, gpus, promised, tag, application, run)


def waiting(*tickets: Ticket, offers: tuple[Offer, ...]) -> QueueSnapshot:
    return dataclasses.replace(queue(*tickets), offers=tuple((one, "alice") for one in offers))


def given(
    own: Offer, *tickets: Ticket, others: tuple[Offer, ...] = (), free: int = 0, user: str = "alice"
) -> int:
    held = {(one.application, "alice"): one.executors * one.gpus for one in others}
    queue_ = waiting(*tickets, offers=(own, *others))
    return executors_to_give(own, user, CHAIN, queue_, free, held)


def short(number: int, executors: int, gpus: int = 1, **other: object) -> Ticket:
    """Return the ticket of a gang for which the cluster has too few free GPUs."""
    return ticket(number, executors, gpus, **{"bound": Bound.CLUSTER, **other})


@pytest.mark.parametrize("run", ["fit", "a-b-c", "名前", "x" * 200])
def test_an_offer_is_read_from_its_name(run: str) -> None:
    one = offer(7, 3, 2, 1, run)
    assert parse_offer(one.name) == dataclasses.replace(one, run=run[:30])
    assert parse_ticket(one.name) is None and len(one.name.encode()) <= 255


@pytest.mark.parametrize("name", ["", "offer-1", "offer-0000000g-1x1-0-00000000-application_1_1-x"])
def test_other_files_are_no_offers(name: str) -> None:
    assert parse_offer(name) is None and parse_offer(ticket(1).name) is None


def test_offers_of_the_dead_do_not_count_and_are_removed_by_their_owner() -> None:
    alive, dead = offer(1, 2), offer(2, 2)
    ages = {alive.name: TICKET_TTL_SECONDS - 1, dead.name: TICKET_TTL_SECONDS + 1}
    entries = [entry(name, age) for name, age in ages.items()]
    assert read_queue(entries, NOW).offers == ((alive, "alice"),)
    assert stale_files(entries, "alice", NOW) == (dead.name,)
    assert stale_files(entries, "bob", NOW) == ()


@pytest.mark.parametrize(
    ("needs", "has", "free", "gives"),
    [
        (2, 3, 0, 2),
        (3, 3, 0, 3),
        (3, 3, 1, 2),
        (4, 3, 0, 0),  # in vain
        (4, 3, 1, 3),
        (2, 3, 2, 0),  # free GPUs suffice
        (1, 0, 0, 0),
    ],
)
def test_what_the_first_gang_lacks_is_given_and_nothing_in_vain(
    needs: int, has: int, free: int, gives: int
) -> None:
    assert given(offer(1, has), short(9, needs), free=free) == gives


def test_whole_executors_are_given() -> None:
    assert given(offer(1, 3, gpus=2), short(9, 3)) == 2
    assert given(offer(1, 3, gpus=1), short(9, 1, gpus=2)) == 0, "they may lie on several nodes"


def test_nothing_is_given_where_nobody_waits_for_it() -> None:
    own = offer(1, 3)
    assert given(own) == 0
    assert given(own, ticket(9, 1, bound=Bound.NONE)) == 0, "it can be granted"
    assert given(own, short(9, 1, is_growth=True)) == 0, "a search that grows is no gang"


def test_only_the_first_that_would_be_helped_counts() -> None:
    assert given(offer(1, 3), short(8, 1), short(9, 3)) == 1
    assert given(offer(1, 3), short(8, 5), short(9, 1)) == 0, "the first is not passed"


def test_the_largest_offers_give_first() -> None:
    small, large = offer(1, 1), offer(2, 3)
    assert given(large, short(9, 4), others=(small,)) == 3
    assert given(small, short(9, 4), others=(large,)) == 1
    assert given(large, short(9, 2), others=(small,)) == 2
    assert given(small, short(9, 2), others=(large,)) == 0
    same = offer(3, 3)
    assert given(large, short(9, 2), others=(same,)) == 2
    assert given(same, short(9, 2), others=(large,)) == 0, "each decides the same by itself"


def test_an_offer_that_is_renamed_counts_once() -> None:
    own = offer(1, 2)
    assert given(own, short(9, 3), others=(offer(1, 2, promised=2),)) == 0


def test_a_limit_is_helped_only_by_gangs_under_it() -> None:
    own, here = offer(1, 2), queue_tag("root.default")
    assert given(own, ticket(9, 2, bound=Bound.QUEUE), free=8) == 2, "free GPUs do not help"
    assert given(own, ticket(9, 2, bound=Bound.QUEUE, queue=queue_tag("root"))) == 2
    assert given(own, ticket(9, 2, bound=Bound.QUEUE, queue=queue_tag("root.other"))) == 0
    assert given(own, ticket(9, 2, bound=Bound.USER, queue=here)) == 2
    assert given(own, ticket(9, 2, bound=Bound.USER, queue=here), user="bob") == 0
    assert given(own, ticket(9, 2, bound=Bound.NODES)) == 2


def test_what_comes_is_said_to_those_who_wait() -> None:
    assert describe_promised(waiting(short(9, 1), offers=(offer(1, 3),))) == ""
    two = offer(1, 3, promised=2, run="resnet")
    one = offer(2, 1, promised=1, run="bert")
    found = describe_promised(waiting(offers=(two, one))).split("; ")
    assert found[0] == "2 GPUs come from alice's 'resnet' at its next checkpoint"
    assert found[1].startswith("1 GPU comes from alice's 'bert'")


def test_a_gang_that_may_be_granted_without_room_asks_ever_more_rarely() -> None:
    probes, now, waited = Probes(100.0), 100.0, []
    for _ in range(7):
        assert not probes.is_due(probes.next - 0.001)
        assert probes.is_due(probes.next)
        waited.append(probes.next - now)
        now = probes.next
        probes.record_probe(now)
    assert waited == [30, 60, 120, 240, 480, 600, 600]


def test_a_gang_behind_others_asks_only_once_it_has_been_first_for_a_while() -> None:
    probes = Probes(0.0)
    probes.record_poll(5.0, is_behind=True)
    assert probes.next == 35
    probes.record_poll(100.0, is_behind=True)
    # The gang ahead asks YARN, and has no ticket meanwhile.
    probes.record_poll(125.0, is_behind=None)
    # Then it is first, since the look before.
    probes.record_poll(140.0, is_behind=False)
    probes.record_poll(150.0, is_behind=False)
    assert not probes.is_due(169.0) and probes.is_due(170.0)
    # After a probe it waits longer anyway.
    probes.record_probe(170.0)
    probes.record_poll(180.0, is_behind=True)
    assert probes.next == 230


def test_a_first_gang_keeps_its_time_while_another_one_asks() -> None:
    probes = Probes(0.0)
    probes.record_poll(1.0, is_behind=False)
    probes.record_poll(20.0, is_behind=None)
    probes.record_poll(29.0, is_behind=False)
    assert probes.is_due(30.0)


def test_only_gangs_ahead_put_one_behind() -> None:
    first, second = ticket(1, executors=4, bound=Bound.CLUSTER), ticket(2, bound=Bound.CLUSTER)
    for own, is_behind in ((first, False), (second, True)):
        turn = decide_turn(of(own), queue(first, second), NODES, is_probe=False)
        assert not turn.may_take and turn.is_behind is is_behind
    busy = queue(first, asking=TurnHolder("", "bob"))
    assert not decide_turn(of(first), busy, NODES, is_probe=True).is_behind


def test_the_largest_offers_give_what_the_free_gpus_do_not_have() -> None:
    offers = {
        name: Offer(name, executors, gpus, 0, CHAIN[0], "application_1", "run")
        for name, executors, gpus in (("0000000a", 1, 4), ("0000000b", 3, 4), ("0000000c", 4, 1))
    }
    waiting = ticket(1, executors=4, gpus=4, bound=Bound.CLUSTER)
    assert split_among_offers(waiting, offers, free=2) == {"0000000b": 3, "0000000a": 1}
    assert split_among_offers(waiting, offers, free=8) == {"0000000b": 2}
    assert split_among_offers(waiting, offers, free=16) == {}
    # Executors of one GPU are of no use to it, and the others do not suffice.
    assert split_among_offers(ticket(1, executors=5, gpus=4), offers, free=3) == {}


def test_who_stands_ahead_is_in_order() -> None:
    tickets = [ticket(number) for number in range(5)]
    whole = queue(*tickets, ticket(0, is_growth=True))
    for number, own in enumerate(tickets):
        assert [t for t, _ in whole.ahead_of(own)] == tickets[:number]
    assert len(whole.ahead_of(ticket(9, is_growth=True))) == 6
