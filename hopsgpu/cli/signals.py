"""Signals that would end a command at once, turned into exceptions so that it can clean up."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exit_on_signals(*more: signal.Signals) -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP raise SystemExit with the exit code of a shell.

    Only the first signal counts: the cleanup is bounded in time, and a second signal must not
    interrupt it. An ignored signal, such as SIGHUP under nohup, stays ignored.
    """
    numbers = [n for n in (*_SIGNALS, *more) if signal.getsignal(n) is not signal.SIG_IGN]

    def leave(number: int, _: FrameType | None) -> None:
        for handled in numbers:
            signal.signal(handled, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
