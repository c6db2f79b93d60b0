"""The containers of a gang and of a search on this machine: real processes, started and ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hopsgpu.backends.lease_request import Request
from hopsgpu.backends.local.containers import leased_containers
from hopsgpu.backends.local.elastic import LocalElasticLease
from hopsgpu.backends.local.lease import LocalLease
from hopsgpu.core.gang import Exclusions, GangState
from hopsgpu.core.spec import ExecutorShape
from tests.conftest import until
from tests.unit import plans

SECONDS = 60


class Watcher:
    def __init__(self) -> None:
        self.points: list[str] = []
        self.states: list[GangState] = []
        self.warnings: list[str] = []

    def state(self, state: GangState, hosts: Sequence[str], why: str = "") -> None:
        self.states.append(state)

    def mark(self, point: str) -> None:
        self.points.append(point)

    def held_aside(self, hosts: Sequence[str]) -> None:
        return

    def arrived(self, times: Sequence[float]) -> None:
        return

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def request_(watcher: Watcher) -> Request:
    """A request for executors without GPUs."""
    plan = replace(plans.plan(2, acquire_timeout=SECONDS), shape=ExecutorShape(1, 0, 0, 512))
    return plans.request(watcher, plan=plan)


@pytest.fixture
def search(request_: Request) -> Iterator[LocalElasticLease]:
    with leased_containers(
        LocalElasticLease, request_, user=None, heartbeat=30.0, ports=None
    ) as lease:
        yield lease


def handle(lease: LocalElasticLease) -> None:
    """Handle the next of the agents' messages, if there is one."""
    lease.check()
    if (event := lease.server.next_event(0.1)) is not None:
        lease.take(event)


def arrive(lease: LocalElasticLease, executors: int) -> None:
    """Handle the agents' messages until so many executors are here."""

    def are_here() -> bool:
        handle(lease)
        return len(lease.here) == executors

    assert until(are_here, SECONDS), lease.waiting_for


def test_a_gang_acquires_its_container_anew_and_leaves_no_process(
    request_: Request, watcher: Watcher
) -> None:
    jobs: list[Any] = []
    with leased_containers(LocalLease, request_, user=None, heartbeat=30.0, ports=None) as owner:
        jobs.append(owner.acquire(request_).job)
        assert owner.is_whole
        jobs.append(owner.acquire(request_).job)
        assert jobs[0].ended.is_set() and not jobs[1].ended.is_set()
        assert jobs[0].name != jobs[1].name
    assert jobs[1].ended.is_set() and not owner.is_whole
    assert watcher.points == ["granted", "granted", "released"] and not watcher.warnings


def test_a_search_starts_and_ends_single_executors(search: LocalElasticLease) -> None:
    search.want(2, 2)
    assert "its process is starting" in search.waiting_for
    arrive(search, 2)
    assert search.held == 2 and not search.waiting_for
    search.let_go([next(iter(search.here))])
    search.want(1, 1)
    assert until(lambda: search.held == 1, SECONDS)
    assert len(search.here) == 1


def test_executors_that_are_no_longer_needed_when_they_arrive_end(
    search: LocalElasticLease,
) -> None:
    search.want(2, 2)
    search.want(0, 1)
    assert search.held == 2, "their processes still have to end"

    def are_gone() -> bool:
        handle(search)
        assert not search.here
        return not search.held

    assert until(are_gone, SECONDS)


def test_an_executor_that_is_no_longer_excluded_makes_room_for_another(
    search: LocalElasticLease,
) -> None:
    search.want(1, 1)
    arrive(search, 1)
    (container,) = search.here.values()
    assert search.avoid(Exclusions(hosts=frozenset({container.host}))) == [container.key]
    assert (search.aside, len(search.here)) == (1, 0)
    assert search.avoid(Exclusions()) == []
    assert search.aside == 0
    search.want(1, 1)
    arrive(search, 1)
    (another,) = search.here.values()
    assert another.key != container.key
    assert until(lambda: search.held == 1, SECONDS), "the first has ended"


def test_an_executor_that_is_held_aside_does_not_delay_the_release(
    request_: Request, watcher: Watcher
) -> None:
    with leased_containers(
        LocalElasticLease, request_, user=None, heartbeat=30.0, ports=None
    ) as lease:
        lease.want(1, 1)
        arrive(lease, 1)
        (container,) = lease.here.values()
        assert lease.avoid(Exclusions(hosts=frozenset({container.host}))) == [container.key]
        assert (lease.aside, lease.held) == (1, 1)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert watcher.points == ["released"]
    assert not [text for text in watcher.warnings if "killed" in text]
