"""When a gang may request executors by Kueue's word, and what an eviction does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.backends.spark import kueue_admission
from hopsgpu.backends.spark.executor_admission import ExecutorAdmissions
from hopsgpu.backends.spark.kueue_admission import KueueAdmission, kueue_admissions
from hopsgpu.cluster_managers.flavors import Flavors
from hopsgpu.cluster_managers.http_client import NoAnswer
from hopsgpu.cluster_managers.kubernetes.api_client import ApiError, Forbidden
from hopsgpu.cluster_managers.kubernetes.kueue import Workload, deleted_workload
from hopsgpu.errors import CapacityError, HopsGpuError
from tests.conftest import until

FLAVORS = Flavors({"pool": "a"})


class Queue:
    """Kueue's queue, whose Workloads a test changes.

    Attributes:
        errors: raised by the next requests.
        watch_errors: raised by the next ones that watch.
    """

    name = "gangs"

    def __init__(self) -> None:
        self.present: dict[str, Workload] = {}
        self.created = 0
        self.errors: list[HopsGpuError] = []
        self.watch_errors: list[HopsGpuError] = []
        self.changes: list[Workload] = []

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop()

    def create(self, body: Any) -> Workload:
        self._fail()
        self.created += 1
        workload = Workload(f"w{self.created}", "spark-1")
        self.present[workload.name] = workload
        return workload

    def read(self, workload: Workload) -> Workload:
        self._fail()
        gone = deleted_workload(workload.name, workload.application)
        return self.present.get(workload.name, gone)

    def delete(self, workload: Workload) -> None:
        self._fail()
        self.present.pop(workload.name, None)

    def flavors(self, names: Any) -> Flavors:
        return FLAVORS

    def watch(self, application_id: str, seconds: float) -> Iterator[Workload]:
        time.sleep(0.01)
        if self.watch_errors:
            raise self.watch_errors.pop()
        while self.changes:
            yield self.changes.pop()

    def set(self, **changes: Any) -> Workload:
        (name,) = self.present
        self.present[name] = replace(self.present[name], **changes)
        return self.present[name]


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def revoked() -> list[str]:
    return []


@pytest.fixture
def admission(queue: Any, revoked: list[str]) -> KueueAdmission:
    return KueueAdmission(queue, 2, dict, revoked.append, lambda: None)


def test_other_cluster_managers_admit_all_at_once() -> None:
    request: Any = None
    admission = ExecutorAdmissions().open(request, lambda why: None)
    assert not admission.poll() and admission.is_valid and admission.executors is None
    assert admission.flavors == Flavors()
    admission.close()


def test_a_gang_waits_until_kueue_admits_it(queue: Queue, admission: KueueAdmission) -> None:
    assert not admission.is_valid
    assert str(admission.poll()) == "Kueue: the gang waits in the LocalQueue gangs"
    queue.set(message="insufficient quota")
    assert admission.poll().sentence == "Kueue: insufficient quota"
    queue.set(is_admitted=True, flavors=("a",))
    assert not admission.poll() and admission.is_valid
    assert admission.flavors == FLAVORS and queue.created == 1
    queue.errors = [HopsGpuError("an admitted gang does not ask again")]
    assert not admission.poll()
    queue.errors = []
    admission.close()
    assert queue.present == {} and not admission.is_valid


def test_an_eviction_ends_the_executors_once_and_is_followed_by_another_workload(
    queue: Queue, admission: KueueAdmission, revoked: list[str]
) -> None:
    admission.poll()
    queue.set(is_admitted=True)
    admission.poll()
    evicted = queue.set(eviction="Kueue preempted the gang: x")
    admission.update(replace(evicted, name="another"))
    assert admission.is_valid
    admission.update(evicted)
    admission.update(evicted)
    assert revoked == ["Kueue preempted the gang: x"]
    assert not admission.is_valid and queue.present == {}
    assert admission.poll() and [*queue.present] == ["w2"]


def test_executors_that_could_not_be_ended_are_ended_later(queue: Any) -> None:
    errors: list[HopsGpuError] = [NoAnswer("silent")]

    def end(why: str) -> None:
        if errors:
            raise errors.pop()

    admission = KueueAdmission(queue, 2, dict, end, lambda: None)
    admission.poll()
    queue.set(is_admitted=True)
    admission.poll()
    queue.set(eviction="Kueue preempted the gang: x")
    with pytest.raises(NoAnswer):
        admission.refresh()
    assert admission.is_valid and queue.present
    admission.refresh()
    assert not admission.is_valid and not queue.present


def test_an_eviction_that_nobody_watched_is_found(
    queue: Queue, admission: KueueAdmission, revoked: list[str]
) -> None:
    admission.refresh()
    admission.poll()
    admission.refresh()
    queue.set(is_admitted=True)
    admission.poll()
    queue.present = {}
    admission.refresh()
    assert revoked == ["Kueue evicted the gang: its Workload was deleted"]


def test_a_workload_that_was_evicted_before_the_gang_saw_it_is_replaced(
    queue: Queue, admission: KueueAdmission
) -> None:
    admission.poll()
    queue.set(is_admitted=True, eviction="Kueue preempted the gang: x")
    assert admission.poll() and [*queue.present] == ["w2"]
    queue.present = {}
    assert admission.poll() and [*queue.present] == ["w3"]


def test_a_workload_that_was_deactivated_while_it_waited_is_not_replaced(
    queue: Queue, admission: KueueAdmission
) -> None:
    admission.poll()
    queue.set(eviction="Kueue evicted the gang: deactivated", message="deactivated")
    assert admission.poll().sentence == "Kueue: deactivated" and queue.created == 1


@pytest.mark.parametrize("error", [NoAnswer("silent"), ApiError("busy", 429), ApiError("x", 500)])
def test_an_api_server_that_is_away_is_asked_again(
    queue: Queue, admission: KueueAdmission, error: HopsGpuError
) -> None:
    queue.errors = [error]
    assert "tries again" in admission.poll().sentence
    assert admission.poll().sentence.startswith("Kueue")


def test_a_workload_that_is_refused_is_an_error(queue: Queue, admission: KueueAdmission) -> None:
    queue.errors = [ApiError("invalid", 422)]
    with pytest.raises(ApiError, match="invalid"):
        admission.poll()
    queue.errors = [Forbidden("may not create", 403)]
    with pytest.raises(CapacityError, match=r"may not create.*LocalQueue gangs.*'off'"):
        admission.poll()


def test_a_workload_that_cannot_be_deleted_is_left_to_others(
    queue: Queue, admission: KueueAdmission, caplog: pytest.LogCaptureFixture
) -> None:
    admission.poll()
    queue.errors = [NoAnswer("silent")]
    admission.close()
    assert "until another application removes it" in caplog.text


def test_a_workload_that_is_created_during_the_close_is_deleted(
    queue: Queue, admission: KueueAdmission
) -> None:
    admission.is_closed = True
    assert admission.poll() and queue.present == {}


def test_workloads_of_killed_drivers_are_removed_while_a_gang_waits(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals: list[int] = []
    monkeypatch.setattr(kueue_admission, "_REMOVE_SECONDS", 0.0)
    admission = KueueAdmission(queue, 2, dict, lambda why: None, lambda: removals.append(1))
    admission.poll()
    admission.poll()
    assert len(removals) == 2


def test_all_workloads_of_an_allocator_are_watched_and_deleted(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kueue_admission, "_REWATCH_SECONDS", 0.01)
    request: Any = SimpleNamespace(plan=SimpleNamespace(executors=2))
    ended = threading.Event()
    bodies: list[bool] = []

    def body(request: Any, is_growth: bool) -> dict[str, Any]:
        bodies.append(is_growth)
        return {}

    with (
        pytest.raises(KeyError),
        kueue_admissions(queue, "spark-1", body, lambda: None) as admissions,
    ):
        admission = admissions.open(request, lambda why: ended.set())
        admission.poll()
        queue.set(is_admitted=True)
        admission.poll()
        queue.watch_errors = [NoAnswer("silent")]
        queue.changes = [queue.set(eviction="Kueue preempted the gang: x")]
        assert until(ended.is_set)
        assert until(lambda: not queue.present)
        growth = admissions.open(request, lambda why: None, is_growth=True)
        growth.poll()
        assert len(queue.present) == 1 and bodies == [False, True]
        raise KeyError
    assert queue.present == {}
