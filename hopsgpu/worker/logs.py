"""A rank's output on its way to the driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

_LOOK_SECONDS = 0.2
_CHUNK = 256 * 1024
_LONGEST = 64 * 1024


async def follow(log: Path, ended: asyncio.Event, send: Callable[[bytes], Awaitable[None]]) -> None:
    """Sends what is appended to a file, in order, until `ended` is set and all is sent.

    The rank writes to the file and never waits for the driver.
    """
    with log.open("rb") as file:
        offset = 0
        while True:
            last = ended.is_set()
            while chunk := os.pread(file.fileno(), _CHUNK, offset):
                await send(chunk)
                offset += len(chunk)
            if last:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _LOOK_SECONDS)


class LineSplitter:
    """Whole lines from chunks of bytes that may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def lines(self, chunk: bytes) -> list[str]:
        """The lines that `chunk` completes, and what is too long to wait for its end."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST:
            whole.append(self._rest)
            self._rest = b""
        return [_text(line) for line in whole]

    def rest(self) -> list[str]:
        """The last line, where it did not end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.decode(errors="backslashreplace").rstrip("\r")
