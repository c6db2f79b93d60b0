"""Executors that are parked while a gang is acquired; Spark, YARN and the channel are stand-ins."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from hopsgpu.backends.gang_request import AcquisitionClock
from hopsgpu.backends.spark.executors import Executors
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.backends.spark.placeholder_acquisition import PlaceholderAcquisition
from hopsgpu.cluster_managers.manager import HeldExecutors, StartProblem
from hopsgpu.control.channel import Message
from hopsgpu.control.events import Event
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.core.gang import GangExecutor
from hopsgpu.core.wait_reasons import (
    NO_WAIT,
    WaitReason,
    ending_surplus,
    granted_part,
    requesting,
    starting_executors,
)
from hopsgpu.errors import ConfigError, DiscoveryError, GangTimeout
from tests.unit import plans
from tests.unit.backends.removals import removals


class Cluster:
    """Stands in for all that brings executors, from a list of what happens next."""

    def __init__(self, events: list[Any]) -> None:
        self._events: Iterator[Any] = iter(events)
        self.clock: AcquisitionClock | None = None
        self.jobs: list[SimpleNamespace] = []
        self.executors = 0
        # Hosts of the parked executors, at each notification.
        self.aside: list[Sequence[str]] = []
        self.jvm = SimpleNamespace(
            registered_executors=lambda profile: tuple(map(str, range(self.executors))),
            task_failures=lambda tag: (),
            target=lambda profile: self.target,
            request_executors_now=self.request_executors_now,
            busy_executors=lambda profile: tuple(self.busy),
            kill=self.kill,
            shut_down=self.shut_down,
        )
        # Spark's IDs of the executors that run a task, and of those that were killed.
        self.busy: list[str] = []
        self.killed: list[list[str]] = []
        # How many executors Spark has asked for, and how many it was told to ask for.
        self.target = 0
        self.hastened: list[int] = []
        self.manager = SimpleNamespace(
            held_executors=lambda *_: HeldExecutors(
                {f"c{n}": "node1" for n in range(self.executors)}, 0
            ),
        )
        # The reason why executors do not start, as the cluster manager reports it.
        self.problem: StartProblem | None = None
        self.failing = FailingHosts()
        self.id = "application_1"

    def find_start_problem(self, profile: object) -> StartProblem | None:
        return self.problem

    def end_executors(self, executors: Iterable[str]) -> None:
        """Do nothing more: Spark's kill is enough."""

    def start(self, tasks: int) -> Any:
        job = SimpleNamespace(tag=f"job-{len(self.jobs)}", tasks=tasks, ended=threading.Event())
        self.jobs.append(job)
        return job

    def request_executors_now(self, profile: int, executors: int) -> None:
        self.hastened.append(executors)
        self.target = executors

    def kill(self, executors: Iterable[str]) -> None:
        self.killed.append([*executors])
        self.executors -= len(executors)

    def shut_down(self, executors: Iterable[str]) -> None:
        assert self.killed[-1] == [*executors]

    def next_event(self, seconds: float) -> Event | None:
        event = next(self._events, None)
        if event is None and self.clock is not None:
            # Nothing happens any more until the time is over.
            self.clock._deadline = time.monotonic()
        return event() if callable(event) else event

    def comes(
        self,
        key: int,
        *,
        bad: str = "",
        model: str = "Tesla T4",
        gpus: int = 1,
        missing: Sequence[str] = (),
    ) -> Any:
        """An executor that introduces itself as a task of the last job."""

        def happens() -> Event:
            self.busy.append(str(self.executors))
            self.executors += 1
            devices = [
                {"gpu": f"GPU-{key}-{n}", "model": model, "driver": "", "bad": bad}
                for n in range(gpus)
            ]
            fields = {
                "job": self.jobs[-1].tag,
                "missing": list(missing),
                "python": "3.11",
                "host": f"node{key}",
                "container": f"container_{key}",
                "address": "10.0.0.1",
                "devices": devices,
                "time": time.time(),
            }
            return Event(key, Message("hello", fields, b""))

        return happens

    def ends(self, key: int) -> Any:
        """An executor that is gone."""

        def happens() -> Event:
            self.busy.pop()
            self.executors -= 1
            return Event(key, None)

        return happens


