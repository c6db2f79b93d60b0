"""A terminal as a file that rich can draw on and that never blocks the program for long."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TextIO

from hopsgpu.display.nonblocking import wait_for_room

_POLL_SECONDS = 0.1


class Tty:
    """The terminal of a stream, through a separate descriptor.

    Python waits for a stream's lock when it ends, so nothing that a terminal delays (Ctrl-S) may be
    written through the stream. A write waits here until the terminal accepts it or it is given up.
    Before the first `release`, nothing is written and nobody waits; after `close`, the stream is
    used again.

    Args:
        stream: stream of a terminal, such as stdout.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding
        self._held: list[str] = []
        self._is_released = False
        self._until = float("inf")
        # Held while the descriptor is used: after close() its number may belong to another file.
        self._open = threading.Lock()
        try:
            # Opened again, because O_NONBLOCK on the stream's descriptor would affect the shell's.
            flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
            self._descriptor = os.open(os.ttyname(stream.fileno()), flags)
        except OSError:  # the terminal is another user's (su), or not in this container
            self._descriptor = os.dup(stream.fileno())

    def release(self) -> None:
        """Write what was held, and from now on write at once."""
        self._is_released = True

    def write(self, text: str) -> int:
        """Wait until all is accepted or given up; rich calls it from one thread at a time."""
        self._held.append(text)
        if not self._is_released:
            return len(text)
        held, self._held = self._held, []
        content = "".join(held).encode(self.encoding, "backslashreplace")
        while content and (written_count := self._write_some(content)) is not None:
            content = content[written_count:]
            # If the descriptor was closed meanwhile, the next write notices.
            has_room = not content or wait_for_room(self._descriptor, _POLL_SECONDS)
            if not has_room and time.monotonic() >= self._until:
                break
        return len(text)

    def _write_some(self, content: bytes) -> int | None:
        """Return how much the terminal accepts at once; None if it is no longer ours."""
        with self._open:
            if self._descriptor >= 0:
                with contextlib.suppress(BlockingIOError):
                    return os.write(self._descriptor, content)
                return 0
        self._stream.write(content.decode(self.encoding))
        self._stream.flush()
        return None

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def isatty(self) -> bool:
        return True

    def give_up(self, seconds: float) -> None:
        """Wait at most `seconds` from now for the current write and all that follow."""
        self._until = time.monotonic() + seconds

    def close(self) -> None:
        """Release the terminal; idempotent."""
        with self._open:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


def tty_of(stream: TextIO) -> Tty | None:
    """Return a stream's terminal; None if it has none with a descriptor."""
    try:
        return Tty(stream) if os.isatty(stream.fileno()) else None
    except (OSError, ValueError):
        return None
