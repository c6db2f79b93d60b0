"""GPU time summed up by user, queue, run or day. Pure functions."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from hopsgpu.core import html
from hopsgpu.core.gpu_use import GpuUse, Points, use_between
from hopsgpu.errors import ConfigError
from hopsgpu.units import count_of, parse_duration

Grouping = Literal["user", "queue", "run", "day"]
USER, QUEUE, RUN, DAY = GROUPINGS = ("user", "queue", "run", "day")

SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
# The driver of a lost run ended without recording the end.
LOST = "lost"
# Any state of a run that goes on.
ACTIVE = "active"
# A gang that `hopsgpu.hold` keeps, in the time between its launches: no run.
HELD = "held"

# The fields of a row that say what it is about.
NAMES: Mapping[str, tuple[str, ...]] = {
    USER: ("user",),
    QUEUE: ("queue",),
    RUN: ("run", "user", "queue", "state"),
    DAY: ("day",),
}
# No bound, on the command line.
_ALL = "all"
_DAY_SECONDS = 86_400.0
_HOUR_SECONDS = 3600.0
_NOT_SUCCEEDED = (FAILED, LOST)
_LISTED = 3


def check_grouping(by: object) -> None:
    """Raise ConfigError unless `by` is one of `GROUPINGS`."""
    if by not in GROUPINGS:
        raise ConfigError(f"by={by!r}: must be {', '.join(map(repr, GROUPINGS[:-1]))} or {DAY!r}")


def moment_of(value: object, name: str, now: float) -> float | None:
    """Return a point in time in seconds since the epoch; None for no bound.

    Args:
        value: a duration until now, as `units.parse_duration` reads it; a date, a time, or its ISO
            8601 text, in UTC unless it says otherwise; None or "all" for no bound.
        name: the argument's name, for the error.

    Raises:
        ConfigError: the value has another form.
    """
    if value is None or value == _ALL:
        return None
    try:
        moment = datetime.datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        moment = value
    if isinstance(moment, datetime.date) and not isinstance(moment, datetime.datetime):
        moment = datetime.datetime(moment.year, moment.month, moment.day)
    if isinstance(moment, datetime.datetime):
        zone = moment.tzinfo or datetime.UTC
        return moment.replace(tzinfo=zone).timestamp()
    try:
        seconds = parse_duration(value, name)
    except ConfigError as error:
        raise ConfigError(
            f"{name}={value!r}: must be a duration until now, such as '30d' or '12h', a number of"
            " seconds, a timedelta; a date or time in UTC, such as '2026-11-01' or"
            " '2026-11-01T12:00'; or 'all' or None for no bound"
        ) from error
    return None if seconds is None else now - seconds


@dataclass(frozen=True)
class RunUse:
    """The GPU time of one run.

    Attributes:
        queue: YARN's queue; "" on a local master.
        state: "succeeded", "failed", "cancelled", "lost" or "active"; "held" for a held gang
            between its launches, which is no run.
        points: its GPU seconds over time, at least one point.
    """

    run_id: str
    name: str
    user: str
    queue: str
    state: str
    points: Points

    @property
    def began(self) -> float:
        """Return when the run was requested, in seconds since the epoch."""
        return self.points[0].time

    @property
    def ended(self) -> float:
        """Return when the last of its GPU seconds were recorded, in seconds since the epoch."""
        return self.points[-1].time

    def is_within(self, began: float, ended: float) -> bool:
        """Return whether a part of the run is in the period [began, ended)."""
        return self.began < ended and began <= self.ended


@dataclass(frozen=True)
class UsageRow:
    """The GPU time of one user, queue, run or day.

    Attributes:
        user: the user who submitted the runs; None in rows by queue or day.
        queue: YARN's queue, "" for runs on a local master; None in rows by user or day.
        run: the run's id; None but in rows by run.
        state: the run's state: "succeeded", "failed", "cancelled", "lost", "active", or "held" for
            a held gang between its launches; None but in rows by run.
        day: the day in UTC as "2026-11-22"; None but in rows by day.
        gpu_hours_held: from each executor's arrival at the driver to its release, times its GPUs.
        gpu_hours_training: time in which the function ran in all ranks, or trials of a search ran.
        gpu_hours_publishing: from the return until the model was on the lake.
        gpu_hours_idle: GPU hours held, minus training and publishing.
        gpu_hours_waited: hours until all executors had arrived, times the GPUs without which the
            run could not start. The time begins with the request, or once data and a Python
            environment were prepared. These GPUs were not held for the run, except those of
            executors that arrived before the others.
        failed_share: GPU hours held by runs that failed or were lost, as a share in [0, 1] of
            `gpu_hours_held`; None if none were held.
        runs: number of runs of which a part is in the period.
        runs_failed: how many of them failed.
        runs_cancelled: how many were cancelled.
        runs_lost: how many were lost: their drivers ended without recording it. What they held
            after their last record is unknown and not counted.
        runs_active: how many are running; they are counted until their last record, which is some
            seconds old.
    """

    __module__ = "hopsgpu.types"

    user: str | None = None
    queue: str | None = None
    run: str | None = None
    state: str | None = None
    day: str | None = None
    gpu_hours_held: float = 0.0
    gpu_hours_training: float = 0.0
    gpu_hours_publishing: float = 0.0
    gpu_hours_idle: float = 0.0
    gpu_hours_waited: float = 0.0
    failed_share: float | None = None
    runs: int = 0
    runs_failed: int = 0
    runs_cancelled: int = 0
    runs_lost: int = 0
    runs_active: int = 0


@dataclass(frozen=True, repr=False)
class Usage(Sequence[UsageRow]):
    """The GPU time that runs used in a period: a sequence of rows, which `pandas.DataFrame` takes.

    Attributes:
        rows: the rows; by user, queue or run those with the most GPU hours first, by day in order.
        by: "user", "queue", "run" or "day".
        since: begin of the period in seconds since the epoch; None if it has none.
        until: end of the period in seconds since the epoch.
        total: the sums of all rows.
        problems: one text for each record, and each user's directory, that could not be read; what
            they would add is not in the rows.
        notes: what is incomplete or estimated in the rows, in words.
    """

    __module__ = "hopsgpu.types"

    rows: tuple[UsageRow, ...]
    by: str
    since: float | None
    until: float
    total: UsageRow
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> UsageRow: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[UsageRow, ...]: ...

    def __getitem__(self, index: int | slice) -> UsageRow | tuple[UsageRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def period(self) -> str:
        """Return the period in words."""
        since = "the first run" if self.since is None else _minute(self.since)
        return f"{since} to {_minute(self.until)} UTC"

    def __repr__(self) -> str:
        total, unread = self.total, len(self.problems)
        return (
            f"Usage({count_of(len(self.rows), 'row')} by {self.by}, {self.period}:"
            f" {total.gpu_hours_held:.2f} GPU hours held, {total.gpu_hours_training:.2f} training,"
            f" {total.gpu_hours_idle:.2f} idle, {total.gpu_hours_waited:.2f} waited"
            f"{f'; {unread} not read' if unread else ''})"
        )

    def _repr_html_(self) -> str:
        names = NAMES[self.by]
        titles = ("held", "training", "publishing", "idle", "waited", "failed", "runs")
        return html.box(
            html.title("GPU hours", f"by {self.by}", self.period),
            html.table((*names, *titles), [_cells(row, names) for row in self.rows]),
            *(html.element("div", text) for text in (*self.notes, *self.problems)),
        )


def _cells(row: UsageRow, names: Sequence[str]) -> Sequence[object]:
    return [*(getattr(row, name) for name in names), *numbers_of(row), row.runs]


def numbers_of(row: UsageRow) -> Sequence[str]:
    """Return the hours held, training, publishing, idle and waited, and the failed share, as text.

    Hours have two digits behind the point; those of a short run, under 0.01, have four.
    """
    hours = (
        row.gpu_hours_held,
        row.gpu_hours_training,
        row.gpu_hours_publishing,
        row.gpu_hours_idle,
        row.gpu_hours_waited,
    )
    failed = "-" if row.failed_share is None else f"{row.failed_share:.0%}"
    shown = (f"{h:.2f}" if h >= 0.01 or h < 0.00005 else f"{h:.4f}" for h in hours)
    return [*shown, failed]


def _minute(time: float) -> str:
    return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%d %H:%M")


@dataclass(frozen=True)
class _RunShare:
    run: RunUse
    use: GpuUse


def sum_usage(
    runs: Iterable[RunUse],
    by: str,
    since: float | None,
    until: float,
    problems: Sequence[str] = (),
) -> Usage:
    """Return the GPU time that runs used in the period [since, until), in epoch seconds.

    A run that began before the period, or ended after it, counts with the part within. If its
    record has no point at a border, its GPU seconds are spread evenly between the points beside it.

    Args:
        runs: of several runs with one id, the one that was recorded last counts.
        by: one of `GROUPINGS`.
        problems: why other records could not be read.
    """
    began = float("-inf") if since is None else since
    run_by_id: dict[str, RunUse] = {}
    for run in runs:
        if run.run_id not in run_by_id or run.ended > run_by_id[run.run_id].ended:
            run_by_id[run.run_id] = run
    within = [run for run in run_by_id.values() if run.is_within(began, until)]
    groups: dict[str, list[_RunShare]] = defaultdict(list)
    shares = []
    for run in within:
        shares.append(_RunShare(run, use_between(run.points, began, until)))
        for key, part in _parts(run, by, began, until, shares[-1]):
            groups[key].append(part)
    rows = [_row(parts, **_names(by, key, parts)) for key, parts in sorted(groups.items())]
    if by != DAY:
        rows.sort(key=lambda row: (row.gpu_hours_held, row.gpu_hours_waited), reverse=True)
    return Usage(
        rows=tuple(rows),
        by=by,
        since=since,
        until=until,
        total=_row(shares),
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(_notes(within)),
    )


def _parts(
    run: RunUse, by: str, began: float, ended: float, share: _RunShare
) -> Iterator[tuple[str, _RunShare]]:
    """Yield the part of a run that belongs to each row, with the row's key."""
    if by != DAY:
        yield {USER: run.user, QUEUE: run.queue, RUN: run.run_id}[by], share
        return
    first, last = max(run.began, began), min(run.ended, ended)
    for number in range(int(first // _DAY_SECONDS), int(last // _DAY_SECONDS) + 1):
        midnight = number * _DAY_SECONDS
        if midnight >= ended:
            return
        from_, to = max(midnight, began), min(midnight + _DAY_SECONDS, ended)
        day = datetime.datetime.fromtimestamp(midnight, datetime.UTC).date().isoformat()
        yield day, _RunShare(run, use_between(run.points, from_, to))


def _names(by: str, key: str, parts: Sequence[_RunShare]) -> Mapping[str, str]:
    if by != RUN:
        return {by: key}
    (part,) = parts
    run = part.run
    return {"run": key, "user": run.user, "queue": run.queue, "state": run.state}


def _row(parts: Sequence[_RunShare], **names: str) -> UsageRow:
    use = sum((part.use for part in parts), GpuUse())
    in_vain = sum(part.use.held for part in parts if part.run.state in _NOT_SUCCEEDED)
    states = [part.run.state for part in parts]
    return UsageRow(
        **names,
        gpu_hours_held=use.held / _HOUR_SECONDS,
        gpu_hours_training=use.training / _HOUR_SECONDS,
        gpu_hours_publishing=use.publishing / _HOUR_SECONDS,
        gpu_hours_idle=sum(part.use.idle for part in parts) / _HOUR_SECONDS,
        gpu_hours_waited=use.waited / _HOUR_SECONDS,
        failed_share=in_vain / use.held if use.held else None,
        runs=len(states) - states.count(HELD),
        runs_failed=states.count(FAILED),
        runs_cancelled=states.count(CANCELLED),
        runs_lost=states.count(LOST),
        runs_active=states.count(ACTIVE),
    )


def _notes(runs: Sequence[RunUse]) -> Iterator[str]:
    active = [run.run_id for run in runs if run.state == ACTIVE]
    lost = [run.run_id for run in runs if run.state == LOST]
    if active:
        yield (
            f"{count_of(len(active), 'run')} not ended, counted until the last record, some seconds"
            f" ago: {_some(active)}"
        )
    if lost:
        yield (
            f"{count_of(len(lost), 'run')} lost, counted until the last record of the driver;"
            f" what the cluster held after that is unknown: {_some(lost)}"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"
