"""When a search asks for executors, how long it waits, and when it lets others go first.

The queue of gangs, Spark and YARN are stand-ins; tests/cluster/test_search.py has the real ones.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.backends.gang_request import AcquisitionClock, Request
from hopsgpu.backends.spark import elastic_allocator, executors, pending_executors
from hopsgpu.backends.spark.elastic_allocator import SparkElasticAllocator
from hopsgpu.backends.spark.executor_admission import ExecutorAdmission, ExecutorAdmissions
from hopsgpu.backends.spark.executors import Executors
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.cluster_managers.manager import HeldExecutors
from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason
from hopsgpu.errors import HopsGpuError
from tests.conftest import until
from tests.unit import plans
from tests.unit.backends.removals import removals


class Job:
    def __init__(self, application: Any, *, tag: str, **more: Any) -> None:
        self.site, self.tag = application, tag
        self.ended = threading.Event()
        self.error: Exception | None = None

    def loss(self, seconds: float) -> str:
        return ""

    def start(self) -> None:
        self.site.jobs.append(self)
        self.site.containers.add(f"c{len(self.site.jobs)}")


class Site:
    """An application on a cluster with so many free GPUs, and the queue of gangs before it."""

    id = "application"
    settle_seconds = 0.0

    def __init__(self, free: int) -> None:
        self.free = free
        self.jobs: list[Job] = []
        self.containers: set[str] = set()
        self.asked: list[tuple[float | None, bool]] = []
        # Executors that say nothing of their tasks, by the tag of the job.
        self.running: dict[str, tuple[str, ...]] = {}
        self.given_up: list[str] = []
        self.killed: list[str] = []
        # Spark's executors, and those that run a task.
        self.registered: list[str] = []
        self.busy_ones: list[str] = []
        self.more = 0
        self.killed_by_spark: list[str] = []
        # Executors that were ended because another queue took them back, and why.
        self.revoked: list[tuple[str, str]] = []
        # What else happens while a job is being cancelled.
        self.cancelling: Callable[[str], object] = lambda tag: None
        self.jvm = self.manager = self
        self.failing = FailingHosts()

    def is_kerberized(self) -> bool:
        return False

    def placing(self, *_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def find_start_problem(self, *_: object) -> None:
        return None

    def end_executors(self, executors: Iterable[str]) -> None:
        """Do nothing more: Spark's kill is enough."""

    def end_revoked(self, executors: Sequence[str], why: str) -> None:
        self.revoked += [(executor, why) for executor in executors]

    def setting(self, name: str) -> None:
        return None

    def without_resource_warning(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def task_failures(self, tag: str) -> tuple[str, ...]:
        return ()

    def registered_executors(self, profile: int) -> tuple[str, ...]:
        return tuple(self.registered)

    def busy_executors(self, profile: int) -> tuple[str, ...]:
        return tuple(self.busy_ones)

    def kill(self, executors: Iterable[str]) -> None:
        for executor in executors:
            self.killed_by_spark.append(executor)
            self.registered.remove(executor)

    def shut_down(self, executors: Iterable[str]) -> None:
        assert [*executors] == self.killed_by_spark[-len([*executors]) :]

    def running_on(self, tag: str) -> tuple[str, ...]:
        return self.running.get(tag, ())

    def give_up(self, executors: Sequence[str]) -> None:
        self.given_up += executors

    def end_containers(self, executors: Sequence[str]) -> None:
        assert self.given_up[-len(executors) :] == [*executors]
        self.killed += executors

    def target(self, profile: int) -> int:
        return len(self.jobs) + self.more

    def run_allocation_step(self) -> None: ...

    def cancel(self, tag: str) -> None:
        self.cancelling(tag)
        next(job for job in self.jobs if job.tag == tag).ended.set()

    def held_executors(self, application_id: str, profile_id: int) -> HeldExecutors:
        return HeldExecutors(dict.fromkeys(self.containers, "node1"), 0)

    @contextlib.contextmanager
    def queued_gang(
        self,
        application: Any,
        request: Request,
        clock: AcquisitionClock,
        admission: ExecutorAdmission,
        *,
        is_growth: bool,
    ) -> Iterator[Any]:
        self.asked.append((request.plan.spec.acquire_timeout, is_growth))

        @contextlib.contextmanager
        def hold_turn(arrived: int) -> Iterator[None]:
            while sum(not job.ended.is_set() for job in self.jobs) >= self.free:
                clock.report((), WaitReason("The cluster is full"))
                clock.check()
                request.cancelled.wait(0.01)
            yield

        yield SimpleNamespace(
            hold_turn=hold_turn,
            count_fitting=lambda least, most: min(most, self.free),
            hosts=lambda count, taken: (),
            end=lambda: None,
            renew=lambda: True,
            shortage_reason=lambda held: NO_WAIT,
        )


Made = Callable[..., tuple[Site, SparkElasticAllocator]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Makes a site with so many GPUs, and the lease of a search on it."""
    monkeypatch.setattr(executors, "GangJob", Job)
    monkeypatch.setattr(elastic_allocator, "agent_task", lambda driver, warm: None)
    monkeypatch.setattr(elastic_allocator, "_JOBS_SECONDS", 0.02)
    monkeypatch.setattr(elastic_allocator, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(elastic_allocator, "_KNOWN_SECONDS", 0.1)
    monkeypatch.setattr(elastic_allocator, "_SURPLUS_SECONDS", 0.1)
    monkeypatch.setattr(elastic_allocator, "UNREACHABLE_SECONDS", 0.3)
    # Long enough to be seen, while others go first.
    monkeypatch.setattr(pending_executors, "backoff_seconds", lambda attempts, chance: 1.0)
    gone = SimpleNamespace(is_confirmed=True, problem=None)
    monkeypatch.setattr(elastic_allocator, "release_executors", lambda *given, is_whole: gone)
    leases = []

    def make(
        free: int, timeout: float | None, admissions: ExecutorAdmissions | None = None
    ) -> tuple[Site, SparkElasticAllocator]:
        site: Any = Site(free)
        monkeypatch.setattr(elastic_allocator, "queued_gang", site.queued_gang)
        watcher = SimpleNamespace(
            state=lambda *told: None, on_parked=lambda hosts: None, mark=lambda point: None
        )
        request = plans.request(watcher, 4, timeout)
        profile: Any = SimpleNamespace(id=1)
        server: Any = SimpleNamespace()
        endpoint = DriverEndpoint("", 0, b"", None)
        others = admissions or ExecutorAdmissions()
        resources = Executors(site, profile, server, endpoint, removals(), others)
        lease = SparkElasticAllocator(request, resources)
        lease.start()
        leases.append(lease)
        return site, lease

    yield make
    for lease in leases:
        assert lease.release()
        assert all(ended.is_set() for ended in lease._threads_ended)


def come(site: Site, lease: SparkElasticAllocator, job: Job) -> None:
    """The job's executor is there, and can have trials."""
    name = f"c{site.jobs.index(job) + 1}"
    container: Any = SimpleNamespace(container_id=name, host="node1")
    assert lease._job_of(Message("hello", {"job": job.tag, "container": name})) is job
    lease.ready_executors[len(lease.ready_executors)] = container
    lease._record_arrival(container)


def problem_of(lease: SparkElasticAllocator) -> str:
    """Why the search ends since no executor has come; "" while it goes on."""
    try:
        lease.raise_if_impossible()
    except HopsGpuError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_once_one_has_come_others_are_waited_for_behind_all_gangs_and_without_bound(
    made: Made,
) -> None:
    site, lease = made(free=1, timeout=0.5)
    lease.set_wanted(4, 1)
    # YARN has granted one, and the next is asked for before that one has shown itself.
    assert until(lambda: len(site.asked) == 2)
    assert site.asked == [(0.5, False), (0.5, False)]
    come(site, lease, site.jobs[0])
    assert until(lambda: len(site.asked) == 3)
    assert site.asked[2] == (None, True)
    assert not until(lambda: problem_of(lease), 1.0)
    assert lease.wait_reason.sentence == "The cluster is full"


@pytest.mark.parametrize("free", [0, 4], ids=["none granted", "granted, and none starts"])
def test_the_first_is_waited_for_no_longer_than_it_may(made: Made, free: int) -> None:
    site, lease = made(free=free, timeout=0.5)
    lease.set_wanted(4, 4)
    # The sampler has no more.
    assert until(lambda: len(site.jobs) == free)
    lease.set_wanted(2, 1)
    assert until(lambda: problem_of(lease))
    assert re.match("GangTimeout.* arrived within 0.5 s", problem_of(lease))


def test_an_executor_that_arrives_while_requests_are_withdrawn_has_no_trial(made: Made) -> None:
    site, lease = made(free=4, timeout=None)
    lease.set_wanted(4, 4)
    assert until(lambda: len(site.jobs) == 4)
    come(site, lease, site.jobs[0])
    found = []

    def arrive(tag: str) -> None:
        """The executors of all requests that are being withdrawn arrive."""
        for number in (2, 3, 4):
            hello = {"job": site.jobs[number - 1].tag, "container": f"c{number}"}
            found.append(lease._job_of(Message("hello", hello)))

    site.cancelling = arrive
    lease.set_wanted(1, 1)
    assert until(lambda: all(job.ended.is_set() for job in site.jobs[1:]))
    assert set(found) == {None}
    assert not site.jobs[0].ended.is_set()


def test_who_has_been_put_aside_is_not_the_first(made: Made) -> None:
    site, lease = made(free=1, timeout=0.5)
    lease.set_wanted(1, 1)
    assert until(lambda: site.jobs)
    lease._job_of(Message("hello", {"job": site.jobs[0].tag, "container": "c1"}))
    assert until(lambda: problem_of(lease))


@pytest.mark.parametrize("wanted", [1, 4])
def test_executors_that_end_again_and_again_are_given_back_for_a_while(
    made: Made, wanted: int
) -> None:
    site, lease = made(free=1, timeout=None)
    lease.set_wanted(wanted, 1)
    assert until(lambda: site.jobs)
    told = []

    def ended() -> bool:
        """The container ends, and YARN gives Spark another."""
        site.containers = {f"ended{len(told)}"}
        told.append(lease.wait_reason)
        return site.jobs[0].ended.wait(0.1)

    assert until(ended)
    assert until(lambda: "ended repeatedly; asks again" in lease.wait_reason.sentence)
    assert "before that, 4 executors ended unexpectedly on node1" in str(lease.wait_reason)
    assert until(lambda: len(site.jobs) == 2), "asked for again"
    come(site, lease, site.jobs[1])
    assert until(lambda: "ended unexpectedly" not in str(lease.wait_reason))
    assert wanted == 4 or not lease.wait_reason


@pytest.mark.parametrize("reachable", [True, False])
def test_the_executor_of_an_agent_that_is_gone_is_replaced_though_spark_has_not_lost_it(
    made: Made, reachable: bool
) -> None:
    site, lease = made(free=1, timeout=None)
    lease.set_wanted(1, 1)
    assert until(lambda: site.jobs)
    come(site, lease, site.jobs[0])
    lease._jobs[0] = site.jobs[0]
    if not reachable:
        site.running[site.jobs[0].tag] = ("7",)
    assert not until(lambda: len(site.jobs) == 2, 0.2)
    lease.handle_event(Event(0, None, "no heartbeat for 30 s"))
    assert until(lambda: len(site.jobs) == 2)
    assert site.jobs[0].ended.is_set(), "it has the only GPU"
    assert not lease.ready_executors
    assert until(lambda: site.killed, 1.0) is not reachable
    assert site.killed == ([] if reachable else ["7"])


def with_one_too_many(made: Made) -> tuple[Site, SparkElasticAllocator]:
    """A search that wants one executor, to which YARN has granted two."""
    site, lease = made(free=2, timeout=None)
    site.registered, site.busy_ones = ["1", "2"], ["1"]
    lease.set_wanted(1, 1)
    assert until(lambda: site.jobs)
    return site, lease


def test_an_executor_that_no_job_needs_is_killed_once_all_have_theirs(made: Made) -> None:
    site, lease = with_one_too_many(made)
    assert not until(lambda: site.killed_by_spark, 0.5), "the job still waits"
    come(site, lease, site.jobs[0])
    assert until(lambda: site.killed_by_spark == ["2"])
    site.registered.append("3")
    assert until(lambda: site.killed_by_spark == ["2", "3"])
    assert site.registered == ["1"]


@pytest.mark.parametrize("why", ["Spark wants more", "a job's task runs no longer", "long ago"])
def test_an_executor_that_may_be_needed_is_not_killed(
    made: Made, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    site, lease = with_one_too_many(made)
    if why == "Spark wants more":
        site.more = 1
    elif why == "long ago":
        # Spark's idle timeout has ended it, or ends it soon.
        monkeypatch.setattr(elastic_allocator, "_SURPLUS_WATCH_SECONDS", 0.0)
    else:
        site.busy_ones = []
    come(site, lease, site.jobs[0])
    assert not until(lambda: site.killed_by_spark, 0.5)


def test_that_nobody_asks_any_more_is_told(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **more: Any) -> None:
        raise OverflowError("too large")

    _, lease = made(free=1, timeout=None)
    monkeypatch.setattr(elastic_allocator, "queued_gang", fail)
    lease.set_wanted(1, 1)
    assert until(lambda: "Spark: OverflowError: too large" in problem_of(lease))


class OpenedAdmission(ExecutorAdmission):
    def __init__(
        self, executors: int, on_revoked: Callable[[str], None], *, is_growth: bool
    ) -> None:
        self.executors, self.is_growth = executors, is_growth
        self.on_revoked = on_revoked
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class OtherQueue(ExecutorAdmissions):
    """A queue such as Kueue's, which admits each request for itself."""

    def __init__(self) -> None:
        self.opened: list[OpenedAdmission] = []

    def open(
        self, request: Request, on_revoked: Callable[[str], None], *, is_growth: bool = False
    ) -> ExecutorAdmission:
        admission = OpenedAdmission(request.plan.executors, on_revoked, is_growth=is_growth)
        self.opened.append(admission)
        return admission


def test_the_minimum_and_each_growth_are_admitted_apart_and_given_back_apart(made: Made) -> None:
    queue = OtherQueue()
    site, lease = made(free=3, timeout=None, admissions=queue)
    lease.set_wanted(3, 2, least=2)
    assert until(lambda: len(site.jobs) == 3)
    assert [(a.executors, a.is_growth) for a in queue.opened] == [(2, False), (1, True)]
    for job in site.jobs:
        come(site, lease, job)
    lease._jobs.update(enumerate(site.jobs))
    minimum, growth = queue.opened
    # The other queue takes the growth back.
    site.running[site.jobs[2].tag] = ("7",)
    growth.on_revoked("Kueue preempted the gang: x")
    assert until(lambda: ("7", "Kueue preempted the gang: x") in site.revoked)
    assert {executor for executor, _ in site.revoked} == {"7"}
    lease.set_wanted(2, 2, least=2)
    site.running = {}
    lease.handle_event(Event(2, None, "connection lost"))
    assert until(lambda: growth.is_closed)
    assert not minimum.is_closed
    # A lost executor of the minimum is replaced without another admission.
    site.containers.discard("c1")
    lease.handle_event(Event(0, None, "connection lost"))
    assert until(lambda: len(site.jobs) == 4)
    assert len(queue.opened) == 2 and not minimum.is_closed


def test_executors_that_were_not_there_yet_are_withdrawn_when_their_admission_is_revoked(
    made: Made,
) -> None:
    queue = OtherQueue()
    site, lease = made(free=2, timeout=None, admissions=queue)
    lease.set_wanted(1, 1)
    assert until(lambda: len(site.jobs) == 1)
    queue.opened[0].on_revoked("Kueue evicted the gang: x")
    assert until(site.jobs[0].ended.is_set)
    assert until(lambda: len(site.jobs) == 2)
    assert not site.revoked
