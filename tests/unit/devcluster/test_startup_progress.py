"""How long `up` waits, and what it reports meanwhile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hopsgpu.devcluster.startup_progress import (
    MIN_CPU_SECONDS,
    STALL_SECONDS,
    Signs,
    StartupProgress,
    decide_wait,
    poll_seconds,
)

SIGNS = Signs(line_kinds=10, ports=2, cpu_seconds=5.0)
# The `up` began at 1000, and this wait at 1010.
BEGUN = StartupProgress(began=1000.0, progressed=1010.0, signs=SIGNS, reported=1010.0)
UNMET = "node2 to register"


@pytest.mark.parametrize(
    ("signs", "is_progress"),
    [
        (SIGNS, False),
        (replace(SIGNS, line_kinds=11), True),
        (replace(SIGNS, ports=3), True),
        (replace(SIGNS, cpu_seconds=5.0 + MIN_CPU_SECONDS), True),
        # Idle daemons compute a little.
        (replace(SIGNS, cpu_seconds=5.0 + MIN_CPU_SECONDS / 2), False),
    ],
)
def test_each_sign_of_progress_prolongs_the_wait(signs: Signs, is_progress: bool) -> None:
    late = BEGUN.progressed + STALL_SECONDS
    decision = decide_wait(BEGUN, signs, UNMET, late)
    assert bool(decision.failure) is not is_progress
    assert decision.progress.progressed == (late if is_progress else BEGUN.progressed)


def test_a_wait_with_progress_has_no_end() -> None:
    progress, now = BEGUN, BEGUN.progressed
    for number in range(1, 1000):
        now += STALL_SECONDS - 1
        decision = decide_wait(progress, replace(SIGNS, line_kinds=10 + number), UNMET, now)
        assert not decision.failure
        progress = decision.progress


def test_slow_computing_adds_up() -> None:
    """CPU time counts since the last progress, not since the last poll."""
    progress, cpu = BEGUN, SIGNS.cpu_seconds
    for second in range(1, 1000):
        cpu += 2 * MIN_CPU_SECONDS / STALL_SECONDS
        now = BEGUN.progressed + second
        decision = decide_wait(progress, replace(SIGNS, cpu_seconds=cpu), UNMET, now)
        assert not decision.failure
        progress = decision.progress


def test_the_failures_name_the_condition_and_the_time() -> None:
    stalled = decide_wait(BEGUN, SIGNS, UNMET, 1010.0 + STALL_SECONDS).failure
    assert f"after {10 + STALL_SECONDS:.0f} s" in stalled and UNMET in stalled
    more = replace(SIGNS, line_kinds=11)
    late = decide_wait(BEGUN, more, UNMET, 1060.0, deadline=1060.0).failure
    assert "within 60 s" in late and UNMET in late
    assert not decide_wait(BEGUN, more, UNMET, 1059.9, deadline=1060.0).failure


def reports(*polls: tuple[float, str, int]) -> list[str]:
    progress, found = BEGUN, []
    for now, unmet, line_kinds in polls:
        decision = decide_wait(
            progress, replace(SIGNS, line_kinds=line_kinds), unmet, now, math.inf
        )
        progress = decision.progress
        found.append(decision.report)
    return found


def test_a_quick_start_is_silent() -> None:
    assert reports((1011, "a", 11), (1013, "b", 12), (1014.9, "c", 13)) == ["", "", ""]


def test_each_condition_is_reported_and_a_long_wait_again() -> None:
    polls = [(1016.0, "a", 11), (1020.0, "a", 12), (1021.5, "b", 13), (1022.0, "c", 14)]
    assert reports(*polls) == ["after 16 s: waiting for a", "", "after 22 s: waiting for b", ""]
    first, between, again = reports((1016.0, "a", 10), (1045.9, "a", 10), (1046.0, "a", 10))
    assert first and not between
    assert again == "after 46 s: waiting for a (no progress for 36 s)"


def test_polls_become_rare() -> None:
    """Each poll costs CPU time of daemons that lack it."""
    waits = [poll_seconds(waited) for waited in (0.0, 5.0, 30.0, 1000.0)]
    assert waits == [0.1, 0.1, 0.5, 1.0]
