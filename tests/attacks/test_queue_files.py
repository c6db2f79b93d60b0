"""Files that another user puts into the directory of the queue of gangs.

All users may write there. The attacks are names, times and numbers of files.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hdfs import InsecureClient

from hopsgpu.backends.gang_queue import GangQueueReader, QueueMember, make_queue_dir, queued
from hopsgpu.core import queue_policy
from hopsgpu.core.queue_policy import (
    MAX_EXECUTORS,
    MAX_FILES_PER_USER,
    MAX_GANG_GPUS,
    MAX_SECONDS_AHEAD,
    MAX_TURNS,
    MAX_WAIT_SECONDS,
    Bound,
    Candidate,
    IgnoredReason,
    Offer,
    QueueFile,
    QueueSnapshot,
    Ticket,
    asking_name,
    count_passes,
    decide_turn,
    describe_excess,
    describe_promised,
    executors_to_give,
    queue_tag,
    read_queue,
    stale_files,
    turn_name,
)
from hopsgpu.errors import StoreError
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.lake import LakePath

NOW = 1_800_000_000_000
TAG = queue_tag("root.default")
NODES = [8] * 1000


def ticket(number: int, **changes: object) -> Ticket:
    made = Ticket(
        filed=NOW - 1_000_000 + number,
        id=f"{number:08x}",
        is_growth=False,
        executors=1,
        gpus=1,
        queue=TAG,
        bound=Bound.CLUSTER,
        passed=0,
        application=f"application_1_{number:04d}",
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def offer(number: int, executors: int, **changes: object) -> Offer:
    made = Offer(f"{number:08x}", executors, 1, 0, TAG, f"application_1_{number:04d}", "fit")
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def entry(name: str, seconds_ahead: float = 0.0, owner: str = "ann") -> QueueFile:
    return QueueFile(name, NOW + int(seconds_ahead * 1000), owner)


def name_with(field: str, value: str) -> str:
    """Return the name of a ticket or an offer with another number in it."""
    fields = {"filed": f"{NOW:015d}", "size": "1x1", "passed": "0", "turns": "0", "promised": "0"}
    fields[field] = value
    if field == "promised":
        return f"offer-00000009-1x1-{value}-{TAG}-application_1_0009-fit"
    return (
        f"ticket-{fields['filed']}-00000009-gang-{fields['size']}-{TAG}-cluster-{fields['passed']}"
        f"-{fields['turns']}-application_1_0009"
    )


IMPOSSIBLE = {
    "executors of 14 digits": name_with("size", "99999999999999x1"),
    "more executors than a cluster has": name_with("size", f"{MAX_EXECUTORS + 1}x1"),
    "no executors": name_with("size", "0x1"),
    "more GPUs than a node has": name_with("size", "1x9999"),
    "more GPUs than a cluster has": name_with("size", f"{MAX_EXECUTORS}x1000"),
    "passes": name_with("passed", "9"),
    "passes of 200 digits": name_with("passed", "9" * 100),
    "turns of 100 digits": name_with("turns", "9" * 100),
    "filed before the epoch of hopsgpu": name_with("filed", "0" * 15),
    "filed in the future": name_with("filed", "9" * 15),
    "a huge offer": f"offer-00000009-99999999999999x1-0-{TAG}-application_1_0009-fit",
    "an offer of more GPUs than a cluster has": (
        f"offer-00000009-{MAX_EXECUTORS}x1000-0-{TAG}-application_1_0009-fit"
    ),
    "a huge promise": name_with("promised", "9" * 14),
    "a turn of twelve nines": "turn-999999999999",
    "a turn of thirteen digits": "turn-1000000000000",
    "digits of another script": name_with("size", "١x١"),
    "an application of 200 characters": f"asking-000000000001-{'a' * 200}",
    "an asking gang of twelve nines": "asking-999999999999-application_1_0009",
    "another name": "readme.txt",
    "control characters": "\x1b[2J",
    "an offer of a run with an unsafe name": f"offer-00000009-1x1-0-{TAG}-application_1_0009-a#b",
}


@pytest.mark.parametrize("name", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_name_with_an_impossible_number_does_not_count(name: str) -> None:
    honest = [entry(ticket(1).name), entry(offer(2, 3).name), entry(turn_name(6))]
    seen = read_queue([entry(name, owner="eve"), *honest], NOW)
    expected = read_queue(honest, NOW)
    assert dataclasses.replace(seen, ignored=()) == expected and expected.ignored == ()
    ((found),) = seen.ignored
    assert (found.name, found.owner, found.reason) == (name, "eve", IgnoredReason.NAME)
    assert str(found).isprintable()


def test_the_largest_numbers_are_read() -> None:
    largest = ticket(
        1,
        executors=MAX_EXECUTORS,
        gpus=MAX_GANG_GPUS // MAX_EXECUTORS,
        turns=MAX_TURNS,
        passed=queue_policy.MAX_PASSES,
        filed=NOW - MAX_WAIT_SECONDS * 1000,
    )
    assert [found for found, _ in read_queue([entry(largest.name)], NOW).tickets] == [largest]


def test_a_huge_gang_that_can_exist_costs_a_decision_nothing() -> None:
    """Its executors must not be listed one by one, for each look of each gang."""
    huge = ticket(1, executors=MAX_EXECUTORS, gpus=1)
    own = ticket(2, bound=Bound.NONE)
    tickets = tuple((one, "eve") for one in (huge, own))
    steps = count_lines(
        lambda: decide_turn(
            Candidate(own, "ann", (TAG,)), QueueSnapshot(tickets, 0, None), NODES, False
        )
    )
    assert steps < 1000


def test_a_huge_turn_does_not_end_the_numbers() -> None:
    """The next generation must be one that others can read, at any time."""
    for nines in range(1, 13):
        queue = read_queue([entry(turn_name(6)), entry(turn_name(10**nines - 1), owner="eve")], NOW)
        mine = entry(turn_name(queue.next_generation))
        later = [*[entry(turn_name(g)) for g in (6, 10**nines - 1)], mine]
        # The file with the largest number that counts now is not the end either, a second later.
        seen = read_queue(later, NOW + 1000)
        assert seen.generation == queue.next_generation, nines
        assert seen.turn_holder is not None


def test_generations_that_a_busy_queue_reaches_are_read() -> None:
    """A turn each second, for a year, since the first release."""
    seconds = NOW // 1000 - 1_767_225_600
    assert read_queue([entry(turn_name(2 * seconds))], NOW).generation == 2 * seconds
    # A NameNode with a wrong clock.
    old = QueueFile(turn_name(1001), 5000, "ann")
    assert read_queue([old], 5000).turn_holder is not None


@pytest.mark.parametrize(
    "name",
    [ticket(1).name, offer(1, 3).name, asking_name(7, "application_1_0001"), "draft-00000001"],
)
def test_a_file_of_the_future_does_not_count(name: str) -> None:
    ahead = MAX_SECONDS_AHEAD + 1
    seen = read_queue([entry(name, ahead)], NOW)
    assert (seen.tickets, seen.offers) == ((), ())
    assert [file.reason for file in seen.ignored] == [IgnoredReason.TIME]
    # Its owner's next gang removes it.
    if not name.startswith("asking"):
        assert stale_files([entry(name, ahead)], "ann", NOW) == (name,)


def test_a_turn_of_the_future_blocks_nobody_and_keeps_its_number() -> None:
    seen = read_queue([entry(turn_name(7), MAX_SECONDS_AHEAD + 1, "eve")], NOW)
    assert (seen.generation, seen.turn_holder, seen.next_generation) == (7, None, 9)


def test_a_file_that_was_renewed_during_a_slow_look_counts() -> None:
    files = [entry(name, MAX_SECONDS_AHEAD - 1) for name in (ticket(1).name, turn_name(7))]
    seen = read_queue(files, NOW)
    assert len(seen.tickets) == 1 and seen.turn_holder is not None and seen.ignored == ()


def test_a_user_has_a_number_of_tickets_and_of_offers() -> None:
    crowd = [ticket(n) for n in range(16_000)]
    offers = [offer(n, 1) for n in range(16_000)]
    honest = ticket(20_000)
    files = [entry(one.name, owner="eve") for one in (*reversed(crowd), *reversed(offers))]
    seen = read_queue([*files, entry(honest.name)], NOW)
    first = [(one, "eve") for one in crowd[:MAX_FILES_PER_USER]]
    assert list(seen.tickets) == [*first, (honest, "ann")]
    assert [one.id for one, _ in seen.offers] == [one.id for one in offers[:MAX_FILES_PER_USER]]
    reasons = {file.reason for file in seen.ignored}
    assert reasons == {IgnoredReason.EXCESS}
    assert len(seen.ignored) == 2 * (16_000 - MAX_FILES_PER_USER)
    # The user's own gangs are told, and do not remove each other's tickets.
    assert "the first 100 tickets" in describe_excess(seen, crowd[-1])
    assert describe_excess(seen, honest) == describe_excess(seen, crowd[0]) == ""
    assert stale_files(files, "eve", NOW) == ()


def test_expired_tickets_take_no_place_of_their_user() -> None:
    dead = [entry(ticket(n).name, -9999) for n in range(2 * MAX_FILES_PER_USER)]
    own = ticket(9999)
    seen = read_queue([*dead, entry(own.name)], NOW)
    assert seen.tickets == ((own, "ann"),) and seen.ignored == ()


class CountedName(str):
    """The name of a user, which counts how often it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


