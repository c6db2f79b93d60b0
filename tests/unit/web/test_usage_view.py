"""GPU hours by day, and the marks of the plot's axes."""

from __future__ import annotations

import datetime

import pytest

from hopsgpu.core.usage_report import DAY, USER, Usage, UsageRow
from hopsgpu.web.usage_view import UsageView, usage_view

FIRST = datetime.date(2026, 11, 20)


def view_of(days: int, hours: float = 3.0) -> UsageView:
    rows = tuple(
        UsageRow(day=(FIRST + datetime.timedelta(days=n)).isoformat(), gpu_hours_training=hours)
        for n in (0, days - 1)
    )
    total = UsageRow()
    return usage_view(Usage((), USER, None, 0.0, total), Usage(rows, DAY, None, 0.0, total))


@pytest.mark.parametrize(("days", "marks"), [(1, 1), (3, 3), (12, 6), (30, 5), (115, 5)])
def test_a_few_days_have_their_dates(days: int, marks: int) -> None:
    view = view_of(days)
    assert (len(view.dates), view.dates[-1][0]) == (marks, days - 1)
    for number, words in view.dates:
        day = datetime.date.fromisoformat(view.days[number].day)
        assert words == f"{day:%b} {day.day}"


@pytest.mark.parametrize(
    ("most", "top"),
    [(0.0, 1.0), (0.0025, 0.003), (1.0, 1.0), (85.0, 100.0), (51.0, 60.0), (2e4, 2e4)],
)
def test_the_hours_have_round_marks(most: float, top: float) -> None:
    view = view_of(3, most)
    assert view.top == pytest.approx(top) and view.most == most
    assert [words for _, words in view.levels] == [f"{top / 2:g} h", f"{top:g} h"]


def test_few_days_have_bars_of_a_usual_width() -> None:
    assert (view_of(3).slots, view_of(100).slots) == (14, 100)