def bringing(cluster: Cluster, executors: int, **asked: Any) -> PlaceholderAcquisition:
    told = SimpleNamespace(
        state=lambda *_: None,
        on_executors_arrived=lambda times: None,
        on_parked=cluster.aside.append,
    )
    request = plans.request(told, executors, 60.0, **asked)
    turn = SimpleNamespace(
        renew=lambda: True, end=lambda: None, shortage_reason=lambda held: NO_WAIT
    )
    cluster.clock = AcquisitionClock(request)
    application: Any = cluster
    server: Any = cluster
    profile: Any = SimpleNamespace(id=1)
    return PlaceholderAcquisition(
        request,
        Executors(application, profile, server, DriverEndpoint("", 0, b"", None), removals()),
        cluster.start,
        cluster.clock,
        turn,
    )


def cluster_of(*events: tuple[str, int, dict[str, Any]]) -> Cluster:
    cluster = Cluster([])
    cluster._events = iter([getattr(cluster, what)(key, **more) for what, key, more in events])
    return cluster


BAD = {"bad": "a row of its memory cannot be remapped"}


def test_another_comes_in_place_of_a_bad_one() -> None:
    cluster = cluster_of(("comes", 1, {}), ("comes", 2, BAD), ("comes", 3, {}))
    gang = bringing(cluster, 2)
    assert sorted(gang.run() or ()) == [1, 3]
    assert list(gang.parked) == [2]
    assert cluster.aside == [[], [gang.parked[2].host], [gang.parked[2].host]]
    assert [job.tasks for job in cluster.jobs] == [2, 1]
    assert cluster.hastened == [2, 3]


def test_the_reason_why_executors_do_not_start_comes_first() -> None:
    cluster = cluster_of()
    cluster.problem = StartProblem("Kubernetes cannot schedule 1 pod", "0/2 nodes", "uncordon")
    gang = bringing(cluster, 2)
    with pytest.raises(GangTimeout, match="cannot schedule 1 pod; 0/2 nodes; uncordon"):
        gang.run()


def test_executors_that_can_never_start_are_an_error_at_once() -> None:
    cluster = cluster_of(("comes", 1, {}))
    cluster.problem = StartProblem("the image is absent", "not found", "", is_final=True)
    with pytest.raises(ConfigError, match="the image is absent; not found"):
        bringing(cluster, 2).run()


def test_a_gang_is_whole_once_a_bad_one_has_ended() -> None:
    """Its task waits for an executor that nobody needs."""
    cluster = cluster_of(("comes", 1, {}), ("comes", 2, BAD), ("ends", 2, {}), ("comes", 3, {}))
    gang = bringing(cluster, 2)
    assert sorted(gang.run() or ()) == [1, 3]
    assert [job.tasks for job in cluster.jobs] == [2, 1] and not gang.parked


def test_a_task_of_one_of_two_bad_ones_is_waited_for_until_the_timeout() -> None:
    """Its task would take an agent's place, and the other one's job must go on."""
    cluster = cluster_of(
        ("comes", 1, BAD), ("comes", 2, BAD), ("ends", 1, {}), ("comes", 3, {}), ("comes", 4, {})
    )
    with pytest.raises(GangTimeout, match="2 of 2 executors arrived within 60 s"):
        bringing(cluster, 2).run()


def granted_one_more(cluster: Cluster) -> None:
    """YARN grants, and Spark starts, an executor that no task needs: it runs none."""
    cluster.executors += 1


def test_an_executor_that_no_task_needs_is_killed() -> None:
    """An agent could come to it, and it would keep its GPU until Spark's idle timeout."""
    cluster = cluster_of(("comes", 1, {}), ("comes", 2, {}))
    gang = bringing(cluster, 2)
    granted_one_more(cluster)
    assert sorted(gang.run() or ()) == [1, 2]
    assert cluster.killed == [["0"]] and cluster.executors == 2


@pytest.mark.parametrize(
    ("target", "busy"),
    [(3, ("0", "1")), (2, ("1",))],
    ids=["another would come in its place", "Spark does not say yet that a placeholder runs"],
)
def test_an_executor_that_may_be_needed_is_waited_for(target: int, busy: tuple[str, ...]) -> None:
    cluster = cluster_of(("comes", 1, {}), ("comes", 2, {}))
    gang = bringing(cluster, 2)
    granted_one_more(cluster)
    cluster.target = target
    cluster.jvm.busy_executors = lambda profile: busy
    with pytest.raises(GangTimeout):
        gang.run()
    assert cluster.killed == []


def test_where_spark_kills_none_it_is_tried_once_and_their_end_is_waited_for() -> None:
    cluster = cluster_of(("comes", 1, {}), ("comes", 2, {}))
    gang = bringing(cluster, 2)
    granted_one_more(cluster)

    def kill(executors: Iterable[str]) -> None:
        cluster.killed.append([*executors])
        raise Py4JError("Method killExecutors does not exist")

    cluster.jvm.kill = kill
    with pytest.raises(GangTimeout):
        gang.run()
    assert len(cluster.killed) == 1


