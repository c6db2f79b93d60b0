"""Whether a gang that failed starts again: decided from how its ranks ended."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from hopsgpu.failures import Ended
from hopsgpu.gang import Avoid

# What a rank does again in the same way, however often it is started.
_ALWAYS = frozenset({"unpicklable", "too large"})


class Fault(Enum):
    """Whose fault a failed attempt was, as far as its ends tell.

    INFRASTRUCTURE: an executor, its node or its connection was lost, YARN took it for others, or a
    rank could not be started. RANK: one of the ranks, or too little time. CODE: the same exception
    in all of several ranks at once, or a value that can never travel.
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
    if first.status == "not started":
        return Fault.INFRASTRUCTURE
    if first.status in _ALWAYS:
        return Fault.CODE
    raised = {_kind(end) for end in ends if end.status == "raised"}
    all_raised = all(end.status == "raised" for end in ends)
    return Fault.CODE if len(ends) > 1 and all_raised and len(raised) == 1 else Fault.RANK


def _kind(end: Ended) -> str:
    """The exception's class."""
    return end.outcome["error"].partition(":")[0]


def avoid_next(avoid: Avoid, lost: Sequence[str]) -> Avoid:
    """What gets no rank in the next attempt.

    Args:
        avoid: what was to blame until now.
        lost: host of the executor whose loss ended an attempt, for each that ended so. Once, it may
            have been anyone's fault; a node that loses another is left out.
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
