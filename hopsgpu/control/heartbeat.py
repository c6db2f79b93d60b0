"""Heartbeats between the ends of a connection: when to send them, and when the peer is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

# `spark.hopsgpu.heartbeat`: seconds without data after which the other end is lost.
HEARTBEAT_SECONDS = 30.0
_SENDS_PER_HEARTBEAT = 3
# The pause before a second check, as a part of the heartbeat.
_CONFIRM = 0.05
_MAX_CONFIRM_SECONDS = 1.0


@dataclass(frozen=True)
class HeartbeatState:
    """The state of one end at a check; times are seconds of its clock.

    Attributes:
        sent_at, received_at: time at which this end last sent or received data.
        is_reading: whether this end reads incoming data; if not, silence means nothing.
        has_missed: whether the previous check found the other end silent.
    """

    sent_at: float
    received_at: float
    is_reading: bool = True
    has_missed: bool = False


@dataclass(frozen=True)
class HeartbeatCheck:
    """The result of a check.

    Attributes:
        is_lost: whether the connection to the other end is lost.
        has_missed: `HeartbeatState.has_missed` of the next check.
        next_check: time of the next check.
    """

    is_lost: bool
    should_send: bool
    has_missed: bool
    next_check: float


def check_heartbeat(state: HeartbeatState, *, heartbeat: float, now: float) -> HeartbeatCheck:
    """Decide whether to send a heartbeat, and whether the other end is lost.

    Each end sends three times in a heartbeat. Two checks must find silence: after a pause (SIGSTOP,
    or user code that held the GIL), a process handles its timers before it reads what arrived.
    """
    interval = heartbeat / _SENDS_PER_HEARTBEAT
    should_send = now - state.sent_at >= interval
    next_send = (now if should_send else state.sent_at) + interval
    has_missed = state.is_reading and now - state.received_at >= heartbeat
    if has_missed:
        next_decision = now + min(heartbeat * _CONFIRM, _MAX_CONFIRM_SECONDS)
    else:
        next_decision = state.received_at + heartbeat if state.is_reading else math.inf
    is_lost = has_missed and state.has_missed
    return HeartbeatCheck(is_lost, should_send, has_missed, min(next_send, next_decision))
