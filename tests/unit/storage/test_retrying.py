"""Retries: bounded, with jitter, and ended by a stop."""

from __future__ import annotations

import logging
import re
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


def limits(clock: Clock, seconds: float = 60.0) -> RetryLimits:
    return RetryLimits(seconds, clock=clock, jitter=lambda: 0.5, stop=clock)


def unreachable(number: int) -> str:
    raise OSError("Connection refused (os error 111)")


def test_success_is_not_repeated() -> None:
    clock = Clock()
    assert limits(clock)("read", "hdfs://n/x", lambda number: number) == 0
    assert clock.pauses == []


def test_result_of_a_later_attempt_is_returned() -> None:
    clock = Clock()

    def attempt(number: int) -> int:
        return number if number == 3 else int(unreachable(number))

    assert limits(clock)("read", "hdfs://n/x", attempt) == 3
    assert clock.pauses == [0.2, 0.4, 0.8]


def test_each_retry_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hopsgpu")
    clock = Clock()

    def attempt(number: int) -> int:
        return number if number == 1 else int(unreachable(number))

    assert limits(clock)("read", "hdfs://n/x", attempt) == 1
    failed, succeeded = caplog.messages
    assert re.match(r"attempt 1 .*hdfs://n/x .* 0.2 s .*os error 111", failed)
    assert re.match(r"attempt 2 .*hdfs://n/x ", succeeded)
    with pytest.raises(StoreError):
        limits(clock, 1.0)("read", "hdfs://n/x", unreachable)
    assert re.match(r"attempt 3 .*hdfs://n/x .* 1 s", caplog.messages[-1])


def test_success_at_the_first_attempt_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hopsgpu")
    assert limits(Clock())("read", "hdfs://n/x", lambda number: number) == 0
    assert caplog.messages == []


def test_retries_end_within_their_time() -> None:
    clock = Clock()
    with pytest.raises(StoreError, match=r"hdfs://n/x: Connection .* 5\d s") as raised:
        limits(clock)("read", "hdfs://n/x", unreachable)
    assert raised.value.kind == "unreachable"
    assert 50 < clock.now <= 60
    assert max(clock.pauses) == 5.0


def test_long_attempt_is_not_the_last() -> None:
    """A connection may break, or be abandoned, only after minutes."""
    clock = Clock()
    ends: list[float] = []

    def attempt(number: int) -> None:
        clock.now += 600
        ends.append(clock.now)
        unreachable(number)

    with pytest.raises(StoreError, match="1200 s"):
        limits(clock)("read", "hdfs://n/x", attempt)
    assert ends == [600, 1200.2]


def test_permanent_error_is_not_retried() -> None:
    clock = Clock()

    def attempt(number: int) -> None:
        raise PermissionError(13, "Permission denied", "/x")

    with pytest.raises(StoreError, match="file:///x: Permission denied") as raised:
        limits(clock)("write", "file:///x", attempt)
    assert raised.value.kind == "permission"
    assert clock.pauses == []


def test_programming_errors_are_raised_unchanged() -> None:
    def attempt(number: int) -> None:
        raise TypeError("ours")

    with pytest.raises(TypeError):
        limits(Clock())("write", "file:///x", attempt)


def test_stop_ends_the_retries() -> None:
    clock = Clock()

    def attempt(number: int) -> None:
        if number == 2:
            clock.set()
        unreachable(number)

    with pytest.raises(Cancelled):
        limits(clock)("write", "hdfs://n/x", attempt)
    assert len(clock.pauses) == 3
