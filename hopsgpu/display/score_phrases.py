"""The phrases about a score that plain lines and live displays share."""

from __future__ import annotations

from collections.abc import Iterable

from hopsgpu.core.gang import GangState
from hopsgpu.core.scores import ScoreStatus
from hopsgpu.display.phrases import (
    ReportSchedule,
    WaitDetails,
    held_executors,
    not_training,
    seconds,
    state,
)
from hopsgpu.units import count_of


def rows(count: int, scored: int) -> str:
    """Return how many rows have been scored; "" while their number is unknown."""
    if scored == count:
        return f"{count:,} row{'s' * (count != 1)}" if count else ""
    return f"{scored:,} of {count:,} rows ({100 * scored // count} %)"


def rate(per_second: float | None) -> str:
    return "" if per_second is None else f"{per_second:,.0f} rows/s"


def time_left(seconds_left: float | None) -> str:
    return "" if seconds_left is None else f"{seconds(seconds_left)} left"


def failed_parts(count: int) -> str:
    return f"{count_of(count, 'part')} left out" if count else ""


def summary(status: ScoreStatus) -> str:
    if GangState(status.state).is_terminal or status.state in ("releasing", "publishing"):
        parts = [f"{status.state}: {rows(status.rows, status.scored)}"]
        parts.append(failed_parts(status.failed))
    elif status.state == "running":
        on = f"on {held_executors(status)}"
        parts = [
            rows(status.rows, status.scored),
            rate(status.rate),
            time_left(status.seconds_left),
            failed_parts(status.failed),
            on,
            status.waiting_for,
        ]
    else:
        executors = held_executors(status) if status.most and status.state == "waiting" else ""
        reasons = "; ".join(part for part in (status.waiting_for, executors) if part)
        return f"{state(status.state)}: {reasons}" if reasons else state(status.state)
    return "; ".join(part for part in parts if part).removesuffix(": ")


class ScoreFormatter:
    """Reports a score in lines: what it waits for, and its state every 10 s."""

    def __init__(self) -> None:
        self._schedule = ReportSchedule()
        self._details = WaitDetails()

    def news(self, status: ScoreStatus, now: float) -> Iterable[str]:
        if not self._schedule.is_due(status.state, status.waiting_for, now):
            return []
        details = self._details.lines(status.waiting_details)
        return [*filter(None, [summary(status), *details, not_training(status)])]

    def label(self, worker: int, host: str) -> str:
        return label(worker, host)


def label(worker: int, host: str) -> str:
    return f"worker {worker} {host}"
