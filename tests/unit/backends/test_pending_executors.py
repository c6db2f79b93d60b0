"""What executors are waited for by."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.backends.spark.pending_executors import EndedContainers, PendingExecutors, WaitWatcher
from hopsgpu.core.wait_reasons import (
    NO_WAIT,
    WaitReason,
    granted_part,
    starting_executors,
    withdrew_requests,
)
from hopsgpu.errors import Cancelled, GangTimeout
from tests.unit import plans

FULL = WaitReason("Queue q is full")


def request(timeout: float | None) -> Request:
    watcher: Any = None
    return plans.request(WaitWatcher(watcher, print), timeout=timeout)


def there(*containers: str) -> dict[str, str]:
    return dict.fromkeys(containers, "node1")


def ended_again(coming: PendingExecutors, times: int) -> None:
    for number in range(times):
        coming.update(there(f"c{number}"), [], 1, 1)
    coming.update(there(), [], 1, 1)


def test_containers_that_are_gone_without_having_come_have_ended_again() -> None:
    ended = EndedContainers(FailingHosts())
    assert ended.with_exits() == NO_WAIT and ended.with_exits(FULL) == FULL
    ended.update(there("c1", "c2"), 2)
    ended.update(there("c2", "c3"), 2, arrived=["c2"])
    assert ended.count == 1
    reason = ended.with_exits(FULL)
    assert reason.sentence == "1 executor ended unexpectedly on node1; queue q is full"
    assert "see the node's log of c1" in reason.details[0]
    # Whoever came and is gone did not end again: it was let go, say.
    ended.update(there(), 2, arrived=["c2"])
    assert ended.count == 2 and "see the node's log of c3" in str(ended.with_exits())
    ended.update(there("c1"), 2, arrived=["c2", "c3"])
    assert ended.count == 0, "a look that missed it"


def test_once_one_has_come_the_earlier_do_not_count() -> None:
    ended = EndedContainers(FailingHosts())
    ended.update(there("c1"), 1)
    ended.update(there(), 2)
    ended.forget()
    assert ended.count == 0 and ended.with_exits(FULL) == FULL
    ended.update(there(), 2)
    assert ended.count == 0


def test_what_hopsgpu_lets_go_has_not_ended_again() -> None:
    ended = EndedContainers(FailingHosts())
    ended.update(there("c1", "c2"), 2)
    ended.update(there("c2"), 2)
    ended.expect_exit()
    ended.update(there(), 2)
    assert ended.count == 1 and "see the node's log of c1" in str(ended.with_exits())


def test_what_yarn_granted_beyond_the_request_has_not_ended_again() -> None:
    failing = FailingHosts()
    ended = EndedContainers(failing)
    ended.update({"c2": "a", "c3": "b", "c4": "b", "c5": "c"}, 3)
    ended.update({"c2": "a", "c3": "b", "c4": "b"}, 3)
    assert ended.count == 0 and not failing.containers()
    # One of these ends, and is replaced.
    ended.update({"c3": "b", "c4": "b", "c6": "a"}, 3)
    assert ended.count == 1 and failing.containers() == {"c2": "a"}


def test_a_surplus_is_what_exceeds_the_number_that_spark_wanted_then() -> None:
    failing = FailingHosts()
    ended = EndedContainers(failing)
    ended.update({}, 4)
    ended.update({"c2": "a", "c3": "b", "c4": "b", "c5": "c"}, 3)
    ended.update({"c2": "a", "c3": "b", "c4": "b"}, 4)
    assert ended.count == 0 and not failing.containers()
    ended.update({"c2": "a", "c3": "b", "c4": "b", "c6": "c"}, 4)
    ended.update({"c2": "a", "c3": "b", "c4": "b"}, 4)
    assert ended.count == 1 and failing.containers() == {"c6": "c"}
    coming = PendingExecutors(FailingHosts())
    coming.update(there("c1", "c2"), [], 2, 1)
    coming.update(there("c1"), [], 2, 2)
    assert not coming.with_exits(NO_WAIT)


def test_an_executor_that_leaves_is_not_one_beyond_the_request() -> None:
    coming = PendingExecutors(FailingHosts())
    coming.record_connection("c1")
    coming.update(there("c1", "c2"), ["c1"], 1, 1)
    coming.update(there("c1"), ["c1"], 1, 1)
    assert "see the node's log of c2" in str(coming.with_exits(FULL))


def test_what_yarn_has_not_granted_is_told_from_what_only_starts() -> None:
    coming = PendingExecutors(FailingHosts())
    assert coming.update(there("c1"), [], 2, 2) == (1, granted_part(1, 2, NO_WAIT))
    starting = starting_executors(["node1", "node1"], [])
    assert coming.update(there("c1", "c2"), [], 2, 2) == (0, starting)
    assert coming.update(there("c1", "c2"), ["c1"], 2, 2) == (1, granted_part(1, 2, NO_WAIT))


def test_executors_that_end_again_and_again_are_given_back_and_asked_for_later() -> None:
    coming = PendingExecutors(FailingHosts())
    ended_again(coming, 3)
    assert not coming.give_back(1, now=100.0, chance=0.5) and coming.may_request(0.0)
    ended_again(coming, 4)
    assert "see the node's log of c3" in str(coming.with_exits(FULL))
    assert not coming.give_back(0, now=100.0, chance=0.5), "none waits"
    assert coming.give_back(1, now=100.0, chance=0.5) == withdrew_requests(1, 1)
    before = coming.with_exits(FULL)
    assert before.sentence == FULL.sentence
    assert before.details[0].startswith("before that, 4 executors ended unexpectedly on node1; see")
    assert not coming.may_request(101.9) and coming.may_request(102.0)
    # Of those that were given back none counts again.
    coming.update(there(), [], 1, 1)
    assert not coming.give_back(1, now=102.0, chance=0.5)
    ended_again(coming, 4)
    assert coming.give_back(1, now=110.0, chance=0.5) == withdrew_requests(1, 2)
    assert not coming.may_request(112.9) and coming.may_request(113.0)
    coming.record_arrival()
    assert coming.may_request(110.0) and coming.with_exits(FULL) == FULL


def test_of_many_that_are_waited_for_as_many_may_end() -> None:
    coming = PendingExecutors(FailingHosts())
    ended_again(coming, 8)
    assert not coming.give_back(8, now=0.0, chance=0.0)
    assert coming.give_back(7, now=0.0, chance=0.0)


def test_the_first_may_take_so_long_however_often_it_is_asked_for() -> None:
    coming = PendingExecutors(FailingHosts())
    coming.new_clock(request(60.0), now=time.monotonic() - 61)
    coming.new_clock(request(60.0), now=time.monotonic())
    ended_again(coming, 4)
    coming.report(FULL)
    with pytest.raises(GangTimeout, match=r"within 60 s.*4 executors ended unexpectedly"):
        coming.check()
    coming.record_arrival()
    coming.check()
    coming.new_clock(request(60.0), now=time.monotonic())
    coming.check()


def test_others_than_the_first_may_take_any_time() -> None:
    coming = PendingExecutors(FailingHosts())
    coming.new_clock(request(None), now=time.monotonic() - 10**6)
    coming.check()


def test_who_wants_no_more_in_the_line_waits_for_those_that_were_granted() -> None:
    coming, asked = PendingExecutors(FailingHosts()), request(60.0)
    clock = coming.new_clock(asked, now=time.monotonic() - 61)
    asked.cancelled.set()
    with pytest.raises(Cancelled):
        clock.check()
    with pytest.raises(GangTimeout):
        coming.check()


def test_hosts_on_which_executors_end_are_told_until_one_arrives_there() -> None:
    failing = FailingHosts()
    ended = EndedContainers(failing)
    ended.update({"c1": "node1", "c2": "node2", "c3": "node2"}, 3)
    assert not failing.hosts(time.monotonic())
    ended.update({"c1": "node1"}, 3)
    assert failing.hosts(time.monotonic()) == {"node2"}
    assert "2 executors ended unexpectedly on node2" in str(ended.with_exits())
    ended.update({}, 3)
    assert failing.hosts(time.monotonic()) == {"node2"}, "one end may have any cause"
    assert "3 executors ended unexpectedly on node1 and node2" in str(ended.with_exits())
    assert not failing.hosts(time.monotonic() + 601)
    assert failing.containers() == {"c1": "node1", "c2": "node2", "c3": "node2"}
    failing.record_arrival("node2")
    assert not failing.hosts(time.monotonic())
    assert failing.containers() == {"c1": "node1"}
