"""GPU hours over time as a page shows them. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from hopsgpu.core.usage_report import DAY, NAMES, Usage, UsageRow, numbers_of

_MAX_DAYS = 120
_MAX_ROWS = 200
KINDS = ("training", "publishing", "idle")


@dataclass(frozen=True)
class DayBar:
    """A day.

    Attributes:
        day: "2026-11-22", in UTC.
        parts: GPU hours held of each of `KINDS`.
    """

    day: str
    parts: tuple[float, ...]
    words: str


@dataclass(frozen=True)
class UsageView:
    """GPU hours.

    Attributes:
        days_left_out: number of earlier days.
        most: the most GPU hours of a day.
    """

    period: str
    by: str
    names: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    total: tuple[str, ...]
    left_out: int
    days: tuple[DayBar, ...]
    days_left_out: int
    most: float
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def usage_view(usage: Usage, days: Usage, problems: Sequence[str] = ()) -> UsageView:
    """Return the page of GPU hours.

    Args:
        days: the same, summed up by day.
    """
    names = NAMES[usage.by]
    bars = _bars(days.rows)
    drawn = bars[-_MAX_DAYS:]
    shown = usage.rows if usage.by != DAY else usage.rows[::-1]
    return UsageView(
        period=usage.period,
        by=usage.by,
        names=names,
        rows=tuple(
            (tuple(str(getattr(row, name) or "-") for name in names), _numbers(row))
            for row in shown[:_MAX_ROWS]
        ),
        total=_numbers(usage.total),
        left_out=max(len(shown) - _MAX_ROWS, 0),
        days=tuple(drawn),
        days_left_out=len(bars) - len(drawn),
        most=max((sum(bar.parts) for bar in drawn), default=0.0),
        notes=usage.notes,
        problems=(*problems, *usage.problems),
    )


def _bars(rows: Sequence[UsageRow]) -> list[DayBar]:
    """Return all days from the first to the last, those without a run too."""
    if not rows:
        return []
    row_by_day = {str(row.day): row for row in rows}
    first, last = (datetime.date.fromisoformat(str(rows[at].day)) for at in (0, -1))
    count = (last - first).days + 1
    days = [(first + datetime.timedelta(days=n)).isoformat() for n in range(count)]
    return [_bar(row_by_day.get(day, UsageRow(day=day))) for day in days]


def _bar(row: UsageRow) -> DayBar:
    parts = (row.gpu_hours_training, row.gpu_hours_publishing, row.gpu_hours_idle)
    held = sum(parts)
    text = ", ".join(f"{name} {hours:.2f}" for name, hours in zip(KINDS, parts, strict=True))
    return DayBar(str(row.day), parts, f"{row.day}: {held:.2f} GPU hours held ({text})")


def _numbers(row: UsageRow) -> tuple[str, ...]:
    return (*numbers_of(row), str(row.runs))
