"""How a gang has Spark ask for its executors; Spark is stood in for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JJavaError

from hopsgpu.backends.spark import executors as executors_module
from hopsgpu.backends.spark.executors import Executors
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.control.peer import DriverEndpoint
from hopsgpu.errors import ConfigError
from tests.unit.backends.removals import removals

PROFILE = 3


class AllocationManager:
    """Spark's, as far as `Jvm` uses it; it knows the profile from the second look on.

    Args:
        needs: the numbers of executors that the tasks need of which it knows, at one look after
            another.
        field: name of the field with the time of its next step.
    """

    def __init__(self, needs: Sequence[int] = (4,), field: str = "addTime") -> None:
        self.looks = 0
        self.steps: dict[int, int] = {}
        self.target = 0
        self.times: list[int] = []
        self.steps_taken = 0
        self.needs = list(needs)
        self._field = field

    def isEmpty(self) -> bool:  # noqa: N802
        return False

    def get(self) -> AllocationManager:
        return self

    def __getattr__(self, name: str) -> Any:
        """A method by its name in Java; py4j finds out whether there is one when it is called."""
        if name.endswith("$schedule"):
            return self.step
        raise AttributeError(name)

    def step(self) -> None:
        self.steps_taken += 1
        if self.times:
            self.target = self.steps[PROFILE]
        if self.needs[0] < self.target:
            self.target = self.needs[0]

    def numExecutorsTargetPerResourceProfileId(self) -> Any:  # noqa: N802
        self.looks += 1
        known = SimpleNamespace(isDefined=lambda: True, get=lambda: self.target)
        return SimpleNamespace(get=lambda profile: known)

    def numExecutorsToAddPerResourceProfileId(self) -> Any:  # noqa: N802
        return SimpleNamespace(
            contains=lambda profile: self.looks > 1, update=self.steps.__setitem__
        )

    def maxNumExecutorsNeededPerResourceProfile(self, profile: int) -> int:  # noqa: N802
        assert profile == PROFILE
        return self.needs.pop(0) if len(self.needs) > 1 else self.needs[0]

    def getClass(self) -> Any:  # noqa: N802
        field = SimpleNamespace(
            getName=lambda: self._field,
            setAccessible=lambda allowed: None,
            setLong=lambda manager, value: self.times.append(value),
        )
        return SimpleNamespace(getDeclaredFields=lambda: [field], getSuperclass=lambda: None)


def executors_of(manager: Any) -> Executors:
    scala = SimpleNamespace(executorAllocationManager=lambda: manager)
    context: Any = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala))
    application: Any = SimpleNamespace(jvm=Jvm(context))
    profile: Any = SimpleNamespace(id=PROFILE)
    server: Any = None
    return Executors(application, profile, server, DriverEndpoint("", 0, b"", None), removals())


def test_spark_asks_for_all_once_it_knows_of_the_tasks() -> None:
    manager = AllocationManager(needs=(0, 3, 4))
    executors_of(manager).request_now(4, threading.Event())
    assert manager.steps == {PROFILE: 4} and manager.target == 4
    # Before any time of its clock, and only until it has asked.
    assert [time < 0 for time in manager.times] == [True]
    # Not beside a step that would find fewer tasks.
    assert manager.steps_taken == 1


def test_nothing_is_changed_where_it_has_asked_for_all() -> None:
    manager = AllocationManager()
    manager.target = 5
    executors_of(manager).request_now(4, threading.Event())
    assert not manager.steps and not manager.times


def test_a_gang_that_is_cancelled_is_not_waited_for() -> None:
    cancelled = threading.Event()
    cancelled.set()
    manager = AllocationManager(needs=(3,))
    executors_of(manager).request_now(4, cancelled)
    assert manager.looks == 1


def test_spark_keeps_its_own_pace_where_it_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors_module, "_REQUEST_SECONDS", 0.1)
    manager = AllocationManager(needs=(3,))
    executors_of(manager).request_now(4, threading.Event())
    assert manager.looks >= 2 and not manager.times
    # Its own next step is for all of them, once it knows of more tasks.
    assert manager.steps == {PROFILE: 4}


@pytest.mark.parametrize("error", [Py4JJavaError, Py4JError])
def test_a_table_that_changes_meanwhile_is_read_again(
    error: type[Py4JError], caplog: pytest.LogCaptureFixture
) -> None:
    manager = AllocationManager()
    needed = manager.maxNumExecutorsNeededPerResourceProfile

    def fails_once(profile: int) -> int:
        if manager.looks == 2:
            if error is Py4JError:
                raise error()
            raise Py4JJavaError("", SimpleNamespace(_target_id="o1"))
        return needed(profile)

    manager.maxNumExecutorsNeededPerResourceProfile = fails_once  # type: ignore[method-assign]
    executors_of(manager).request_now(4, threading.Event())
    if error is Py4JJavaError:
        assert manager.target == 4 and not caplog.text
    else:
        assert "it has no maxNumExecutorsNeeded" in caplog.text and not manager.times


def test_another_spark_keeps_its_own_pace_and_that_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = AllocationManager(field="anotherField")
    with caplog.at_level(logging.WARNING, logger="hopsgpu"):
        executors_of(manager).request_now(4, threading.Event())
    assert "at its own pace: it has no addTime" in caplog.text and not manager.times


def test_spark_counts_again_before_it_is_taken_to_want_more() -> None:
    manager = AllocationManager(needs=(2,))
    manager.target = 4
    assert not executors_of(manager).is_target_at_most(1)
    assert manager.target == 2 and manager.steps_taken == 1
    assert executors_of(manager).is_target_at_most(2)
    assert manager.steps_taken == 1, "it wants no more"


def test_a_spark_that_cannot_be_hurried_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    def unknown() -> None:
        raise Py4JError("Method schedule([]) does not exist")

    manager = AllocationManager(needs=(2,))
    manager.target = 4
    manager.step = unknown  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, logger="hopsgpu"):
        assert not executors_of(manager).is_target_at_most(2)
    assert "its targets at its own pace: Py4JError: Method schedule" in caplog.text
    manager.target = 2
    assert executors_of(manager).is_target_at_most(2)


class KillingJvm:
    """Spark's JVM, which knows how to kill executors, and perhaps how to tell them to end."""

    def __init__(self, unknown: Py4JError | None = None) -> None:
        self.unknown = unknown
        self.told: list[str] = []

    def registered_executors(self, profile: int) -> tuple[str, ...]:
        return ("1", "2", "3")

    def kill(self, executors: Sequence[str]) -> None:
        self.told.append(f"kill {' '.join(executors)}")

    def shut_down(self, executors: Sequence[str]) -> None:
        if self.unknown is not None:
            raise self.unknown
        self.told.append(f"end {' '.join(executors)}")


