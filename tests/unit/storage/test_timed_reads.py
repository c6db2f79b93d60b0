"""A read that may hang: its answer, why there is none, and who waits how long."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from hopsgpu.errors import StoreError
from hopsgpu.storage.timed_reads import TimedRead
from tests.bounds import HANG_SECONDS


def failing(error: Exception) -> int:
    raise error


def test_an_answer_has_its_value_and_how_long_it_took() -> None:
    read = TimedRead("the lake", lambda: 7)
    answer = read.answer(time.monotonic() + HANG_SECONDS)
    assert answer is not None and read.is_done
    assert (answer.value, answer.problem) == (7, "") and 0 <= answer.seconds < 30
    assert asyncio.run(read.wait()) == answer


@pytest.mark.parametrize(
    ("error", "problem", "kind"),
    [
        (StoreError("refused", "permission"), "refused", "permission"),
        (KeyError("rows"), "it cannot be understood: KeyError: 'rows'", ""),
        (OSError("disk"), "disk", ""),
        (ZeroDivisionError("odd"), "unexpected ZeroDivisionError: odd", ""),
    ],
)
def test_error_of_a_read_is_a_problem(error: Exception, problem: str, kind: str) -> None:
    answer = TimedRead("the lake", lambda: failing(error)).answer(time.monotonic() + HANG_SECONDS)
    assert answer is not None
    assert (answer.value, answer.problem, answer.kind) == (None, problem, kind)


def test_a_read_goes_on_when_nobody_waits_any_more() -> None:
    may_end = threading.Event()
    read = TimedRead("YARN", lambda: may_end.wait(HANG_SECONDS))
    assert read.answer(time.monotonic() + 0.05) is None
    assert not read.is_done and read.seconds_waited >= 0.05

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read.wait(), 0.05)

    asyncio.run(give_up())
    may_end.set()
    answer = read.answer(time.monotonic() + HANG_SECONDS)
    assert answer is not None and answer.value is True
