"""The phrases about a run that the notebook's cell and the terminal share."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Protocol

from hopsgpu.core.gang import ENDS, GangState
from hopsgpu.core.gpu_losses import time_not_training
from hopsgpu.core.html import plain_line
from hopsgpu.core.run_values import GpuSeconds, RunStatus, WorldReport
from hopsgpu.core.scores import ScoreStatus
from hopsgpu.core.trials import SearchStatus
from hopsgpu.display.picture import Picture, Plot, RankGpus, Row
from hopsgpu.units import count_of

_GIB = 2**30
_UUID = 12
_MAX_WORLDS = 8
_MAX_VALUE = 160
_REPEAT_SECONDS = 10.0
_MIN_REASON_SECONDS = 1.0
NOT_TRAINING = "GPU time not spent training"


class Attempting(Protocol):
    """A status or a subject that has attempts."""

    @property
    def state(self) -> str: ...

    @property
    def attempt(self) -> int: ...

    @property
    def sizes(self) -> tuple[int, int] | None: ...

    @property
    def worlds(self) -> Sequence[WorldReport]: ...


def phase(status: Attempting) -> str:
    """Return the state, and the attempt or the world."""
    name, which = state(status.state), attempt(status)
    return f"{name} ({which})" if which else name


def attempt(status: Attempting) -> str:
    """Return the number of the attempt, or the present world of an elastic gang; "" for none."""
    if status.sizes is None:
        return f"attempt {status.attempt}" if status.attempt else ""
    if not status.worlds or status.worlds[-1].end or GangState(status.state) in ENDS:
        return ""
    world = status.worlds[-1]
    return f"world {world.generation}: {world.ranks} of {sizes(status.sizes)}"


def sizes(bounds: tuple[int, int]) -> str:
    """Return the smallest and the largest world size of an elastic gang: "2 to 4 ranks"."""
    least, most = bounds
    return f"{least} to {count_of(most, 'rank')}"


def state(name: str) -> str:
    return "starting ranks" if name == GangState.STARTING.value else name


def not_training(status: RunStatus | SearchStatus | ScoreStatus) -> str:
    """Return what most GPU time was lost to, at the end of a run that did not fail; else ""."""
    has_advice = status.state in (GangState.SUCCEEDED.value, GangState.HELD.value)
    lost = time_not_training(status.gpu_seconds) if has_advice else ""
    return f"{NOT_TRAINING}: {lost}" if lost else ""


def held_executors(status: SearchStatus | ScoreStatus) -> str:
    return f"{status.executors} of at most {count_of(status.most, 'executor')}"


def spent_texts(seconds: GpuSeconds) -> list[str]:
    """Return what GPUs did while they were held: GPU seconds by kind, without empty kinds."""
    shown = [f"{kind} {value:.1f}" for kind, value in seconds.kinds().items() if value >= 0.05]
    return [f"held {seconds.held:.1f}", *shown]


def gang(status: RunStatus) -> str:
    """Return how much of the gang is there, and where; "" if that says nothing."""
    if not status.granted_hosts and status.state != "waiting":
        return ""
    hosts = sorted(set(status.granted_hosts))
    more = f" and {len(hosts) - 6} more" if len(hosts) > 6 else ""
    on = f" on {', '.join(hosts[:6])}{more}" if hosts else ""
    if status.sizes is not None:
        missing = status.wanted - status.granted
        asked = f", {missing:,} more asked for" if missing > 0 else ""
        return f"{count_of(status.granted, 'executor')}{on}{asked}"
    return f"{status.granted} of {count_of(status.wanted, 'executor')}{on}"


def seconds(elapsed: float) -> str:
    """Return a duration in the usual form: 12.3 s, 4 min 05 s, 2 h 03 min."""
    if elapsed < 100:
        return f"{elapsed:.1f} s"
    minutes, rest = divmod(round(elapsed), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def world_lines(
    worlds: Sequence[WorldReport], requested: float | None, most: int = _MAX_WORLDS
) -> list[str]:
    """Return a line about each world of an elastic gang; of many worlds, only about the last.

    Args:
        requested: when the run began, in seconds since the epoch.
        most: number of worlds that get a line.
    """
    shown = worlds[-most:]
    before = len(worlds) - len(shown)
    lines = [f"{count_of(before, 'world')} before"] if before else []
    for world in shown:
        cells = world_cells(world, requested)
        number, ranks, begin, end, how, cost, spent = cells
        resize = f"resize {cost}" if cost else ""
        used = f"{spent} GPU seconds" if spent else ""
        parts = [f"{begin} to {end}", resize, used, how]
        text = ", ".join(part for part in parts if part)
        lines.append(f"world {number}: {count_of(int(ranks), 'rank')}, {text}")
    return lines


# Headers of the cells that `world_cells` returns.
WORLD_HEADERS = ("world", "ranks", "from", "to", "ended", "resize", "GPU seconds")


def world_cells(world: WorldReport, requested: float | None) -> tuple[str, ...]:
    """Return the facts about a world, as `WORLD_HEADERS` names them; "" for what is unknown.

    Args:
        requested: when the run began, in seconds since the epoch.
    """
    zero = world.began if requested is None else requested
    why = f": {world.why}" if world.why else ""
    return (
        str(world.generation),
        str(world.ranks),
        seconds(max(world.began - zero, 0.0)),
        "now" if world.ended is None else seconds(max(world.ended - zero, 0.0)),
        f"{world.end}{why}",
        "" if world.resize_seconds is None else seconds(world.resize_seconds),
        f"{world.gpu_seconds:.1f}" if world.gpu_seconds else "",
    )


def value(value: object) -> str:
    """Return a value that a rank returned in one line of bounded length."""
    short = reprlib.Repr()
    short.maxother = short.maxstring = _MAX_VALUE
    return plain_line(" ".join(short.repr(value).split()), _MAX_VALUE)


def metric_summary(plot: Plot) -> str:
    """Return the first rank's first and last value of a metric, and its range over the ranks."""
    first = plot.traces[0][0][1] if plot.traces and plot.traces[0] else plot.value
    change = "" if first == plot.value else f"{first:.4g} → "
    ranks = rank_bounds(plot)
    return f"{change}{plot.value:.4g}{f' ({ranks})' if ranks else ''}"


