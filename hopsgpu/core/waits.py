"""Why a run waited, over time, for its record. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hopsgpu.core.wait_reasons import WaitReason

# Beyond this, only the first and the latest reasons are kept.
_MOST = 20
_LONGEST = 300
_MIN_SECONDS = 5.0
# A run that waits again for the same thing within this time has not stopped waiting for it.
_MAX_GAP_SECONDS = 60.0


@dataclass(frozen=True)
class Wait:
    """A time in which a run waited because something was missing.

    Attributes:
        time: when it began, in seconds since the epoch.
        why: the last sentence about it.
        seconds: how long it lasted.
    """

    time: float
    why: str
    seconds: float = 0.0


@dataclass(frozen=True)
class _Spell:
    """A time with the same lack; `end` is when it was last seen."""

    lack: str
    wait: Wait
    end: float


class WaitHistory:
    """The times in which a run waited; only its caller's clock counts."""

    def __init__(self) -> None:
        self._spells: Sequence[_Spell] = ()

    @property
    def waits(self) -> tuple[Wait, ...]:
        """Return the times that lasted at least five seconds."""
        return tuple(spell.wait for spell in self._spells if spell.wait.seconds >= _MIN_SECONDS)

    def record(self, reason: WaitReason, now: float) -> None:
        """Record why the run waits now, in seconds since the epoch.

        A reason without a lack is not recorded. Reasons with the same lack are merged. What lasted
        less than five seconds counts as a part of what follows at once.
        """
        if not reason.lack:
            return
        spells, began = self._spells, now
        if spells and spells[-1].lack != reason.lack and spells[-1].wait.seconds < _MIN_SECONDS:
            *spells, short = spells
            began = short.wait.time if now - short.end < _MIN_SECONDS else now
        if spells and spells[-1].lack == reason.lack and now - spells[-1].end <= _MAX_GAP_SECONDS:
            *spells, same = spells
            began = same.wait.time
        wait = Wait(began, reason.sentence[:_LONGEST], max(now - began, 0.0))
        spells = [*spells, _Spell(reason.lack, wait, now)]
        self._spells = spells if len(spells) <= _MOST else [spells[0], *spells[2:]]
