"""Decides how long `up` waits: as long as the daemons make progress."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Without progress for this time, `up` gives up.
STALL_SECONDS = 120.0
# Idle daemons use CPU time too, a small cluster's a few seconds in STALL_SECONDS.
MIN_CPU_SECONDS = 10.0
_FIRST_REPORT_SECONDS, _REPORT_SECONDS = 5.0, 30.0
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.1, 1.0


@dataclass(frozen=True)
class Signs:
    """The signs of daemons' progress until one moment.

    Attributes:
        line_kinds: number of log lines that differ in more than digits: a daemon that only retries
            logs no new kind.
        ports: number of ports on which daemons listen.
        cpu_seconds: CPU time of the daemons and of their ended children.
    """

    line_kinds: int
    ports: int
    cpu_seconds: float


@dataclass(frozen=True)
class StartupProgress:
    """How far a wait has come. Times are a monotonic clock's, in seconds.

    Attributes:
        began: start of the whole `up`.
        progressed: last progress.
        signs: the signs at that time.
        reported: last report to the user; at first the start of the wait.
        reported_unmet: the condition of the last report.
    """

    began: float
    progressed: float
    signs: Signs
    reported: float
    reported_unmet: str = ""


@dataclass(frozen=True)
class WaitDecision:
    """Either the wait ends with a failure, or it continues, with or without a report."""

    progress: StartupProgress
    failure: str = ""
    report: str = ""


def decide_wait(
    before: StartupProgress, signs: Signs, unmet: str, now: float, deadline: float = math.inf
) -> WaitDecision:
    """Decide whether to wait longer.

    Args:
        unmet: the condition that is not met yet, as it continues "waiting for".
        deadline: end of the time that the user gives to the whole `up`.
    """
    progress = _with_progress(before, signs, now)
    seconds, idle = now - progress.began, now - progress.progressed
    if now >= deadline:
        failure = f"not ready within {deadline - progress.began:.0f} s, still waiting for {unmet}"
        return WaitDecision(progress, failure=failure)
    if idle >= STALL_SECONDS:
        failure = (
            f"not ready after {seconds:.0f} s, still waiting for {unmet}; in the last {idle:.0f} s"
            " no daemon logged anything new, opened a port, or computed much"
        )
        return WaitDecision(progress, failure=failure)
    since_report = now - progress.reported
    is_new = unmet != progress.reported_unmet
    if since_report < (_FIRST_REPORT_SECONDS if is_new else _REPORT_SECONDS):
        return WaitDecision(progress)
    no_progress = f" (no progress for {idle:.0f} s)" if idle >= _REPORT_SECONDS else ""
    return WaitDecision(
        StartupProgress(progress.began, progress.progressed, progress.signs, now, unmet),
        report=f"after {seconds:.0f} s: waiting for {unmet}{no_progress}",
    )


def _with_progress(before: StartupProgress, signs: Signs, now: float) -> StartupProgress:
    last = before.signs
    if (
        signs.line_kinds > last.line_kinds
        or signs.ports > last.ports
        or signs.cpu_seconds >= last.cpu_seconds + MIN_CPU_SECONDS
    ):
        return StartupProgress(before.began, now, signs, before.reported, before.reported_unmet)
    return before


def poll_seconds(waited: float) -> float:
    """Return the time until the next poll: each poll takes CPU time from slow daemons."""
    return min(_MAX_POLL_SECONDS, max(_MIN_POLL_SECONDS, waited / 60))
