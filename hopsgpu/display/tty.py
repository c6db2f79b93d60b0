"""A terminal as a file that rich can draw on and that nobody need wait for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TextIO

from hopsgpu.display.nonblocking import wait_for_room

_LOOK_SECONDS = 0.1


class Tty:
    """The terminal of a stream, by a descriptor of its own.

    Python waits for a stream's lock when it ends, so nothing that a terminal keeps waiting (Ctrl-S)
    may be in that one's. A write waits here until the terminal takes it or it is given up. Nothing
    is written, and nobody waits, before the first `release`; once closed it is the stream again.

    Args:
        stream: of a terminal, as stdout.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding
        self._held: list[str] = []
        self._is_released = False
        self._until = float("inf")
        # A descriptor's number is used again once it is closed.
        self._open = threading.Lock()
        try:
            # Opened anew, for what is set of this one is so for the shell's too.
            flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
            self._descriptor = os.open(os.ttyname(stream.fileno()), flags)
        except OSError:  # of another user (su), or not in this container
            self._descriptor = os.dup(stream.fileno())

    def release(self) -> None:
        """Has what was held until now written before what comes next, and that as it comes."""
        self._is_released = True

    def write(self, text: str) -> int:
        """Wait until all has been taken, or is given up; rich has one thread at a time do it."""
        self._held.append(text)
        if not self._is_released:
            return len(text)
        held, self._held = self._held, []
        left = "".join(held).encode(self.encoding, "backslashreplace")
        while left and (taken := self._write_some(left)) is not None:
            left = left[taken:]
            # Of one that is closed meanwhile the next write tells.
            has_room = not left or wait_for_room(self._descriptor, _LOOK_SECONDS)
            if not has_room and time.monotonic() >= self._until:
                break
        return len(text)

    def _write_some(self, content: bytes) -> int | None:
        """Return how much the terminal takes at once; None where it is no longer ours."""
        with self._open:
            if self._descriptor >= 0:
                with contextlib.suppress(BlockingIOError):
                    return os.write(self._descriptor, content)
                return 0
        self._stream.write(content.decode(self.encoding))
        self._stream.flush()
        return None

    def flush(self) -> None:
        """Nothing is kept."""

    def isatty(self) -> bool:
        return True

    def give_up(self, seconds: float) -> None:
        """Wait so long at most for what is under way and for all that follows."""
        self._until = time.monotonic() + seconds

    def close(self) -> None:
        """Let go of it; more than once, too."""
        with self._open:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


def tty_of(stream: TextIO) -> Tty | None:
    """Return a stream's terminal; None where it is of none that has a descriptor."""
    try:
        return Tty(stream) if os.isatty(stream.fileno()) else None
    except (OSError, ValueError):
        return None
