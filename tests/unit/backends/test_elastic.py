"""When a search asks for executors, how long it waits, and when it lets others go first.

Line, Spark and YARN are stand-ins here; tests/cluster/test_search.py has the real ones.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.backends.lease_request import AcquisitionClock, Request
from hopsgpu.backends.spark import elastic, executors, wait_reasons
from hopsgpu.backends.spark.elastic import YarnElasticLease
from hopsgpu.backends.spark.executors import Executors
from hopsgpu.control.channel import Message
from hopsgpu.control.peer import Driver
from hopsgpu.errors import GangTimeout, HopsGpuError
from hopsgpu.yarn.gpu_holders import GpuFacts
from hopsgpu.yarn.resource_manager import PriorityContainers
from tests.conftest import until
from tests.unit import plans

SECONDS = 30


class Job:
    def __init__(self, application: Any, *, tag: str, **more: Any) -> None:
        self.site, self.tag = application, tag
        self.ended = threading.Event()
        self.error: Exception | None = None

    def start(self) -> None:
        self.site.jobs.append(self)
        self.site.containers.add(f"c{len(self.site.jobs)}")


class Site:
    """An application on a cluster with so many free GPUs, and the line before it."""

    id = "application"

    def __init__(self, free: int) -> None:
        self.free = free
        self.jobs: list[Job] = []
        self.containers: set[str] = set()
        self.asked: list[tuple[float | None, bool]] = []
        self.jvm = self.manager = self

    def is_kerberized(self) -> bool:
        return False

    def setting(self, name: str) -> None:
        return None

    def without_resource_warning(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def task_failures(self, tag: str) -> tuple[str, ...]:
        return ()

    def cancel(self, tag: str) -> None:
        next(job for job in self.jobs if job.tag == tag).ended.set()

    def held(self, application_id: str, priority: int) -> PriorityContainers:
        return PriorityContainers(tuple(self.containers), 0)

    @contextlib.contextmanager
    def queueing(
        self, application: Any, request: Request, clock: AcquisitionClock, *, grows: bool
    ) -> Iterator[Any]:
        self.asked.append((request.plan.spec.acquire_timeout, grows))

        @contextlib.contextmanager
        def turn(has: int) -> Iterator[None]:
            while sum(not job.ended.is_set() for job in self.jobs) >= self.free:
                clock.tell((), "the cluster is full")
                clock.check()
                request.cancelled.wait(0.01)
            yield

        yield SimpleNamespace(
            turn=turn,
            room=lambda least, most: min(most, self.free),
            hosts=lambda count: (),
            granted=lambda: None,
            keep=lambda: True,
            facts=lambda held: GpuFacts("", ""),
        )


class Watcher:
    def state(self, *told: Any) -> None:
        return

    def mark(self, point: str) -> None:
        return


Made = Callable[..., tuple[Site, YarnElasticLease]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Makes a site with so many GPUs, and the lease of a search on it."""
    monkeypatch.setattr(executors, "GangJob", Job)
    monkeypatch.setattr(elastic, "supervise_in_task", lambda driver: None)
    monkeypatch.setattr(elastic, "_JOBS_SECONDS", 0.02)
    monkeypatch.setattr(elastic, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(wait_reasons, "backoff_seconds", lambda attempts, chance: 0.1)
    gone = SimpleNamespace(confirmed=True, problem=None)
    monkeypatch.setattr(elastic, "release_executors", lambda *given, whole: gone)
    leases = []

    def make(free: int, timeout: float | None) -> tuple[Site, YarnElasticLease]:
        site: Any = Site(free)
        monkeypatch.setattr(elastic, "queueing", site.queueing)
        request = plans.request(Watcher(), 4, timeout)
        profile: Any = SimpleNamespace(id=1)
        server: Any = SimpleNamespace()
        resources = Executors(site, profile, server, Driver("", 0, b"", None))
        lease = YarnElasticLease(request, resources)
        lease.start()
        leases.append(lease)
        return site, lease

    yield make
    for lease in leases:
        assert lease.release()
        assert all(ended.is_set() for ended in lease._threads_ended)


def come(site: Site, lease: YarnElasticLease, job: Job) -> None:
    """The job's executor is there, and can have trials."""
    container: Any = f"c{site.jobs.index(job) + 1}"
    assert lease._job_of(Message("hello", {"job": job.tag, "container": container})) is job
    lease.here[len(lease.here)] = container
    lease._arrived()


def late(lease: YarnElasticLease) -> str:
    """How the search ends since no executor has come; "" while it goes on."""
    try:
        lease.check()
    except GangTimeout as error:
        return str(error)
    return ""


def test_once_one_has_come_others_are_waited_for_behind_all_gangs_and_without_bound(
    made: Made,
) -> None:
    site, lease = made(free=1, timeout=0.5)
    lease.want(4, 1)
    # YARN has granted one, and the next is asked for before that one has shown itself.
    assert until(lambda: len(site.asked) == 2, SECONDS)
    assert site.asked == [(0.5, False), (0.5, False)]
    come(site, lease, site.jobs[0])
    assert until(lambda: len(site.asked) == 3, SECONDS)
    assert site.asked[2] == (None, True)
    assert not until(lambda: late(lease), 1.0)
    assert "the cluster is full" in lease.waiting_for


@pytest.mark.parametrize("free", [0, 4], ids=["none granted", "granted, and none starts"])
def test_the_first_is_waited_for_no_longer_than_it_may(made: Made, free: int) -> None:
    site, lease = made(free=free, timeout=0.5)
    lease.want(4, 4)
    # The sampler has no more.
    assert until(lambda: len(site.jobs) == free, SECONDS)
    lease.want(2, 1)
    assert until(lambda: late(lease), SECONDS)
    assert "arrived within 0.5 s" in late(lease)


def test_who_has_been_put_aside_is_not_the_first(made: Made) -> None:
    site, lease = made(free=1, timeout=0.5)
    lease.want(1, 1)
    assert until(lambda: site.jobs, SECONDS)
    lease._job_of(Message("hello", {"job": site.jobs[0].tag, "container": "c1"}))
    assert until(lambda: late(lease), SECONDS)


@pytest.mark.parametrize("wanted", [1, 4])
def test_executors_that_end_again_and_again_are_given_back_for_a_while(
    made: Made, wanted: int
) -> None:
    site, lease = made(free=1, timeout=None)
    lease.want(wanted, 1)
    assert until(lambda: site.jobs, SECONDS)
    told = []

    def ended() -> bool:
        """The container ends, and YARN gives Spark another."""
        site.containers = {f"ended{len(told)}"}
        told.append(lease.waiting_for)
        return site.jobs[0].ended.wait(0.1)

    assert until(ended, SECONDS)
    assert until(
        lambda: "given back (time 1); the search asks again soon" in lease.waiting_for, SECONDS
    )
    assert "before that, 4 ended unexpectedly, see the node's log of ended" in lease.waiting_for
    assert until(lambda: len(site.jobs) == 2, SECONDS), "asked for again"
    come(site, lease, site.jobs[1])
    assert (
        not lease.waiting_for
        if wanted == 1
        else until(lambda: "ended unexpectedly" not in lease.waiting_for, SECONDS)
    )


def test_that_nobody_asks_any_more_is_told(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **more: Any) -> None:
        raise OverflowError("too large")

    _, lease = made(free=1, timeout=None)
    monkeypatch.setattr(elastic, "queueing", fail)
    lease.want(1, 1)

    def problem() -> str:
        try:
            lease.check()
        except HopsGpuError as error:
            return str(error)
        return ""

    assert until(problem, SECONDS)
    assert "executors could not be requested from Spark: OverflowError: too large" in problem()
