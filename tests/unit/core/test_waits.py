"""Why a run waited: what lasted and lacked something, once, and a bounded number of times."""

from __future__ import annotations

from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason
from hopsgpu.core.waits import Wait, WaitHistory


def history(*reasons: tuple[float, str, str]) -> tuple[Wait, ...]:
    """Return the waits after reasons were seen each second, as the recorder does.

    Args:
        reasons: for how many seconds, the sentence, what is missing.
    """
    waits, now = WaitHistory(), 0.0
    for seconds, sentence, lack in reasons:
        for _ in range(int(seconds)):
            waits.record(WaitReason(sentence, (), lack) if sentence else NO_WAIT, now)
            now += 1.0
    return waits.waits


def test_what_lasted_and_lacked_something_is_kept() -> None:
    assert history(
        (30, "Needs 4 GPUs", "GPUs"),
        (30, "Starting", ""),
        (9, "YARN is silent", "YARN"),
    ) == (Wait(0.0, "Needs 4 GPUs", 29.0), Wait(60.0, "YARN is silent", 8.0))
    assert history((4, "Needs 4 GPUs", "GPUs"), (60, "", "")) == ()


def test_reasons_whose_numbers_differ_are_one() -> None:
    assert history((9, "Needs 4, 1 is free", "GPUs"), (9, "Needs 4, 2 are free", "GPUs")) == (
        Wait(0.0, "Needs 4, 2 are free", 17.0),
    )


def test_a_moment_between_equal_reasons_does_not_divide_them() -> None:
    assert history((9, "a", "a"), (2, "b", "b"), (3, "", ""), (9, "a", "a")) == (
        Wait(0.0, "a", 22.0),
    )
    # The run trained in between.
    assert [wait.time for wait in history((9, "a", "a"), (90, "", ""), (9, "a", "a"))] == [0, 99]


def test_reasons_that_alternate_are_not_lost() -> None:
    (wait,) = history(*[(2, "a", "a"), (2, "b", "b")] * 9)
    assert (wait.time, wait.seconds) == (0.0, 33.0)


def test_the_first_and_the_latest_of_many_are_kept() -> None:
    waits = history(*((9, f"reason {n}", str(n)) for n in range(1000)))
    assert [wait.time for wait in waits] == [0.0, *(9.0 * n for n in range(981, 1000))]
    assert len(history((9, "x" * 10**6, "x"))[0].why) == 300
