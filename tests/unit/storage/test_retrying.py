"""Trying again: bounded, spread, and given up where nobody waits."""

from __future__ import annotations

import logging
import threading

import pytest

from hopsgpu.errors import Cancelled, StoreError
from hopsgpu.storage.retrying import RetryLimits


class Clock(threading.Event):
    """An event whose waits take no time, and are the clock's."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        self.now += timeout
        return self.is_set()


def patience(clock: Clock, seconds: float = 60.0) -> RetryLimits:
    return RetryLimits(seconds, clock=clock, jitter=lambda: 0.5, stop=clock)


def unreachable(number: int) -> str:
    raise OSError("Connection refused (os error 111)")


def test_what_works_is_done_once() -> None:
    clock = Clock()
    assert patience(clock)("read", "hdfs://n/x", lambda number: number) == 0
    assert clock.pauses == []


def test_what_works_later_is_returned() -> None:
    clock = Clock()

    def attempt(number: int) -> int:
        return number if number == 3 else int(unreachable(number))

    assert patience(clock)("read", "hdfs://n/x", attempt) == 3
    assert clock.pauses == [0.2, 0.4, 0.8]


def test_each_retry_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hopsgpu")
    clock = Clock()

    def attempt(number: int) -> int:
        return number if number == 1 else int(unreachable(number))

    assert patience(clock)("read", "hdfs://n/x", attempt) == 1
    assert caplog.messages == [
        "attempt 1 to read hdfs://n/x failed: tries again in 0.2 s"
        " (Connection refused (os error 111))",
        "attempt 2 to read hdfs://n/x succeeded",
    ]
    with pytest.raises(StoreError):
        patience(clock, 1.0)("read", "hdfs://n/x", unreachable)
    assert caplog.messages[-1].startswith("attempt 3 to read hdfs://n/x failed after 1 s: gives up")


def test_what_is_done_at_once_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hopsgpu")
    assert patience(Clock())("read", "hdfs://n/x", lambda number: number) == 0
    assert caplog.messages == []


def test_it_ends_within_its_time() -> None:
    clock = Clock()
    with pytest.raises(StoreError, match=r"cannot read hdfs://n/x: Connection .*for 5\d s") as told:
        patience(clock)("read", "hdfs://n/x", unreachable)
    assert told.value.kind == "unreachable"
    assert 50 < clock.now <= 60
    assert max(clock.pauses) == 5.0


def test_an_attempt_that_took_long_is_not_the_last() -> None:
    """A connection that broke after minutes, or that was only given up after them."""
    clock = Clock()
    ends: list[float] = []

    def attempt(number: int) -> None:
        clock.now += 600
        ends.append(clock.now)
        unreachable(number)

    with pytest.raises(StoreError, match=r"\(tried for 1200 s\)"):
        patience(clock)("read", "hdfs://n/x", attempt)
    assert ends == [600, 1200.2]


def test_what_cannot_help_is_not_tried() -> None:
    clock = Clock()

    def attempt(number: int) -> None:
        raise PermissionError(13, "Permission denied", "/x")

    with pytest.raises(StoreError, match="cannot write file:///x: Permission denied; ask") as told:
        patience(clock)("write", "file:///x", attempt)
    assert told.value.kind == "permission"
    assert clock.pauses == []


def test_our_own_mistakes_are_not_retold() -> None:
    def attempt(number: int) -> None:
        raise TypeError("ours")

    with pytest.raises(TypeError):
        patience(Clock())("write", "file:///x", attempt)


def test_it_ends_where_nobody_waits() -> None:
    clock = Clock()

    def attempt(number: int) -> None:
        if number == 2:
            clock.set()
        unreachable(number)

    with pytest.raises(Cancelled):
        patience(clock)("write", "hdfs://n/x", attempt)
    assert len(clock.pauses) == 3
