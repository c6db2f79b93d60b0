"""Sources that hang, fail and answer again."""

from __future__ import annotations

import threading
import time

from hopsgpu.errors import HopsGpuError
from hopsgpu.monitoring.timed_sources import Source
from tests.bounds import HANG_SECONDS


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def failing(error: Exception) -> int:
    raise error


def test_an_answer_has_its_value_and_how_long_it_took() -> None:
    source: Source[int] = Source("queue", print)
    source.ask(lambda: 7)
    answer = source.answer(soon())
    assert (answer.value, answer.problem) == (7, "") and 0 <= answer.seconds < 30


def test_each_change_is_told_once() -> None:
    told: list[str] = []
    source: Source[int] = Source("queue", told.append)
    for error in (HopsGpuError("down"), HopsGpuError("down"), ZeroDivisionError("odd")):
        source.ask(lambda error=error: failing(error))  # type: ignore[misc]
        assert source.answer(soon()).value is None
    for _ in range(2):
        source.ask(lambda: 7)
        assert source.answer(soon()).value == 7
    assert source.no_answer("not asked").problem == "not asked"
    assert told == [
        "queue: down",
        "queue: unexpected ZeroDivisionError: odd",
        "queue: answers again",
        "queue: not asked",
    ]


def test_a_source_that_hangs_is_waited_for_no_longer_and_asked_no_second_time() -> None:
    asked, may_end, told = [], threading.Event(), list[str]()
    source: Source[int] = Source("runs", told.append)

    def hang() -> int:
        asked.append(1)
        assert may_end.wait(HANG_SECONDS)
        return len(asked)

    for _ in range(3):
        source.ask(hang)
        answer = source.answer(soon(0.05))
        assert (answer.value, answer.problem) == (None, "no answer in time")
    assert (asked, told) == ([1], ["runs: no answer in time"])
    may_end.set()
    # The late answer counts as one until the next question.
    assert source.answer(soon()).value == 1
    source.ask(hang)
    assert source.answer(soon()).value == 2