def count_lines(act: Callable[[], object]) -> int:
    """Return how many lines of Python something executes, on all levels."""
    count = 0

    def trace(frame: object, event: str, arg: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def crowd_of_users(count: int) -> list[QueueFile]:
    """Tickets of as many users, each of another kind: they wait at their own limits."""
    return [
        entry(ticket(n, bound=Bound.USER).name, owner=CountedName(f"user{n:05d}"))
        for n in range(count)
    ]


def work_for(count: int) -> tuple[int, int]:
    files = crowd_of_users(count)
    own = ticket(99_999, bound=Bound.NONE)
    CountedName.comparisons = 0

    def look() -> None:
        snapshot = read_queue([*files, entry(own.name)], NOW)
        assert len(snapshot.tickets) == count + 1
        snapshot.rank_of(own, "ann")
        count_passes(own, snapshot, snapshot)
        decide_turn(Candidate(own, "ann", (TAG,)), snapshot, NODES, False)

    return count_lines(look), CountedName.comparisons


def test_a_look_at_many_files_is_linear() -> None:
    (lines, comparisons), (more_lines, more_comparisons) = work_for(2000), work_for(8000)
    assert more_lines < 4.4 * lines
    # Comparing each user with each other would be 32 million.
    assert comparisons < 8 * 2000 and more_comparisons < 8 * 8000


def given(
    offers: tuple[tuple[Offer, str], ...], held: dict[tuple[str, str], int], needs: int
) -> int:
    """Return what ann's gang, which offers 2 executors, gives to one that waits."""
    own = offer(1, 2)
    queue = QueueSnapshot(((ticket(9, executors=needs), "bob"),), 0, None, ((own, "ann"), *offers))
    return executors_to_give(own, "ann", (TAG,), queue, 0, held)


def test_an_offer_counts_as_far_as_its_application_has_gpus() -> None:
    """Otherwise gangs would believe that others give enough, or that all together do."""
    huge = offer(7, MAX_EXECUTORS)
    held = {("application_1_0001", "ann"): 2, ("application_1_0007", "bob"): 1}
    assert given(((huge, "eve"),), held, needs=2) == 2, "the application is bob's"
    assert given(((huge, "eve"),), held, needs=3) == 0, "in vain"
    assert given(((huge, "bob"),), held, needs=2) == 2, "it has 1 GPU, so ann's is larger"
    assert given(((huge, "bob"),), held, needs=3) == 2
    several = tuple((offer(n, 1, application="application_1_0007"), "bob") for n in (7, 8, 9))
    assert given(several, held, needs=4) == 0, "together they have 1 GPU"


def test_an_offer_with_the_id_of_another_changes_nothing() -> None:
    twin = offer(1, 90, application="application_1_0007")
    held = {("application_1_0001", "ann"): 2, ("application_1_0007", "eve"): 90}
    assert given(((twin, "eve"),), {}, needs=2) == 2
    assert given(((twin, "eve"),), held, needs=2) == 0, "the larger offer gives first"
    assert given(((twin, "eve"),), held, needs=91) == 1, "no more than it offers"


def test_a_ticket_with_the_id_of_another_hides_no_pass() -> None:
    first, own, later = ticket(1), ticket(2), ticket(3)
    before = QueueSnapshot(tuple((one, "ann") for one in (first, own, later)), 4, None)
    twin = dataclasses.replace(first, filed=NOW - 10, turns=MAX_TURNS)
    after = QueueSnapshot(((first, "ann"), (own, "ann"), (twin, "eve")), 6, None)
    assert count_passes(own, before, after).passed == 1


def test_only_the_holder_of_a_turn_says_who_asks() -> None:
    files = [
        entry(turn_name(7), owner="ann"),
        entry(asking_name(7, "application_1_0001"), owner="ann"),
        entry(asking_name(7, "application_9_9999"), owner="eve"),
    ]
    for order in (files, files[::-1]):
        holder = read_queue(order, NOW).turn_holder
        assert holder is not None and holder.application == "application_1_0001"


def test_a_sentence_lists_few_offers() -> None:
    offers = tuple((offer(n, 1, promised=1), "eve") for n in range(90))
    sentence = describe_promised(QueueSnapshot((), 0, None, offers))
    assert len(sentence) < 500 and sentence.endswith("85 other gangs will release more")


# --- the same on a lake ----------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> LakePath:
    return make_queue_dir(LakePath(f"file://{tmp_path}"), "blue", "default")


@pytest.fixture
def member(directory: LakePath) -> Iterator[QueueMember]:
    one = QueueMember(directory, application="application_1_0001", executors=1, gpus=1)
    with queued(one):
        yield one


def test_a_gang_gets_its_turn_among_hostile_files(
    directory: LakePath, member: QueueMember, caplog: pytest.LogCaptureFixture
) -> None:
    """Names that can be guessed are taken: of the next turns, and of who asks."""
    for name in IMPOSSIBLE.values():
        Path(directory.path, name).touch()
    with caplog.at_level(logging.INFO, logger="hopsgpu"):
        for _ in range(3):
            decision = member.request_turn(Bound.NONE, TAG, (TAG,), [1], False)
            assert decision.may_take
            assert member.renew_turn()
            member.give_back_turn()
    named = [r.getMessage() for r in caplog.records if "ignores a file" in r.getMessage()]
    # Each is named once, and only so many.
    assert len(named) == len(set(named)) == min(len(IMPOSSIBLE), 20)
    assert all(message.isprintable() for message in named)


def test_a_name_of_who_asks_that_is_taken_stops_nobody(
    directory: LakePath, member: QueueMember
) -> None:
    """On HDFS another user's file refuses; here a directory does."""
    (directory / asking_name(1, "application_1_0001")).make()
    (directory / asking_name(1, "application_1_0001") / "full").write(b"")
    assert member.request_turn(Bound.NONE, TAG, (TAG,), [1], False).may_take
    member.give_back_turn()
    assert member.request_turn(Bound.NONE, TAG, (TAG,), [1], False).may_take


def test_a_name_of_a_ticket_that_is_taken_does_not_keep_its_bound(
    directory: LakePath, member: QueueMember
) -> None:
    member.file_ticket(dataclasses.replace(member.ticket, bound=Bound.CLUSTER))
    free = dataclasses.replace(member.ticket, bound=Bound.NONE)
    (directory / free.name).write(b"")
    member.update_ticket(free)
    (directory / free.name).remove()
    ((seen, _),) = member.poll().tickets
    assert seen == member.ticket and seen.bound is Bound.NONE


def test_a_gang_with_too_many_turns_keeps_its_place(
    directory: LakePath, member: QueueMember
) -> None:
    member.ticket = dataclasses.replace(member.ticket, turns=MAX_TURNS)
    assert member.request_turn(Bound.NONE, TAG, (TAG,), [1], False).may_take
    member.give_back_turn()
    member.file_ticket(member.ticket)
    assert [one for one, _ in member.poll().tickets] == [member.ticket]


def test_a_reader_counts_what_it_ignores(directory: LakePath, member: QueueMember) -> None:
    member.file_ticket(member.ticket)
    for name in ("turn-999999999999", "readme.txt"):
        (directory / name).write(b"")
    queues, problems = GangQueueReader(directory.parent).read()
    snapshot, _ = queues["default"]
    assert {file.name for file in snapshot.ignored} == {"turn-999999999999", "readme.txt"}
    assert len(snapshot.tickets) == 1 and problems == []


# --- the same on HDFS, where ann may not change the files of eve ------------------------------


@pytest.fixture
def web_address(cluster_env: dict[str, str]) -> str:
    return HadoopConf.load_hdfs(cluster_env).all_values()["dfs.namenode.http-address"]


@pytest.fixture
def of_ann(web_address: str, hdfs_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LakePath]:
    """A queue's directory that the superuser has made, for a client of ann."""
    base = LakePath(f"{hdfs_url}/tmp/attacks-{uuid.uuid4().hex}")
    base.make()
    made = make_queue_dir(base, "blue", "default")
    with monkeypatch.context() as patch:
        patch.setenv("HADOOP_USER_NAME", "ann")
        yield LakePath(f"webhdfs://{web_address}{made.path}").with_client()
    base.remove()


def test_another_users_files_on_hdfs_keep_no_gang_from_its_turn(
    web_address: str, of_ann: LakePath
) -> None:
    eve = InsecureClient(f"http://{web_address}", "eve")

    def put(name: str, seconds_ahead: float = 0.0) -> None:
        eve.write(f"{of_ann.path}/{name}", b"")
        if seconds_ahead:
            dated = int((time.time() + seconds_ahead) * 1000)
            eve.set_times(f"{of_ann.path}/{name}", modification_time=dated)

    now = int(time.time() * 1000)
    put("turn-999999999999")
    put(turn_name(7), 86_400)
    for generation in (9, 11):
        put(asking_name(generation, "application_1_0001"))
    put(ticket(0, filed=now - 9_000_000, bound=Bound.NONE).name, 86_400)
    put(name_with("size", "99999999999999x1"))
    put("readme.txt")
    member = QueueMember(of_ann, application="application_1_0001", executors=1, gpus=1)
    with queued(member):
        for generation in (9, 11):
            assert member.request_turn(Bound.NONE, TAG, (TAG,), [1], False).may_take
            assert turn_name(generation) in of_ann.names()
            assert member.renew_turn()
            member.give_back_turn()
        assert member.owner == "ann"
    ((snapshot, _),) = GangQueueReader(of_ann.parent).read()[0].values()
    assert {file.owner for file in snapshot.ignored} == {"eve"} and len(snapshot.ignored) == 4
    # The directory is sticky.
    with pytest.raises(StoreError, match="(?i)permission denied"):
        (of_ann / "readme.txt").remove()
