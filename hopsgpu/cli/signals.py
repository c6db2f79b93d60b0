"""Signals that would end a command at once, made exceptions so that it can put things in order."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_in_order(*more: signal.Signals) -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP raise SystemExit with the exit code of a shell.

    Once: what a command does then is bounded in time, and a second one must not cut it short. A
    signal that is ignored, as SIGHUP under nohup, stays so.

    Args:
        more: signals that do likewise.
    """
    taken = [n for n in (*_SIGNALS, *more) if signal.getsignal(n) is not signal.SIG_IGN]

    def leave(number: int, _: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
