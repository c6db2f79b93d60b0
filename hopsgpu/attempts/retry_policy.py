"""The decision whether a failed gang starts again, from how its ranks ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from hopsgpu.attempts.failures import RankExit, exclusions_after, failed_gpus
from hopsgpu.core.gang import Exclusions

# Statuses that no retry can change.
_ALWAYS = frozenset({"unpicklable", "too large"})
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_FRAME = re.compile(r'^  File "(?:.*)", line \d+, in .*$', re.MULTILINE)
# Spark's messages for YARN's exit codes -102 (preempted), and -103 and -104 (memory exceeded).
_PREEMPTED = re.compile(r"was preempted|Kueue (preempted|evicted) the gang", re.I)
_MEMORY = re.compile(r"exceeding (physical|virtual) memory|beyond the .* memory", re.I)


class FailureCause(Enum):
    """The cause of a failed attempt, as far as the exits of its ranks show.

    INFRASTRUCTURE: an executor, its node or its connection was lost, YARN preempted it, or a rank
    could not be started or lost its files. RANK: one of the ranks failed, or the time was too
    short. CODE: all of several ranks raised the same exception at the same place at once, or a
    value can never be sent to the driver. IDLE: the function left the GPUs idle, which
    `gpu_idle_timeout` ends for good.
    """

    INFRASTRUCTURE = "infrastructure"
    RANK = "rank"
    CODE = "code"
    IDLE = "idle"


def failure_cause(first: RankExit, ends: Sequence[RankExit]) -> FailureCause:
    """Return the cause of a failure.

    Args:
        ends: the ends of all workers that have ended, in whatever way.
    """
    if first.status in ("not started", "files lost"):
        return FailureCause.INFRASTRUCTURE
    if first.status in _ALWAYS:
        return FailureCause.CODE
    if len(ends) < 2 or (exclusions_after(first) | failed_gpus(ends)).is_any:
        return FailureCause.RANK
    # When one rank fails, its peers raise as well (of a closed connection, say): other exceptions.
    raised = {_exception_key(end) if end.status == "raised" else None for end in ends}
    return FailureCause.CODE if len(raised) == 1 and None not in raised else FailureCause.RANK


def _exception_key(end: RankExit) -> tuple[str, str]:
    """Return an exception's text, without numbers (which differ by rank), and its last frame."""
    frames = _FRAME.findall(end.outcome.get("traceback", ""))
    return _NUMBER.sub("#", end.outcome["error"]), frames[-1] if frames else ""


def suspect_host(host: str, reason: str) -> str | None:
    """Return the node that may be to blame for the loss of an executor, or None if none is.

    Args:
        reason: the reason that YARN or Spark gives. The node is not to blame if the executor was
            preempted, or used more memory than it may.
    """
    return None if was_preempted(reason) or has_exceeded_memory(reason) else host


def was_preempted(reason: str) -> bool:
    """Return whether YARN took an executor for a queue that has a right to it."""
    return _PREEMPTED.search(reason) is not None


def has_exceeded_memory(reason: str) -> bool:
    """Return whether YARN ended an executor because it used more memory than it may."""
    return _MEMORY.search(reason) is not None


def next_exclusions(avoid: Exclusions, lost: Sequence[str]) -> Exclusions:
    """Return the nodes and GPUs that get no rank in the next attempt.

    Args:
        lost: the suspect of each attempt so far that has one. A single loss may have any cause;
            a node that is the suspect twice is avoided.
    """
    twice = frozenset(host for host in lost if lost.count(host) > 1)
    return avoid | Exclusions(hosts=twice)


def should_retry(
    cause: FailureCause, *, retried: int, retries: int, retry_user_errors: bool
) -> bool:
    """Return whether another attempt follows.

    Args:
        retried: how many attempts have failed and were retried before.
        retries: how many attempts may follow the first.
    """
    if cause is FailureCause.IDLE:
        return False
    return retried < retries and (retry_user_errors or cause is not FailureCause.CODE)