def plot_bounds(plot: Plot) -> str:
    """Return the lowest and the highest value that is drawn; "" for a single value."""
    values = [value for trace in plot.traces for _, value in trace]
    return f"{min(values):.4g} … {max(values):.4g}" if len(set(values)) > 1 else ""


def rank_bounds(plot: Plot) -> str:
    """Return the lowest and the highest last value of all ranks; "" if these are equal."""
    return "" if plot.least == plot.most else f"ranks {plot.least:.4g} to {plot.most:.4g}"


def scale(plot: Plot) -> tuple[str, str]:
    first, last = plot.steps
    return f"step {first:,g}", f"{last:,g}"


def has_rank_facts(rows: Sequence[Row]) -> bool:
    """Return whether a table of ranks would say more than their number."""
    return any(row.host or row.ended or row.step is not None or row.gpu for row in rows)


def use(gpu: RankGpus | None) -> tuple[str, str]:
    if gpu is None:
        return "", ""
    busy = "" if gpu.utilisation is None else f"{gpu.utilisation:.0%}"
    if gpu.memory_used is None:
        return busy, ""
    of = "" if gpu.memory_total is None else f" of {gpu.memory_total / _GIB:.1f}"
    return busy, f"{gpu.memory_used / _GIB:.1f}{of} GiB"


def uuid(gpu: str) -> str:
    """Return the part of a GPU's UUID that distinguishes it from others."""
    return gpu[:_UUID]


def remaining_ranks(picture: Picture, shown: int) -> str:
    """Return the line about ranks without a row; "" if all have one."""
    omitted = picture.ranks - shown
    if omitted <= 0:
        return ""
    busy = picture.utilisations
    mean = f"; GPU utilisation of all: {sum(busy) / len(busy):.0%} on average" if busy else ""
    return f"and {omitted:,} more {'rank' if omitted == 1 else 'ranks'}{mean}"


def whole_log(run_id: str) -> str:
    """Return where to find lines that are no longer shown."""
    return f"whole logs: hopsgpu logs {run_id}"


class WaitDetails:
    """The details of why a run waits, for the line below the sentence; the same ones once."""

    def __init__(self) -> None:
        self._reported: Sequence[str] = ()

    def lines(self, details: Sequence[str]) -> list[str]:
        is_new, self._reported = details != self._reported, details
        return [f"  {'; '.join(details)}"] if details and is_new else []


class ReportSchedule:
    """Decides when plain lines report a status again.

    A change of the state is reported at once, and an unchanged status every ten seconds. Another
    reason to wait is reported at most once a second, because its numbers change quickly.
    """

    def __init__(self) -> None:
        self._state = ""
        self._reason = ""
        self._reported_at = float("-inf")

    def is_due(self, state: str, reason: str, now: float) -> bool:
        """Return whether to report, which then counts as done.

        Args:
            now: seconds by any clock.
        """
        seconds = now - self._reported_at
        has_reason = reason != self._reason and seconds >= _MIN_REASON_SECONDS
        if state == self._state and not has_reason and seconds < _REPEAT_SECONDS:
            return False
        self._state, self._reason, self._reported_at = state, reason, now
        return True
