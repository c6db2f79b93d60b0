"""The phrases about a run that the notebook's cell and the terminal share."""

from __future__ import annotations

from collections.abc import Sequence

from hopsgpu.core.gang import ENDS, GangState
from hopsgpu.core.run_values import RunStatus, Timeline
from hopsgpu.display.picture import Gpu, Picture, Plot, Row
from hopsgpu.units import counted

_GIB = 2**30
_UUID = 12


def phase(picture: Picture) -> str:
    """Return the state, and the number of the attempt."""
    status = picture.status
    name = state(status.state)
    return f"{name} (attempt {status.attempt})" if status.attempt else name


def state(name: str) -> str:
    """Return a state in words."""
    return "starting ranks" if name == GangState.STARTING.value else name


def phase_durations(timeline: Timeline) -> list[str]:
    """Return the duration of each phase of a run."""
    return [f"{word} {seconds(took)}" for word, took in timeline.phases()]


def detail_lines(status: RunStatus) -> list[str]:
    """Return what goes with the state: the reason to wait, or at the end the phases' durations."""
    if GangState(status.state) in ENDS:
        return phase_durations(status.timeline)
    return [status.waiting_for] if status.waiting_for else []


def gang(status: RunStatus) -> str:
    """Return how much of the gang is there, and where; "" if that says nothing."""
    if not status.granted_hosts and status.state != "waiting":
        return ""
    hosts = sorted(set(status.granted_hosts))
    more = f" and {len(hosts) - 6} more" if len(hosts) > 6 else ""
    on = f" on {', '.join(hosts[:6])}{more}" if hosts else ""
    return f"{status.granted} of {counted(status.wanted, 'executor')}{on}"


def seconds(elapsed: float) -> str:
    """Return a duration in the usual form: 12.3 s, 4 min 05 s, 2 h 03 min."""
    if elapsed < 100:
        return f"{elapsed:.1f} s"
    minutes, rest = divmod(round(elapsed), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def metric_summary(plot: Plot) -> str:
    """Return a metric's last value, and its range over the ranks."""
    if plot.least == plot.most:
        return f"{plot.value:.4g}"
    return f"{plot.value:.4g} ({plot.least:.4g} to {plot.most:.4g})"


def scale(plot: Plot) -> tuple[str, str]:
    """Return a plot's first and last step."""
    first, last = plot.steps
    return f"step {first:,g}", f"{last:,g}"


def table_is_useful(rows: Sequence[Row]) -> bool:
    """Return whether a table of ranks would say more than their number."""
    return any(row.host or row.ended or row.step is not None or row.gpu for row in rows)


def use(gpu: Gpu | None) -> tuple[str, str]:
    """Return the utilisation and memory of a rank's GPUs."""
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
    """Return the line about ranks without a row; "" if all have one.

    Args:
        picture: picture of the run.
        shown: number of ranks with a row.
    """
    left = picture.ranks - shown
    if left <= 0:
        return ""
    busy = picture.utilisations
    mean = f"; GPU utilisation of all: {sum(busy) / len(busy):.0%} on average" if busy else ""
    return f"and {left:,} more {'rank' if left == 1 else 'ranks'}{mean}"


def whole_log(run_id: str) -> str:
    """Return where to find lines that are no longer shown."""
    return f"whole logs: hopsgpu logs {run_id}"
