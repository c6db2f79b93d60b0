"""Lines that the driver hands to a rank while its function runs, through a named pipe.

The pipe is in the rank's directory, and whoever comes first creates it. It takes no room on the
node's disk, which may be full. A line is written at once, so it must fit into the pipe's buffer.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

from hopsgpu.rank.context import VARIABLE

_FILE = "inbox"
_LOOK_SECONDS = 0.2


class InboxWriter:
    """The agent's end, which never waits for the rank.

    Args:
        directory: the rank's.

    Raises:
        OSError: the pipe cannot be created.
    """

    def __init__(self, directory: Path) -> None:
        # Also open for reading, so that neither the opening nor a write depends on a reader.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = os.open(_created(directory), flags)

    def write(self, line: str) -> None:
        """Hand over a line, without its end.

        Raises:
            BlockingIOError: the rank has not read earlier lines, and the buffer is full.
        """
        os.write(self._descriptor, f"{line}\n".encode())

    def close(self) -> None:
        """Close the pipe; lines that were not read are lost."""
        os.close(self._descriptor)


def lines(unwanted: threading.Event | None = None) -> Iterator[str]:
    """Yield the lines that the driver hands to this rank; wait for each as long as it takes.

    For one thread of the rank: another one would get other lines.

    Args:
        unwanted: event that ends the wait soon, and the lines with it.
    """
    pipe = _created(Path(os.environ[VARIABLE]).parent)
    # Without blocking: an opening that waits for the agent could not be interrupted.
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 0) as file:
        rest = b""
        while unwanted is None or not unwanted.is_set():
            # Until the agent has opened it, the pipe has no writer; then it always has one.
            if not select.select([file], [], [], _LOOK_SECONDS)[0]:
                continue
            got = file.read(select.PIPE_BUF)
            if got == b"":  # the agent is gone, and this rank will be killed
                return
            *whole, rest = (rest + (got or b"")).split(b"\n")
            yield from (line.decode() for line in whole)


def _created(directory: Path) -> Path:
    pipe = directory / _FILE
    with contextlib.suppress(FileExistsError):
        os.mkfifo(pipe, 0o600)
    return pipe
