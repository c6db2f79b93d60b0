"""Why a run waited: each reason once, and a bounded number of them."""

from __future__ import annotations

from hopsgpu.core.waits import Wait, add_wait


def test_a_reason_is_noted_when_it_comes() -> None:
    waits = add_wait((), "", 1.0)
    assert waits == ()
    for now, why in ((2.0, "a"), (3.0, "a"), (4.0, "b"), (5.0, ""), (6.0, "b"), (7.0, "a")):
        waits = add_wait(waits, why, now)
    assert waits == (Wait(2.0, "a"), Wait(4.0, "b"), Wait(7.0, "a"))


def test_the_first_and_the_latest_of_many_are_kept() -> None:
    waits: tuple[Wait, ...] = ()
    for number in range(1000):
        waits = add_wait(waits, f"{number} GPUs free", float(number))
    assert [wait.time for wait in waits] == [0.0, *map(float, range(981, 1000))]
    assert len(add_wait((), "x" * 10**6, 0.0)[0].why) == 1000
