"""What cell and terminal say in the same words."""

from __future__ import annotations

from hopsgpu.display.picture import Gpu, Picture, Plot
from hopsgpu.results import RunStatus
from hopsgpu.units import counted

_GIB = 2**30


def phase(picture: Picture) -> str:
    """The state, and which attempt it is."""
    status = picture.status
    return f"{status.state} (attempt {status.attempt})" if status.attempt else status.state


def gang(status: RunStatus) -> str:
    """How much of the gang is there, and where; "" where that says nothing."""
    if not status.granted_hosts and status.state != "waiting":
        return ""
    hosts = sorted(set(status.granted_hosts))
    more = f" and {len(hosts) - 6} more" if len(hosts) > 6 else ""
    on = f" on {', '.join(hosts[:6])}{more}" if hosts else ""
    return f"{status.granted} of {counted(status.wanted, 'executor')}{on}"


def seconds(elapsed: float) -> str:
    """As people say it: 12.3 s, 4 min 05 s, 2 h 03 min."""
    if elapsed < 100:
        return f"{elapsed:.1f} s"
    minutes, rest = divmod(round(elapsed), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def measured(plot: Plot) -> str:
    """A metric's last value, and its range over the ranks."""
    if plot.least == plot.most:
        return f"{plot.value:.4g}"
    return f"{plot.value:.4g} ({plot.least:.4g} to {plot.most:.4g})"


def use(gpu: Gpu | None) -> tuple[str, str]:
    """Utilisation and memory of a rank's GPUs."""
    if gpu is None:
        return "", ""
    busy = "" if gpu.utilisation is None else f"{gpu.utilisation:.0%}"
    if gpu.memory_used is None:
        return busy, ""
    of = "" if gpu.memory_total is None else f" of {gpu.memory_total / _GIB:.1f}"
    return busy, f"{gpu.memory_used / _GIB:.1f}{of} GiB"


def others(picture: Picture) -> str:
    """What is said of ranks without a row; "" without any."""
    left = picture.ranks - len(picture.rows)
    if left <= 0:
        return ""
    busy = picture.utilisations
    mean = f"; GPU utilisation of all: {sum(busy) / len(busy):.0%} on average" if busy else ""
    return f"and {left:,} more {'rank' if left == 1 else 'ranks'}{mean}"


def whole_log(run_id: str) -> str:
    """Where lines are that are shown no more."""
    return f"whole logs: hopsgpu logs {run_id}"
