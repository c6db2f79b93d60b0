"""Whether a gang that failed starts again: decided from how its ranks ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from hopsgpu.core.gang import Avoid
from hopsgpu.launcher.failures import Ended, failed_gpus, to_avoid

# What a rank does again in the same way, however often it is started.
_ALWAYS = frozenset({"unpicklable", "too large"})
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_FRAME = re.compile(r'^  File "(?:.*)", line \d+, in .*$', re.MULTILINE)
# YARN's exit codes -102, and -103, -104: Spark's words for them.
_EXCUSED = re.compile(r"preempt|exceeding (physical|virtual) memory|beyond the .* memory", re.I)


class Fault(Enum):
    """Whose fault a failed attempt was, as far as its ends tell.

    INFRASTRUCTURE: an executor, its node or its connection was lost, YARN took it for others, or a
    rank could not be started. RANK: one of the ranks, or too little time. CODE: the same exception
    at the same place in all of several ranks at once, or a value that can never travel.
    """

    INFRASTRUCTURE = "infrastructure"
    RANK = "rank"
    CODE = "code"


def fault_of(first: Ended, ends: Sequence[Ended]) -> Fault:
    """Whose fault it was.

    Args:
        first: the first failure.
        ends: of all workers that have ended, whatever way.
    """
    if first.status in ("not started", "files lost"):
        return Fault.INFRASTRUCTURE
    if first.status in _ALWAYS:
        return Fault.CODE
    if len(ends) < 2 or (to_avoid(first) | failed_gpus(ends)).is_any:
        return Fault.RANK
    # The peers of a rank that fails raise too, of a connection that was closed, say.
    raised = {_raised(end) if end.status == "raised" else None for end in ends}
    return Fault.CODE if len(raised) == 1 and None not in raised else Fault.RANK


def _raised(end: Ended) -> tuple[str, str]:
    """An exception's class and words without numbers, which differ by rank, and its last frame."""
    frames = _FRAME.findall(end.outcome.get("traceback", ""))
    return _NUMBER.sub("#", end.outcome["error"]), frames[-1] if frames else ""


def suspect(host: str, reason: str) -> str | None:
    """The node that may be to blame for the loss of an executor, or None where it is not.

    Args:
        host: its name.
        reason: of the loss, YARN's or Spark's: what was preempted, or used more memory than it
            may, says nothing of the node.
    """
    return None if _EXCUSED.search(reason) else host


def avoid_next(avoid: Avoid, lost: Sequence[str]) -> Avoid:
    """What gets no rank in the next attempt.

    Args:
        avoid: what was to blame until now.
        lost: the suspect of each attempt that ended by the loss of an executor. Once, it may have
            been anyone's fault; a node that loses another is left out.
    """
    twice = frozenset(host for host in lost if lost.count(host) > 1)
    return avoid | Avoid(hosts=twice)


def may_retry(fault: Fault, *, attempt: int, retries: int, code_too: bool) -> bool:
    """Whether another attempt follows.

    Args:
        fault: of the attempt that failed.
        attempt: its number, from 0.
        retries: how many may follow the first.
        code_too: whether errors of the code are tried again as well.
    """
    return attempt < retries and (code_too or fault is not Fault.CODE)
