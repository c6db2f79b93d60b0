"""Heartbeats between the ends of a connection: when to send one, and when one is missed."""

from __future__ import annotations

import math
from dataclasses import dataclass

# `spark.hopsgpu.heartbeat`: this long without a heartbeat, and the other end is lost.
HEARTBEAT_SECONDS = 30.0
_BEATS = 3
_SECOND_LOOK = 0.05
_LONGEST_SECOND_LOOK = 1.0


@dataclass(frozen=True)
class HeartbeatState:
    """What one end knows at a check; times are readings of its clock, in seconds.

    Attributes:
        sent: when it last sent something.
        heard: when it last received a byte.
        listening: whether it reads incoming data. While it does not, silence means nothing.
        missed: whether the previous check found the other end silent.
    """

    sent: float
    heard: float
    listening: bool = True
    missed: bool = False


@dataclass(frozen=True)
class HeartbeatCheck:
    """The result of a check.

    Attributes:
        lost: the other end was silent for the whole heartbeat.
        beat: this end should send a heartbeat.
        missed: `HeartbeatState.missed` of the next check.
        again: the clock's reading at which to check again.
    """

    lost: bool
    beat: bool
    missed: bool
    again: float


def check_heartbeat(signs: HeartbeatState, *, heartbeat: float, now: float) -> HeartbeatCheck:
    """Decide whether a heartbeat is due, and whether the other end is lost.

    Each end sends three signs of life in a heartbeat. Two checks must find silence: a process that
    could not run, because user code held the GIL or the process was stopped, finds its timers due
    before it has read what arrived meanwhile.

    Args:
        signs: what this end knows.
        heartbeat: seconds of silence after which the other end counts as lost.
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
    return HeartbeatCheck(missed and signs.missed, beat, missed, min(next_beat, judged))
