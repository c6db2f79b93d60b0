"""The containers of a gang and of a search on this machine: real processes, started and ended."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hopsgpu.backends.gang_request import Request
from hopsgpu.backends.local.containers import local_allocator
from hopsgpu.backends.local.elastic_allocator import LocalElasticAllocator
from hopsgpu.backends.local.gang_allocator import LocalGangAllocator
from hopsgpu.core.gang import Exclusions, GangState
from hopsgpu.core.spec import ExecutorShape
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason, starting_process
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.unit import plans


class Watcher:
    def __init__(self) -> None:
        self.points: list[str] = []
        self.states: list[GangState] = []
        self.warnings: list[str] = []

    def state(self, state: GangState, hosts: Sequence[str], why: WaitReason = NO_WAIT) -> None:
        self.states.append(state)

    def mark(self, point: str) -> None:
        self.points.append(point)

    def on_parked(self, hosts: Sequence[str]) -> None: ...

    def on_executors_arrived(self, times: Sequence[float]) -> None: ...

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def request_(watcher: Watcher) -> Request:
    """A request for executors without GPUs."""
    plan = replace(plans.plan(2, acquire_timeout=HANG_SECONDS), shape=ExecutorShape(1, 0, 0, 512))
    return plans.request(watcher, plan=plan)


allocator = functools.partial(local_allocator, user=None, heartbeat=30.0, ports=None)


@pytest.fixture
def search(request_: Request) -> Iterator[LocalElasticAllocator]:
    with allocator(LocalElasticAllocator, request_) as lease:
        yield lease


def handle(lease: LocalElasticAllocator) -> None:
    """Handle the next of the agents' messages, if there is one."""
    lease.raise_if_impossible()
    if (event := lease.server.next_event(0.1)) is not None:
        lease.handle_event(event)


def arrive(lease: LocalElasticAllocator, executors: int) -> None:
    """Handle the agents' messages until so many executors are here."""

    def are_here() -> bool:
        handle(lease)
        return len(lease.ready_executors) == executors

    assert until(are_here), lease.wait_reason


def test_a_gang_acquires_its_container_anew_and_leaves_no_process(
    request_: Request, watcher: Watcher
) -> None:
    jobs: list[Any] = []
    with allocator(LocalGangAllocator, request_) as owner:
        jobs.append(owner.acquire(request_).job)
        assert owner.is_whole
        jobs.append(owner.acquire(request_).job)
        assert jobs[0].ended.is_set() and not jobs[1].ended.is_set()
        assert jobs[0].name != jobs[1].name
    assert jobs[1].ended.is_set() and not owner.is_whole
    assert watcher.points == ["granted", "granted", "released"] and not watcher.warnings


def test_a_search_starts_and_ends_single_executors(search: LocalElasticAllocator) -> None:
    search.set_wanted(2, 2)
    assert search.wait_reason == starting_process()
    arrive(search, 2)
    assert search.held_count == 2 and not search.wait_reason
    search.release_executors([next(iter(search.ready_executors))])
    search.set_wanted(1, 1)
    assert until(lambda: search.held_count == 1)
    assert len(search.ready_executors) == 1


def test_executors_that_are_no_longer_needed_when_they_arrive_end(
    search: LocalElasticAllocator,
) -> None:
    search.set_wanted(2, 2)
    search.set_wanted(0, 1)
    assert search.held_count == 2, "their processes still have to end"

    def are_gone() -> bool:
        handle(search)
        assert not search.ready_executors
        return not search.held_count

    assert until(are_gone)


def test_an_executor_that_is_no_longer_excluded_makes_room_for_another(
    search: LocalElasticAllocator,
) -> None:
    search.set_wanted(1, 1)
    arrive(search, 1)
    (container,) = search.ready_executors.values()
    assert search.exclude(Exclusions(hosts=frozenset({container.host}))) == [container.key]
    assert (search.parked_count, len(search.ready_executors)) == (1, 0)
    assert search.exclude(Exclusions()) == []
    assert search.parked_count == 0
    search.set_wanted(1, 1)
    arrive(search, 1)
    (another,) = search.ready_executors.values()
    assert another.key != container.key
    assert until(lambda: search.held_count == 1), "the first has ended"


def test_an_executor_that_is_held_aside_does_not_delay_the_release(
    request_: Request, watcher: Watcher
) -> None:
    with allocator(LocalElasticAllocator, request_) as lease:
        lease.set_wanted(1, 1)
        arrive(lease, 1)
        (container,) = lease.ready_executors.values()
        assert lease.exclude(Exclusions(hosts=frozenset({container.host}))) == [container.key]
        assert (lease.parked_count, lease.held_count) == (1, 1)
        began = time.monotonic()
    assert time.monotonic() - began < HANG_SECONDS
    assert watcher.points == ["released"]
    assert not [text for text in watcher.warnings if "killed" in text]
