"""The phrases about a score that plain lines and live displays share."""

from __future__ import annotations

from collections.abc import Iterable

from hopsgpu.core.gang import GangState
from hopsgpu.core.scores import ScoreStatus
from hopsgpu.display.phrases import ReportSchedule, loss, seconds, state
from hopsgpu.units import count_of


def rows(status: ScoreStatus) -> str:
    """Return how many rows have been scored."""
    if not status.rows:
        return ""
    if status.scored == status.rows:
        return f"{status.rows:,} row{'s' * (status.rows != 1)}"
    share = 100 * status.scored // status.rows
    return f"{status.scored:,} of {status.rows:,} rows ({share} %)"


def rate(status: ScoreStatus) -> str:
    """Return how fast the score goes; "" while that is unknown."""
    return "" if status.rate is None else f"{status.rate:,.0f} rows/s"


def time_left(status: ScoreStatus) -> str:
    """Return how long the score will last; "" while that is unknown."""
    return "" if status.seconds_left is None else f"{seconds(status.seconds_left)} left"


def held_executors(status: ScoreStatus) -> str:
    """Return how many of the allowed executors are here."""
    return f"{status.executors} of at most {count_of(status.most, 'executor')}"


def failed_parts(status: ScoreStatus) -> str:
    """Return how many parts were left out; "" for none."""
    return f"{count_of(status.failed, 'part')} left out" if status.failed else ""


def summary(status: ScoreStatus) -> str:
    """Return the state of a score in one line."""
    if GangState(status.state).is_terminal or status.state in ("releasing", "publishing"):
        parts = [f"{status.state}: {rows(status)}", failed_parts(status)]
    elif status.state == "running":
        on = f"on {held_executors(status)}"
        parts = [
            rows(status),
            rate(status),
            time_left(status),
            failed_parts(status),
            on,
            status.waiting_for,
        ]
    else:
        executors = held_executors(status) if status.most and status.state == "waiting" else ""
        reasons = "; ".join(part for part in (executors, status.waiting_for) if part)
        return f"{state(status.state)}: {reasons}" if reasons else state(status.state)
    return "; ".join(part for part in parts if part).removesuffix(": ")


class ScoreFormatter:
    """Reports a score in lines: what it waits for, and its state every 10 s."""

    def __init__(self) -> None:
        self._schedule = ReportSchedule()

    def news(self, status: ScoreStatus, now: float) -> Iterable[str]:
        if not self._schedule.is_due(status.state, status.waiting_for, now):
            return []
        return [*filter(None, [summary(status), loss(status)])]

    def label(self, worker: int, host: str) -> str:
        return label(worker, host)


def label(worker: int, host: str) -> str:
    """Return the label of a line's writer."""
    return f"worker {worker} {host}"
