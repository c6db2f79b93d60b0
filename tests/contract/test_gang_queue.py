"""The queue of gangs on every lake and in Leases: one turn at a time, in order; turns expire."""

from __future__ import annotations

import dataclasses
import getpass
import os
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hdfs import InsecureClient

from hopsgpu.backends.gang_queue import (
    DEFAULT_PARTITION,
    GangQueueReader,
    QueueMember,
    StandingOffer,
    make_queue_dir,
    queued,
)
from hopsgpu.cluster_managers.kubernetes.lease_directory import (
    LeaseQueueDirectory,
    LeaseQueueRoot,
    lease_name,
)
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.core import queue_policy
from hopsgpu.core.queue_policy import Bound, Candidate, decide_turn
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.contract.conftest import directory_of

NODES = (2, 2)
LAKES = ["file", "hdfs", "webhdfs"]
LEASES = "leases"

Directory = LakePath | LeaseQueueDirectory


def another_client(directory: Directory) -> Directory:
    """The same directory as another process has it."""
    if isinstance(directory, LakePath):
        return LakePath(directory.url)
    return leases(directory._client, directory._path, directory._partition) / directory._partition


def leases(client: Any, path: str, partition: str) -> LeaseQueueRoot:
    return LeaseQueueRoot(client, path, (partition,), getpass.getuser)


def root_and_partition(directory: Directory) -> tuple[LakePath | LeaseQueueRoot, str]:
    if isinstance(directory, LakePath):
        return directory.parent, directory.url.rpartition("/")[2]
    partition = directory._partition
    return leases(directory._client, directory._path, partition), partition


def place(directory: Directory, number: int, executors: int = 1) -> QueueMember:
    return QueueMember(
        another_client(directory),
        application=f"application_1_{number:04d}",
        executors=executors,
        gpus=1,
    )


def file(one: QueueMember, **changes: Any) -> None:
    one.file_ticket(dataclasses.replace(one.ticket, **changes))


def filed(*places: QueueMember) -> list[QueueMember]:
    """Files them; in their order, which chance decides within one tick of the lake's clock."""
    for one in places:
        file(one)
    return sorted(places, key=lambda one: one.ticket.order)


def try_turn(one: QueueMember) -> bool:
    if not one.has_ticket:
        file(one)
    snapshot = one.poll()
    own = Candidate(one.ticket, one.owner, (one.ticket.queue,))
    return decide_turn(own, snapshot, NODES, False).may_take and one.take_turn(snapshot)


def wait_turn(one: QueueMember) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not try_turn(one):
        assert time.monotonic() < deadline, [entry.name for entry in one._directory.entries()]
        time.sleep(0.005)  # the lake tells nobody that a turn is free


@pytest.fixture(
    params=[*LAKES, pytest.param(LEASES, marks=pytest.mark.kubernetes)],
    name="lake",
)
def lake_or_none(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LakePath | None]:
    """The lake with the queue; None for a queue in Leases."""
    if request.param == LEASES:
        yield None
        return
    yield from directory_of(request, tmp_path)


only_on_lakes = pytest.mark.parametrize("lake", LAKES, indirect=True)


@pytest.fixture
def directory(lake: LakePath | None, request: pytest.FixtureRequest) -> Iterator[Directory]:
    if lake is not None:
        lake.make()
        yield make_queue_dir(lake, "hopsgpu", "locks", "cluster", DEFAULT_PARTITION)
        return
    manager: ClusterManager = request.getfixturevalue("manager")
    assert isinstance(manager, KubernetesManager)
    # Another queue for each test.
    partition = f"contract-{uuid.uuid4().hex[:12]}"
    directory = manager.queue_root((partition,)) / partition
    yield directory
    for name in directory.names():
        (directory / name).remove()


@only_on_lakes
def test_the_directory_is_sticky_and_for_all(directory: LakePath) -> None:
    assert directory.stat().mode == 0o1777
    again = directory.url.partition("/hopsgpu/")[0]
    assert make_queue_dir(LakePath(again), "hopsgpu", "locks", "cluster", "default") == directory


