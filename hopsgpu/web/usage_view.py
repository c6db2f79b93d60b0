"""GPU hours over time as a page shows them. Pure."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hopsgpu.core.usage_report import DAY, NAMES, Usage, UsageRow, numbers_of

_MAX_DAYS = 120
_MAX_ROWS = 200
KINDS = ("training", "publishing", "idle")
# Bars are no wider than for so many days, and so many dates fit below them on 400 pixels.
_MIN_SLOTS = 14
_MAX_DATES = 6
_STEPS = (1, 2, 7, 14, 28)
_ROUND = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)


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
        slots: number of bars for which the plot has room.
        top: GPU hours at the upper end of the plot.
        dates: marks of the axis: numbers of days from 0, with dates such as "Nov 22".
        levels: marks of the other axis: shares of `top` with GPU hours.
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
    slots: int
    top: float
    dates: tuple[tuple[int, str], ...]
    levels: tuple[tuple[float, str], ...]
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
    most = max((sum(bar.parts) for bar in drawn), default=0.0)
    top = _round_up(most)
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
        most=most,
        slots=max(len(drawn), _MIN_SLOTS),
        top=top,
        dates=tuple(_dates([bar.day for bar in drawn])),
        levels=tuple((share, f"{share * top:g} h") for share in (0.5, 1.0)),
        notes=usage.notes,
        problems=(*problems, *usage.problems),
    )


def _round_up(hours: float) -> float:
    """Return a round number of at least so many hours."""
    if hours <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(hours))
    return next(step * unit for step in _ROUND if step * unit >= hours * (1 - 1e-9))


def _dates(days: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield some days, the last among them, with equal distances."""
    step = next((n for n in _STEPS if len(days) <= n * _MAX_DATES), -(-len(days) // _MAX_DATES))
    for number in range((len(days) - 1) % step, len(days), step):
        yield number, f"{datetime.date.fromisoformat(days[number]):%b %-d}"


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
