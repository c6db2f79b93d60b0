"""The decision whether a failed gang starts again, from how its ranks ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from hopsgpu.attempts.failures import EndedRank, failed_gpus, to_avoid
from hopsgpu.core.gang import Exclusions

# Statuses that a rank reaches again, however often it is started.
_ALWAYS = frozenset({"unpicklable", "too large"})
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_FRAME = re.compile(r'^  File "(?:.*)", line \d+, in .*$', re.MULTILINE)
# Spark's messages for YARN's exit codes -102 (preempted), and -103 and -104 (memory exceeded).
_PREEMPTED = re.compile(r"was preempted", re.I)
_MEMORY = re.compile(r"exceeding (physical|virtual) memory|beyond the .* memory", re.I)


class Fault(Enum):
    """Whose fault a failed attempt was, as far as the ends of its ranks show.

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


def fault_of(first: EndedRank, ends: Sequence[EndedRank]) -> Fault:
    """Return whose fault a failure was.

    Args:
        first: the first failure.
        ends: the ends of all workers that have ended, in whatever way.
    """
    if first.status in ("not started", "files lost"):
        return Fault.INFRASTRUCTURE
    if first.status in _ALWAYS:
        return Fault.CODE
    if len(ends) < 2 or (to_avoid(first) | failed_gpus(ends)).is_any:
        return Fault.RANK
    # When one rank fails, its peers raise as well (of a closed connection, say): other exceptions.
    raised = {_raised(end) if end.status == "raised" else None for end in ends}
    return Fault.CODE if len(raised) == 1 and None not in raised else Fault.RANK


def _raised(end: EndedRank) -> tuple[str, str]:
    """Return an exception's text, without numbers (which differ by rank), and its last frame."""
    frames = _FRAME.findall(end.outcome.get("traceback", ""))
    return _NUMBER.sub("#", end.outcome["error"]), frames[-1] if frames else ""


def suspect(host: str, reason: str) -> str | None:
    """Return the node that may be to blame for the loss of an executor, or None if none is.

    Args:
        host: name of the executor's node.
        reason: the reason that YARN or Spark gives. The node is not to blame if the executor was
            preempted, or used more memory than it may.
    """
    return None if was_preempted(reason) or exceeded_memory(reason) else host


def was_preempted(reason: str) -> bool:
    """Return whether YARN took an executor for a queue that has a right to it.

    Args:
        reason: the reason that YARN or Spark gives for its loss.
    """
    return _PREEMPTED.search(reason) is not None


def exceeded_memory(reason: str) -> bool:
    """Return whether YARN ended an executor because it used more memory than it may.

    Args:
        reason: the reason that YARN or Spark gives for its loss.
    """
    return _MEMORY.search(reason) is not None


def avoid_next(avoid: Exclusions, lost: Sequence[str]) -> Exclusions:
    """Return the nodes and GPUs that get no rank in the next attempt.

    Args:
        avoid: the nodes and GPUs that were to blame until now.
        lost: the suspect of each attempt so far that has one. A single loss may have any cause;
            a node that is the suspect twice is avoided.
    """
    twice = frozenset(host for host in lost if lost.count(host) > 1)
    return avoid | Exclusions(hosts=twice)


def may_retry(fault: Fault, *, retried: int, retries: int, code_too: bool) -> bool:
    """Return whether another attempt follows.

    Args:
        fault: the fault of the failed attempt.
        retried: how many attempts have failed and were retried before.
        retries: how many attempts may follow the first.
        code_too: whether errors of the code are also retried.
    """
    if fault is Fault.IDLE:
        return False
    return retried < retries and (code_too or fault is not Fault.CODE)
