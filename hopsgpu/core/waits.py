"""Why a run waited, over time, for its record. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The first and the latest of more are kept: reasons have numbers, which change all the time.
_MOST = 20
_LONGEST = 1000


@dataclass(frozen=True)
class Wait:
    """The reason for which a run waited from a point in time on.

    Attributes:
        time: seconds since the epoch.
        why: what it waited for, in words.
    """

    time: float
    why: str


def add_wait(waits: Sequence[Wait], why: str, now: float) -> tuple[Wait, ...]:
    """Return the reasons with the present one, if that is another than the last.

    Args:
        waits: the reasons so far.
        why: what the run waits for now; "" if it does not wait.
        now: seconds since the epoch.
    """
    reason = why[:_LONGEST]
    if not reason or (waits and waits[-1].why == reason):
        return tuple(waits)
    kept = (*waits, Wait(now, reason))
    return kept if len(kept) <= _MOST else (kept[0], *kept[2:])