def killed_by(jvm: Any, busy: Sequence[str]) -> list[str]:
    profile: Any = SimpleNamespace(id=PROFILE)
    server: Any = None
    # The cluster manager ends them by another request, after Spark has killed them.
    application: Any = SimpleNamespace(
        jvm=jvm, end_executors=lambda ended: jvm.told.append(f"delete {' '.join(ended)}")
    )
    Executors(application, profile, server, DriverEndpoint("", 0, b"", None), removals()).kill_idle(
        busy
    )
    return list(jvm.told)


def test_executors_that_spark_expects_to_end_are_told_to() -> None:
    assert killed_by(KillingJvm(), ["2"]) == ["kill 1 3", "end 1 3", "delete 1 3"]
    assert killed_by(KillingJvm(), ["1", "2", "3"]) == []


@pytest.mark.parametrize("words", ["Method executorDataMap([]) does not exist", ""])
def test_executors_of_another_spark_end_when_their_nodes_hear_of_the_kill(
    words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hopsgpu"):
        assert killed_by(KillingJvm(Py4JError(words)), ["3"]) == ["kill 1 2", "delete 1 2"]
    assert f"end with the heartbeats of their nodes: Py4JError: {words}" in caplog.text


def removal(container: int, output: str) -> str:
    return (
        f"Requesting driver to remove executor {container} for reason Container from a bad node:"
        f" container_1_01_00000{container} on host: node1. Exit status: 29. Diagnostics: {output}"
    )


def refuses(failing: FailingHosts, *messages: str) -> str:
    """Why the executors of an application are refused after some messages of Spark; or ""."""
    profile: Any = SimpleNamespace(id=PROFILE)
    nothing: Any = None
    application: Any = SimpleNamespace(failing=failing)
    executors = Executors(
        application, profile, nothing, DriverEndpoint("", 0, b"", None), removals(*messages)
    )
    try:
        executors.refuse_hopeless_containers()
    except ConfigError as error:
        return str(error)
    return ""


def test_the_second_container_that_a_setting_ends_ends_the_wait() -> None:
    failing = FailingHosts()
    assert refuses(failing, removal(1, "image: evil/x is not trusted.")) == ""
    exit_ = failing.exit_of("container_1_01_000001")
    assert exit_ is not None and "evil/x is not trusted" in exit_.reason
    # A message about an executor that has no container says nothing.
    assert refuses(failing, "Requesting driver to remove executor 9 for reason killed") == ""
    why = refuses(failing, removal(2, "image: evil/x is not trusted."))
    assert "no executor can start, because the registry of the image evil/x is not trusted" in why
    assert "docker.trusted.registries" in why


def test_other_ends_and_ends_after_an_arrival_do_not() -> None:
    failing = FailingHosts()
    memory = "java.lang.OutOfMemoryError: no more"
    assert refuses(failing, *(removal(n, memory) for n in (1, 2, 3))) == ""
    different = ["image: evil/x is not trusted.", "Requested runtime not allowed."]
    assert refuses(failing, *(removal(n + 4, text) for n, text in enumerate(different))) == ""
    arrived = FailingHosts()
    arrived.record_arrival("node2")
    assert refuses(arrived, *(removal(n, different[0]) for n in (1, 2, 3))) == ""
