"""Reads that browsers share: one call at a time, deadlines, and nothing raised."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from hopsgpu.errors import StoreError
from hopsgpu.storage.timed_reads import ReadResult
from hopsgpu.web.shared_reads import SharedReads
from tests.bounds import HANG_SECONDS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Keeps a read waiting until it is set, at the latest at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_those_who_ask_at_the_same_time_share_a_call(gate: threading.Event) -> None:
    calls = []

    def read() -> int:
        calls.append(1)
        gate.wait(HANG_SECONDS)
        return 7

    async def ask() -> list[ReadResult[int]]:
        reads = SharedReads("the lake", 30)
        asked = [asyncio.create_task(reads.get("a", read)) for _ in range(5)]
        await asyncio.sleep(0)
        gate.set()
        return await asyncio.gather(*asked)

    answers = asyncio.run(ask())
    assert [one.value for one in answers] == [7] * 5 and len(calls) == 1


def test_a_result_is_fresh_for_a_while_and_forgotten_on_demand() -> None:
    clock, numbers = Clock(), iter(range(10))
    reads = SharedReads("the lake", 30, clock=clock)

    async def ask() -> list[int | None]:
        def read() -> int:
            return next(numbers)

        found = [(await reads.get("a", read, fresh=5)).value]
        clock.now += 4
        found.append((await reads.get("a", read, fresh=5)).value)
        clock.now += 2
        found.append((await reads.get("a", read, fresh=5)).value)
        reads.forget("a")
        found.append((await reads.get("a", read, fresh=5)).value)
        return found

    assert asyncio.run(ask()) == [0, 0, 1, 2]


def test_who_waits_too_long_gets_what_is_known_and_the_call_goes_on(gate: threading.Event) -> None:
    clock = Clock()
    reads = SharedReads("YARN", 0.05, clock=clock)
    results: list[Callable[[], str]] = [
        lambda: "old",
        lambda: str(gate.wait(HANG_SECONDS) and "new"),
    ]

    async def ask() -> list[ReadResult[str]]:
        def read() -> str:
            return results.pop(0)()

        async def have(value: str) -> ReadResult[str]:
            while (answer := await reads.get("a", read, fresh=1.0)).value != value:
                assert not answer.problem or "still asked" in answer.problem
            return answer

        found = [await have("old")]
        clock.now += 30
        found.append(await reads.get("a", read, fresh=1.0))
        gate.set()
        # The same call: there is no third.
        found.append(await have("new"))
        return found

    old, late, new = asyncio.run(ask())
    assert (old.value, old.problem) == ("old", "")
    assert (late.value, late.age) == ("old", 30.0)
    assert late.problem == "YARN has not answered within 0.05 s; it is still asked"
    assert (new.value, new.problem) == ("new", "")


def test_only_the_first_who_asks_a_silent_source_waits(gate: threading.Event) -> None:
    clock = Clock()
    reads = SharedReads("YARN", 1000, clock=clock)

    async def ask() -> ReadResult[bool]:
        with contextlib.suppress(TimeoutError):  # a browser that is closed
            await asyncio.wait_for(reads.get("a", lambda: gate.wait(HANG_SECONDS)), 0.05)
        clock.now += 1000
        answer = await reads.get("a", lambda: gate.wait(HANG_SECONDS))
        gate.set()
        return answer

    assert "still asked" in asyncio.run(ask()).problem


def test_only_so_many_calls_hang_at_a_time(gate: threading.Event) -> None:
    reads = SharedReads("the lake", 0.02, most=2)

    async def ask() -> list[ReadResult[bool]]:
        def read() -> bool:
            return gate.wait(HANG_SECONDS)

        found = [await reads.get(key, read) for key in range(4)]
        gate.set()
        return found

    said = [one.problem for one in asyncio.run(ask())]
    assert ["still asked" in text for text in said] == [True, True, False, False]
    assert said[2] == "the lake has not answered 2 earlier requests yet"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreError("no such run"), "no such run"),
        (KeyError("rows"), "it cannot be understood: KeyError: 'rows'"),
        (OSError("disk"), "disk"),
        (ZeroDivisionError("odd"), "unexpected ZeroDivisionError: odd"),
    ],
)
def test_what_a_read_raises_is_a_problem_beside_what_is_known(error: Exception, said: str) -> None:
    clock = Clock()
    reads = SharedReads("the lake", 30, clock=clock)
    fails = False

    def read() -> int:
        if fails:
            raise error
        return 1

    async def ask() -> tuple[ReadResult[int], ReadResult[int]]:
        nonlocal fails
        await reads.get("a", read)
        fails = True
        clock.now += 60
        recent = await reads.get("a", read)
        clock.now += 3600
        return recent, await reads.get("a", read)

    recent, later = asyncio.run(ask())
    assert (recent.value, recent.problem, recent.age) == (1, said, 60.0)
    assert (later.value, later.problem) == (None, said)