def test_wrong_types_are_not_parked_without_bound() -> None:
    cluster = cluster_of(*[("comes", key, {}) for key in range(20)])
    gang = bringing(
        cluster, 1, plan=replace(plans.plan(gpu_type="A100"), hosts=frozenset({"node99"}))
    )
    assert gang.run() is None
    assert len(gang.parked) == 9


def test_what_was_parked_is_told_once_a_part_was_given_back() -> None:
    gang = bringing(cluster_of(("comes", 2, BAD)), 1)
    with pytest.raises(GangTimeout):
        gang.run()
    again = bringing(Cluster([]), 1)
    again._clock = gang._clock
    # Its time is over before it has told of itself.
    again._clock.report((), again._why())
    told = "Requesting 1 executor; parked before: GPU-2-0 of node2 is bad: a row"
    with pytest.raises(GangTimeout, match=told):
        again.run()


def test_many_that_were_parked_are_counted() -> None:
    told: list[WaitReason] = []
    gang = bringing(Cluster([]), 1)
    gang._request.watcher.state = lambda state, hosts, why: told.append(why)  # type: ignore[method-assign]
    for number in range(7):
        gang._clock.note_parked(f"node{number} has Tesla T4, not 'A100'")
    gang._clock.report((), requesting(1))
    (parked,) = told[0].details
    assert parked.endswith("node4 has Tesla T4, not 'A100' and 2 more") and "node5" not in parked


@pytest.mark.parametrize("gpus", [0, 2])
def test_gpus_that_our_script_did_not_give_out_are_refused(gpus: int) -> None:
    cluster = cluster_of(("comes", 1, {"gpus": gpus}))
    with pytest.raises(
        DiscoveryError, match=rf"reports {gpus} GPUs? instead of the requested 1.*Plugin"
    ):
        bringing(cluster, 1).run()


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("hdfs_native", "Python 3.11 on node1 lacks hdfs_native, which ranks need to reach the la"),
        ("pyarrow", "on node1 lacks pyarrow, which ranks need to read data=: .*python_env="),
    ],
)
def test_a_python_without_what_ranks_need_is_refused_with_the_first_executor(
    missing: str, words: str
) -> None:
    cluster = cluster_of(("comes", 1, {"missing": [missing]}))
    with pytest.raises(ConfigError, match=words):
        bringing(cluster, 2, has_data=True).run()


def test_what_is_for_data_alone_is_no_need_of_others() -> None:
    containers = bringing(cluster_of(("comes", 1, {"missing": ["pyarrow"]})), 1).run() or {}
    # A held gang may be given data later.
    assert [container.missing_modules for container in containers.values()] == [("pyarrow",)]


def test_an_executor_that_arrived_is_not_counted_as_starting() -> None:
    gang = bringing(cluster_of(("comes", 1, {})), 2)
    held = {"c1": "node1", "c2": "node2"}
    assert gang._describe_missing(held, NO_WAIT) == starting_executors(["node1", "node2"], [])
    gang._placeholders[1] = GangExecutor(1, "c1", "node1", "127.0.0.1", ())
    assert gang._describe_missing(held, NO_WAIT) == starting_executors(["node2"], ["node1"])
    surplus = held | {"c3": "node3"}
    assert gang._describe_missing(surplus, NO_WAIT) == gang._describe_missing(held, NO_WAIT)
    assert gang._describe_missing({"c1": "node1"}, NO_WAIT) == granted_part(1, 2, NO_WAIT)
    gang._placeholders[2] = GangExecutor(2, "c2", "node2", "127.0.0.1", ())
    assert gang._describe_missing(held, NO_WAIT) == ending_surplus()


def test_an_executor_whose_python_lacks_what_the_call_refers_to_is_the_last() -> None:
    """Its first word is enough: no other GPU is waited for."""
    cluster = cluster_of(("comes", 1, {"missing": ("own_net", "pyarrow")}), ("comes", 2, {}))
    with pytest.raises(ConfigError, match="own_net, which the executors' Python on node1 lacks"):
        bringing(cluster, 2, imports=("json", "own_net")).run()
    assert cluster.executors == 1
    cluster = cluster_of(("comes", 1, {"missing": ("pyarrow",)}))
    assert bringing(cluster, 1, imports=("own_net",)).run()
