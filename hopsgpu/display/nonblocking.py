"""Output for readers that may stop reading: a terminal held by Ctrl-S, a pager, a pipe."""

from __future__ import annotations

import atexit
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from hopsgpu.display.screens import is_in_kernel, is_proxy

PATIENCE_SECONDS = 2.0
_MAX_LEFT = 2**24
# A pipe that has any room accepts this many bytes at once.
_PIECE = 4096


class Stream(Protocol):
    """The methods of a TextIO that are used."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class NonblockingWriter:
    """Writes to streams, in its own thread if a reader is at the other end.

    A writer waits until its text has been accepted, at most two seconds. If it has not been
    accepted by then, no writer waits until all text has been: later text is kept, up to 16 million
    characters, and beyond that only the number of lines is reported.

    Args:
        most: number of characters to keep.
    """

    def __init__(self, patience: float = PATIENCE_SECONDS, most: int = _MAX_LEFT) -> None:
        self._patience = patience
        self._most = most
        self._changed = threading.Condition()
        self._left: deque[tuple[Stream, str]] = deque()
        self._size = 0
        self._dropped = 0
        self._is_writing = False
        self._is_behind = False
        self._problem: Exception | None = None

    def write(self, stream: Stream, text: str) -> None:
        """Write a text that ends a line.

        Raises:
            Exception: an error of writing this text or an earlier one.
        """
        if not _has_reader(stream):
            stream.write(text)
            stream.flush()
            return
        with self._changed:
            if self._size >= self._most:
                self._dropped += text.count("\n")
                return
            self._put_note(stream)
            self._append(stream, text)
            if not self._is_writing:
                self._is_writing = True
                threading.Thread(target=self._write_all, name="hopsgpu-outlet", daemon=True).start()
            if not self._is_behind:
                self._is_behind = not self._wait_until_written(self._patience)
            problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Have the rest written before this process ends, as Python does for its streams."""
        with self._changed:
            if self._is_writing:
                atexit.unregister(self._finish)
                atexit.register(self._finish)

    def _finish(self) -> None:
        with self._changed:
            self._wait_until_written(None)

    def _wait_until_written(self, seconds: float | None) -> bool:
        return self._changed.wait_for(lambda: not self._is_writing, seconds)

    def _append(self, stream: Stream, text: str) -> None:
        self._left.append((stream, text))
        self._size += len(text)

    def _put_note(self, stream: Stream) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._append(
                stream, f"hopsgpu: {dropped:,} lines are missing here, because nobody read them\n"
            )

    def _next(self, previous: tuple[Stream, str] | None) -> tuple[Stream, str] | None:
        """Return what to write next."""
        with self._changed:
            if previous is not None:
                self._size -= len(previous[1])
                if not self._left:
                    self._put_note(previous[0])
            if self._left:
                return self._left.popleft()
            self._rest(None)
            return None

    def _rest(self, problem: Exception | None) -> None:
        self._problem = problem
        self._is_writing = self._is_behind = False
        self._size = self._dropped = 0
        self._left.clear()
        self._changed.notify_all()

    def _write_all(self) -> None:
        """Write until nothing is left; the body of the thread."""
        entry = None
        try:
            while (entry := self._next(entry)) is not None:
                _write(*entry)
        except Exception as error:  # noqa: BLE001 - raised where something is written
            with self._changed:
                self._rest(error)


def _write(stream: Stream, text: str) -> None:
    if is_proxy(stream):  # `Tty` waits for room itself
        stream.write(text)
        stream.flush()
        return
    for piece in _pieces(text):
        # A thread that waits inside write() holds the stream's lock, which Python needs at its end.
        wait_for_room(_descriptor(stream))
        stream.write(piece)
        stream.flush()


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of at most 4096 bytes, cut at the end of a line if possible."""
    begin, most = 0, _PIECE if text.isascii() else _PIECE // 4
    while begin < len(text):
        end = text.rfind("\n", begin, begin + most) + 1 or begin + most
        yield text[begin:end]
        begin = end


def wait_for_room(descriptor: int, seconds: float | None = None) -> bool:
    """Wait until a terminal or a pipe accepts data; return False if it does not in time."""
    if descriptor < 0:
        return True
    poll = select.poll()
    # A reader that is gone, or a closed descriptor, counts as room: the write then raises.
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _descriptor(stream: Stream) -> int:
    """Return the stream's descriptor, or -1."""
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, OSError, TypeError, ValueError):
        return -1


def _has_reader(stream: Stream) -> bool:
    """Return whether the stream has a reader who may stop reading."""
    descriptor = _descriptor(stream)
    # In a kernel, text goes to the notebook and not to the descriptor.
    if descriptor < 0 or is_in_kernel():
        return False
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return os.isatty(descriptor) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
