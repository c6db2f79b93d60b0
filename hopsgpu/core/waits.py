"""Why a run waited, over time, for its record. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Beyond this, only the first and the latest reasons are kept: their numbers change often.
_MOST = 20
_LONGEST = 1000


@dataclass(frozen=True)
class Wait:
    """The reason for which a run waited, in words, from `time` on, in seconds since the epoch."""

    time: float
    why: str


def add_wait(waits: Sequence[Wait], why: str, now: float) -> tuple[Wait, ...]:
    """Return the reasons with the present one, if it differs from the last and is not ""."""
    reason = why[:_LONGEST]
    if not reason or (waits and waits[-1].why == reason):
        return tuple(waits)
    kept = (*waits, Wait(now, reason))
    return kept if len(kept) <= _MOST else (kept[0], *kept[2:])
