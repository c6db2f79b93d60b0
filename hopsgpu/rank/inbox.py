"""Lines that the driver sends to a rank while its function runs, through a named pipe.

A pipe takes no room on the node's disk, which may be full. A line is written with a single call, so
it must fit into the pipe's buffer.
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
_POLL_SECONDS = 0.2


class InboxWriter:
    """The agent's side, which never waits for the rank.

    Raises:
        OSError: the pipe cannot be created.
    """

    def __init__(self, directory: Path) -> None:
        # Open for reading too, so that neither the open nor a write depends on a reader.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = os.open(_create_pipe(directory), flags)

    def write(self, line: str) -> None:
        """Write a line; the newline is added.

        Raises:
            BlockingIOError: the rank has not read earlier lines, and the buffer is full.
        """
        os.write(self._descriptor, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._descriptor)


def lines(cancelled: threading.Event | None = None) -> Iterator[str]:
    """Yield the lines that the driver sends to this rank, in one thread and without a timeout.

    Args:
        cancelled: event that ends the iterator within 0.2 s.
    """
    pipe = _create_pipe(Path(os.environ[VARIABLE]).parent)
    # Do not block: an open that waits for the agent could not be interrupted.
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 0) as file:
        rest = b""
        while cancelled is None or not cancelled.is_set():
            # The pipe has no writer until the agent opens it. The agent then stays its writer.
            if not select.select([file], [], [], _POLL_SECONDS)[0]:
                continue
            chunk = file.read(select.PIPE_BUF)
            if chunk == b"":  # the agent has exited, and this rank will be killed
                return
            *complete, rest = (rest + (chunk or b"")).split(b"\n")
            yield from (line.decode() for line in complete)


def _create_pipe(directory: Path) -> Path:
    pipe = directory / _FILE
    with contextlib.suppress(FileExistsError):
        os.mkfifo(pipe, 0o600)
    return pipe
