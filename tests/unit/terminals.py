"""Terminals whose person may stop them, and stop reading."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TextIO

from hopsgpu.display.nonblocking import wait_for_room
from tests.bounds import HANG_SECONDS
from tests.conftest import until

STOP, GO = b"\x13", b"\x11"  # Ctrl-S, Ctrl-Q


@dataclass
class Person:
    """The person at a terminal.

    Attributes:
        stream: of the terminal, as stdout.
    """

    stream: TextIO
    _master: int
    _seen: bytearray = field(default_factory=bytearray, repr=False)

    def types(self, keys: bytes) -> None:
        """Returns once a stop holds: the kernel passes keys on when it comes to it."""
        os.write(self._master, keys)
        if keys == STOP:
            assert until(lambda: not wait_for_room(self.stream.fileno(), 0.0), step=0.01)

    def sees(self, text: str, seconds: float = HANG_SECONDS) -> bool:
        """Reads on until there is a text, or nothing comes for so long."""
        poll = select.poll()
        poll.register(self._master, select.POLLIN)
        wanted, looked = text.encode(), 0
        while (found := self._seen.find(wanted, looked)) < 0 and poll.poll(seconds * 1000):
            looked = max(len(self._seen) - len(wanted), 0)
            self._seen += os.read(self._master, 65536)
        return found >= 0

    @property
    def seen(self) -> str:
        """All that was read."""
        return self._seen.decode()


@contextlib.contextmanager
def terminal() -> Iterator[Person]:
    """A terminal at which nobody reads but when it is said so."""
    master, slave = os.openpty()
    # Who is still writing then is told that it is gone.
    with open(slave, "w", encoding="utf-8") as stream, contextlib.ExitStack() as stack:  # noqa: PTH123
        stack.callback(os.close, master)
        yield Person(stream, master)