def test_one_at_a_time_and_in_order(directory: Directory) -> None:
    first, second = place(directory, 1), place(directory, 2)
    with queued(first), queued(second):
        first, second = filed(first, second)
        assert not try_turn(second)
        assert try_turn(first)
        holder = queue_policy.TurnHolder(first.ticket.application, first.owner)
        assert second.poll().turn_holder == holder
        assert not try_turn(second)
        first.give_back_turn()
        assert try_turn(second)
    assert directory.names() == (queue_policy.turn_name(4),)


def test_many_at_once_never_have_the_turn_together(directory: Directory) -> None:
    asking = threading.Semaphore(1)
    order = []

    def ask(number: int) -> None:
        one = place(directory, number)
        with queued(one):
            for _ in range(3):
                file(one)
                wait_turn(one)
                assert asking.acquire(blocking=False), "two had the turn"
                order.append(number)
                asking.release()
                one.give_back_turn()
                one.ticket = dataclasses.replace(one.ticket, filed=0)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(ask, range(6)))
    assert sorted(order) == sorted([*range(6)] * 3)
    # The highest generation stays, so that no number is used twice.
    assert directory.names() == (queue_policy.turn_name(36),)


def test_who_gave_back_a_part_stands_again_where_it_stood(directory: Directory) -> None:
    first, second = place(directory, 1), place(directory, 2)
    with queued(first), queued(second):
        first, second = filed(first, second)
        assert try_turn(first)
        first.give_back_turn()
        assert not first.has_ticket
        file(first)
        assert not try_turn(second)
        assert try_turn(first)


def test_whoever_crashed_stops_nobody(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_policy, "TICKET_TTL_SECONDS", 5.0)
    monkeypatch.setattr(queue_policy, "RENEW_SECONDS", 1.0)
    holder, waiting, later = (place(directory, number) for number in range(3))
    file(holder)
    began = time.monotonic()
    assert try_turn(holder)
    file(waiting)
    with queued(later):
        file(later)
        assert not try_turn(later)
        wait_turn(later)
        assert 3 < time.monotonic() - began < HANG_SECONDS
        # The one that was thought dead comes back: it learns of it, and does no harm.
        assert later.renew_turn()
        assert not holder.renew_turn()
        holder.give_back_turn()
        assert later.poll().turn_holder is not None
        # Its clock is late by what its last request took, which may be longer than before.
        dead = waiting.ticket.application
        assert until(lambda: dead not in [t.application for t, _ in later.poll().tickets])
    # What the dead left goes with the next of the same user.
    assert [name for name in directory.names() if name.startswith("ticket")] == []


def test_a_late_claim_of_a_number_that_was_passed_is_no_turn(directory: Directory) -> None:
    late, quick = place(directory, 1), place(directory, 2)
    with queued(late), queued(quick):
        file(late)
        old = late.poll()
        file(quick)
        for _ in range(2):
            assert quick.take_turn(quick.poll())
            quick.give_back_turn()
            file(quick)
        quick.leave()  # takes the passed turns away
        assert not late.take_turn(old)
        assert not late.has_ticket
        assert try_turn(late)


def test_a_gang_that_asks_files_its_ticket_waits_and_takes_the_turn(directory: Directory) -> None:
    first, second = place(directory, 1), place(directory, 2)
    queue = queue_policy.queue_tag("root.default")

    def asks(one: QueueMember, bound: Bound) -> bool:
        return one.request_turn(bound, queue, (queue,), NODES, False).may_take

    with queued(first), queued(second):
        assert not asks(first, Bound.CLUSTER)
        assert not asks(second, Bound.CLUSTER)
        by_order = sorted((first, second), key=lambda one: one.ticket.order)
        for one in by_order:
            assert not asks(one, Bound.CLUSTER)
        assert [one.rank for one in by_order] == [0, 1]
        assert asks(by_order[0], Bound.NONE)
        assert not asks(by_order[1], Bound.NONE)
        by_order[0].give_back_turn()
        assert not asks(by_order[0], Bound.CLUSTER)
        assert by_order[0].ticket.turns == 1
        assert not asks(by_order[1], Bound.CLUSTER)
        assert by_order[1].ticket.passed == 0
    assert [name for name in directory.names() if name.startswith("ticket")] == []


