"""A launch with data on a held gang: written in a thread of its own, then trained in its turn."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hopsgpu.backends.gang_request import Request
from hopsgpu.core.gang import Exclusions, GangState
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason, other_launch
from hopsgpu.errors import Cancelled, ConfigError
from hopsgpu.launcher import held_gang
from hopsgpu.launcher.held_gang import AllocatorThread
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.unit import plans


class Watcher:
    def __init__(self) -> None:
        self.told: list[tuple[str, WaitReason]] = []

    def state(self, state: GangState, hosts: Any, why: WaitReason = NO_WAIT) -> None:
        self.told.append((state.value, why))

    def warn(self, text: str) -> None:
        return


def request(cancelled: threading.Event | None = None) -> Request:
    return plans.request(Watcher(), cancelled=cancelled or threading.Event())


@pytest.fixture
def keeper() -> Iterator[AllocatorThread]:
    @contextlib.contextmanager
    def allocate(asked: Any) -> Iterator[Any]:
        yield SimpleNamespace(
            ensure_whole=lambda request: "the gang",
            is_whole=True,
            request=asked,
            executor_count=2,
        )

    keeper = AllocatorThread(allocate, None, request)
    keeper.start()
    yield keeper
    keeper.close()


def in_thread(body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def test_a_launch_in_a_thread_of_its_own_waits_for_its_turn(keeper: AllocatorThread) -> None:
    begun, may_end, had = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        begun.set()
        may_end.wait(HANG_SECONDS)

    def later() -> None:
        with keeper.provide_gang_in_turn(request()) as whole:
            assert cast(Any, whole(Exclusions())) == "the gang"
            had.set()

    keeper.put(other)
    assert begun.wait(HANG_SECONDS)
    thread = in_thread(later)
    assert not had.wait(0.3)
    may_end.set()
    assert had.wait(HANG_SECONDS)
    thread.join(HANG_SECONDS)


def test_a_launch_that_waits_for_its_turn_says_so(keeper: AllocatorThread) -> None:
    may_end, had, mine = threading.Event(), threading.Event(), request()
    told = cast(Watcher, mine.watcher).told

    def later() -> None:
        with keeper.provide_gang_in_turn(mine):
            had.set()

    keeper.put(lambda: cast(None, may_end.wait(HANG_SECONDS)))
    thread = in_thread(later)
    assert until(lambda: bool(told))
    ((state, why),) = told
    assert (state, why) == ("preparing", other_launch())
    assert not had.is_set()
    may_end.set()
    assert had.wait(HANG_SECONDS)
    thread.join(HANG_SECONDS)


def test_the_keeper_serves_nobody_else_meanwhile(keeper: AllocatorThread) -> None:
    next_one = threading.Event()
    with keeper.provide_gang_in_turn(request()) as whole:
        whole(Exclusions())
        keeper.put(next_one.set)
        assert not next_one.wait(0.3)
    assert next_one.wait(HANG_SECONDS)


def test_a_launch_that_is_cancelled_gives_up_its_turn(keeper: AllocatorThread) -> None:
    may_end, cancelled, problems = threading.Event(), threading.Event(), []

    def later() -> None:
        try:
            with keeper.provide_gang_in_turn(request(cancelled)):
                raise AssertionError("it was cancelled")
        except Cancelled as error:
            problems.append(str(error))

    keeper.put(lambda: cast(None, may_end.wait(HANG_SECONDS)))
    thread = in_thread(later)
    cancelled.set()
    thread.join(HANG_SECONDS)
    (problem,) = problems
    assert problem.startswith("run was cancelled")
    may_end.set()
    served = threading.Event()
    keeper.put(served.set)
    assert served.wait(HANG_SECONDS)


def test_a_gang_that_is_closed_is_said_to_be(keeper: AllocatorThread) -> None:
    keeper.check_held()
    closing = in_thread(keeper.close)
    closing.join(HANG_SECONDS)

    def refused() -> bool:
        with pytest.raises(ConfigError, match="not held"):
            keeper.check_held()
        return True

    assert until(refused)
    with pytest.raises(ConfigError, match="not held"), keeper.provide_gang_in_turn(request()):
        raise AssertionError("it is closed")


def test_a_launch_on_a_held_gang_is_refused_by_its_name() -> None:
    application = SimpleNamespace(allocate=None)
    spec = SimpleNamespace(name="held")
    given: Any = SimpleNamespace(application=application, spec=spec, idle_timeout=None)
    gang = held_gang.Gang(given, cast(Any, None))
    with pytest.raises(TypeError) as caught:
        gang.launch(print, retry=1)
    assert re.match(r"Gang\.launch\(\) .*'retry'.*'retries'", str(caught.value))
