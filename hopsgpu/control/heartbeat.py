"""Signs of life between the ends of a connection: when to give one, and when one is missed."""

from __future__ import annotations

import math
from dataclasses import dataclass

# `spark.hopsgpu.heartbeat`: this long without a sign of life, and the other end is lost.
HEARTBEAT_SECONDS = 30.0
_BEATS = 3
_SECOND_LOOK = 0.05
_LONGEST_SECOND_LOOK = 1.0


@dataclass(frozen=True)
class Signs:
    """What one end knows at a look; times are readings of its clock, in seconds.

    Attributes:
        sent: when it last sent something.
        heard: when it last received a byte.
        listening: whether it takes what comes. While it chose not to, silence says nothing.
        missed: whether the look before this one found the other end silent.
    """

    sent: float
    heard: float
    listening: bool = True
    missed: bool = False


@dataclass(frozen=True)
class Look:
    """What follows from a look.

    Attributes:
        lost: the other end gave no sign of life for the whole heartbeat.
        beat: a sign of life of this end is due.
        missed: what the next look gets as `Signs.missed`.
        again: the clock's reading at which to look again.
    """

    lost: bool
    beat: bool
    missed: bool
    again: float


def look(signs: Signs, *, heartbeat: float, now: float) -> Look:
    """Return whether a sign of life is due, and whether the other end is lost.

    Each end gives three signs in a heartbeat. Silence must be seen at two looks: a process that
    could not run, because user code held the GIL or it was stopped, finds its timers due before
    it has read what came meanwhile.

    Args:
        signs: what is known.
        heartbeat: seconds of silence after which the other end is lost.
        now: the clock's reading.
    """
    between = heartbeat / _BEATS
    beat = now - signs.sent >= between
    next_beat = (now if beat else signs.sent) + between
    missed = signs.listening and now - signs.heard >= heartbeat
    if missed:
        judged = now + min(heartbeat * _SECOND_LOOK, _LONGEST_SECOND_LOOK)
    else:
        judged = signs.heard + heartbeat if signs.listening else math.inf
    return Look(missed and signs.missed, beat, missed, min(next_beat, judged))