def test_a_ticket_that_was_removed_is_there_again_after_a_look(directory: Directory) -> None:
    one = place(directory, 1)
    with queued(one):
        file(one)
        (directory / one.ticket.name).remove()
        one.poll()
        assert [ticket for ticket, _ in one.poll().tickets] == [one.ticket]


def test_a_ticket_says_what_bounds_it(directory: Directory) -> None:
    one = place(directory, 1, executors=3)
    with queued(one):
        file(one, bound=Bound.CLUSTER)
        one.update_ticket(dataclasses.replace(one.ticket, bound=Bound.QUEUE, passed=1))
        seen = one.poll().tickets[0][0]
        assert (seen.bound, seen.passed, seen.executors) == (Bound.QUEUE, 1, 3)
        assert seen == one.ticket


class Refusals:
    """Mixed into a directory: it refuses the call whose number is set."""

    def refuse(self, number: int) -> None:
        self.__dict__["left"] = [number]

    def entries(self) -> Any:
        self._count()
        return super().entries()  # type: ignore[misc]

    def __truediv__(self, name: str) -> Any:
        self._count()
        return super().__truediv__(name)  # type: ignore[misc]

    def _count(self) -> None:
        left = self.__dict__.setdefault("left", [0])
        left[0] -= 1
        if left[0] == 0:
            raise StoreError("the lake refused")


class Refusing(Refusals, LakePath):
    pass


class RefusingLeases(Refusals, LeaseQueueDirectory):
    pass


def refusing(directory: Directory) -> Refusing | RefusingLeases:
    if isinstance(directory, LakePath):
        return Refusing(directory.url)
    client, path, partition = directory._client, directory._path, directory._partition
    return RefusingLeases(client, path, partition, getpass.getuser)


