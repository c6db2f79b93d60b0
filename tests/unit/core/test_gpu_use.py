"""The GPU time of a run: its points, periods, and runs of which only sums are known."""

from __future__ import annotations

import pytest

from hopsgpu.core.gpu_use import GpuUse, UsePoint, add_point, use_between
from hopsgpu.core.run_values import GpuSeconds


def test_points_on_a_line_are_left_out() -> None:
    """Ten hours of one rate, then ten of another, recorded every ten seconds."""
    points: tuple[UsePoint, ...] = (UsePoint(0.0),)
    for time in range(10, 72_001, 10):
        held = 4.0 * time if time <= 36_000 else 4.0 * 36_000 + 1.0 * (time - 36_000)
        points = add_point(points, GpuSeconds(held), 0.0, float(time))
    assert [point.time for point in points] == [0.0, 36_000.0, 72_000.0]
    assert use_between(points, 35_000.0, 37_000.0) == GpuUse(4_000.0 + 1_000.0)


def test_a_run_that_changes_all_the_time_has_a_bounded_number_of_points() -> None:
    points: tuple[UsePoint, ...] = (UsePoint(0.0),)
    held = 0.0
    for number in range(1, 5001):
        held += 10.0 * (number % 7)
        points = add_point(points, GpuSeconds(held), 0.0, number * 10.0)
    assert len(points) <= 100
    assert points[0].time == 0.0 and (points[-1].time, points[-1].held) == (50_000.0, held)


def test_a_clock_that_is_set_back_puts_no_point_out_of_order() -> None:
    points = add_point((UsePoint(100.0),), GpuSeconds(1.0), 0.0, 50.0)
    assert [point.time for point in points] == [100.0, 100.0]
    assert use_between(points, 0.0, 100.0) == GpuUse()
    assert use_between(points, 100.0, 101.0).held == 1.0


def test_periods_add_up() -> None:
    points = (UsePoint(0.0), UsePoint(10.0, 40.0, waited=5.0), UsePoint(30.0, 60.0, 8.0))
    whole = use_between(points, float("-inf"), float("inf"))
    assert whole == GpuUse(60.0, 8.0, 0.0, 0.0)
    borders = [-5.0, 0.0, 3.0, 10.0, 17.0, 30.0, 99.0]
    parts = [use_between(points, a, b) for a, b in zip(borders, borders[1:], strict=False)]
    assert sum(part.held for part in parts) == pytest.approx(60.0)
    assert parts[1].held == pytest.approx(12.0)
    assert parts[3].held == pytest.approx(7.0)
    assert parts[3].training == pytest.approx(2.8)
    assert use_between(points, 30.0, 40.0) == use_between(points, -9.0, 0.0) == GpuUse()


def test_idle_is_what_is_left() -> None:
    assert GpuUse(10.0, 6.0, 1.0, 99.0).idle == 3.0
    assert GpuUse(10.0, 12.0).idle == 0.0