@pytest.mark.parametrize("number", range(1, 25))
def test_a_lake_that_refuses_in_between_stops_nobody(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whatever call fails: the turn is had or given back, and the others get theirs."""
    monkeypatch.setattr(queue_policy, "RENEW_SECONDS", 0.0)
    unlucky, other = place(directory, 1), place(directory, 2)
    unlucky._directory = lake = refusing(directory)
    with queued(unlucky), queued(other):
        file(other)
        lake.refuse(number)
        had = {unlucky: 0, other: 0}
        deadline = time.monotonic() + HANG_SECONDS
        while min(had.values()) < 3 and time.monotonic() < deadline:
            for one in had:
                try:
                    if try_turn(one):
                        assert one.renew_turn()
                        had[one] += 1
                        one.give_back_turn()
                        one.ticket = dataclasses.replace(one.ticket, filed=0)
                except StoreError as error:
                    assert "refused" in str(error)
        assert min(had.values()) >= 3, had
    entries = directory.names()
    assert [name for name in entries if name.startswith(("ticket", "draft"))] == []
    assert int(max(name for name in entries if name.startswith("turn"))[-12:]) % 2 == 0


def test_an_offer_stands_with_its_number_and_is_withdrawn(directory: Directory) -> None:
    standing = StandingOffer(directory, application="application_1_0001", gpus=2, run="fit")
    queues = (queue_policy.queue_tag("root.default"), queue_policy.queue_tag("root"))
    assert standing.renew(3, 0, queues, free=0, held={}) == 0
    with queued(place(directory, 9, executors=3)) as waiting:
        file(waiting, bound=Bound.CLUSTER)
        assert standing.renew(3, 0, queues, free=0, held={}) == 2
        assert standing.renew(3, 2, queues, free=2, held={}) == 1
        snapshot = waiting.poll()
        ((offer, owner),) = snapshot.offers
        assert (offer.executors, offer.gpus, offer.promised) == (3, 2, 2)
        assert (
            queue_policy.describe_promised(snapshot)
            == f"4 GPUs come from {owner}'s 'fit' at its next checkpoint"
        )
        assert standing.renew(1, 0, queues, free=0, held={}) == 0, "in vain"
    standing.withdraw()
    standing.withdraw()
    assert directory.names() == ()


def test_a_reader_sees_who_waits_and_for_how_long(directory: Directory) -> None:
    now = [0.0]
    cluster, partition = root_and_partition(directory)
    reader = GangQueueReader(cluster, lambda: now[0])
    one = place(directory, 1, executors=3)
    file(one)
    snapshot, there = reader.read()[0][partition]
    assert [(ticket.application, ticket.executors) for ticket, _ in snapshot.tickets] == [
        ("application_1_0001", 3)
    ]
    assert there >= snapshot.tickets[0][0].filed
    now[0] = 10.0
    snapshot, later = reader.read()[0][partition]
    assert snapshot.tickets and later - there == pytest.approx(10_000, abs=1)
    # Nobody renews it.
    now[0] = 2 * queue_policy.TICKET_TTL_SECONDS
    assert reader.read()[0][partition][0].tickets == ()
    one.leave()


@only_on_lakes
def test_a_reader_needs_no_directory(directory: LakePath) -> None:
    assert GangQueueReader(directory / "none").read() == ({}, [])


@only_on_lakes
def test_directories_that_others_made_stop_no_reader(directory: LakePath) -> None:
    cluster, partition = directory.parent, directory.url.rpartition("/")[2]
    one = place(directory, 1)
    file(one)
    (cluster / "empty").make()
    found, problems = GangQueueReader(cluster).read()
    assert found["empty"][0].tickets == () and found[partition][0].tickets and problems == []
    one.leave()


@pytest.mark.parametrize("ahead", [120.0, 7200.0])
def test_a_file_of_the_future_does_not_make_others_look_dead(
    directory: Directory, request: pytest.FixtureRequest, ahead: float
) -> None:
    now = [0.0]
    cluster, partition = root_and_partition(directory)
    one = place(directory, 1)
    file(one)
    odd = directory / dataclasses.replace(one.ticket, id="0" * 8).name
    odd.write(b"")
    if isinstance(directory, LakePath):
        date(odd, time.time() + ahead, request)
    else:
        date_lease(directory, odd.name, time.time() + ahead)
    reader = GangQueueReader(cluster, lambda: now[0])
    snapshot, there = reader.read()[0][partition]
    assert one.ticket in [ticket for ticket, _ in snapshot.tickets]
    assert there / 1000 == pytest.approx(time.time(), abs=60)
    # Those who are gone are seen to be.
    now[0] = 2 * queue_policy.TICKET_TTL_SECONDS
    assert one.ticket not in [ticket for ticket, _ in reader.read()[0][partition][0].tickets]
    odd.remove()
    one.leave()


def test_a_renewal_dates_the_directory(hdfs_lake: LakePath) -> None:
    """By which a reader knows the NameNode's clock."""
    hdfs_lake.make()
    one = hdfs_lake / "one"
    one.write(b"")
    before = hdfs_lake.stat().modified
    assert until(lambda: time.time() * 1000 > before + 100)
    one.write(b"")
    assert hdfs_lake.stat().modified > before


def date(file: LakePath, when: float, request: pytest.FixtureRequest) -> None:
    """Sets the time of a file, as its owner may."""
    if file.is_local:
        os.utime(file.path, (when, when))
        return
    url = request.getfixturevalue("webhdfs_url").replace("webhdfs://", "http://")
    client = InsecureClient(url, getpass.getuser())
    client.set_times(file.path, modification_time=int(when * 1000))


def date_lease(directory: LeaseQueueDirectory, name: str, when: float) -> None:
    """Sets the time of a Lease, by a writer that the API server does not know."""
    path = f"{directory._path}/{lease_name(directory._partition, name)}"
    lease = directory._client.get(path)
    (entry,) = lease["metadata"]["managedFields"]
    forged = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))
    owned = {"f:metadata": {"f:labels": {".": {}, "f:hopsgpu/queue": {}}}}
    entry = {**entry, "manager": "forger", "time": forged, "fieldsV1": owned}
    metadata = {**lease["metadata"], "managedFields": [entry]}
    directory._client.replace(path, {**lease, "metadata": metadata})
    (status,) = [entry for entry in directory.entries() if entry.name == name]
    assert status.modified == int(when) * 1000
