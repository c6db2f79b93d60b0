"""An iterator that is read ahead in a thread, which ends with the iterator."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# The longest wait for a read of the lake that is under way; the thread ends after that read.
_LONGEST_SECONDS = 10.0

# For waits that keep no training waiting.
NOT_COUNTED: Final[AbstractContextManager[None]] = contextlib.nullcontext()


class _Buffer(Generic[T]):
    """The items between the thread and its reader."""

    def __init__(self, room: int, waiting: AbstractContextManager[None]) -> None:
        self._room = room
        self._waiting = waiting
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Wait for room and add an item; return False if nobody reads any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._room)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
        return True

    def end(self, error: BaseException | None) -> None:
        """Tell the reader that no item follows, or which error it is to raise."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            if not (self._items or self._ended or self._closed):
                with self._waiting:
                    self._changed.wait_for(lambda: self._items or self._ended or self._closed)
            if self._items and not self._closed:
                self._changed.notify_all()
                return self._items.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class PrefetchIterator(Iterator[T]):
    """An iterator whose items are made in a thread.

    The thread ends when all items are made, by `close()`, when the iterator is garbage-collected,
    and when the process exits. An error while an item is made is raised in the item's place.

    Args:
        make: called in the thread; returns the iterator that makes the items, which the thread
            closes.
        room: number of items that are made before they are asked for.
        waiting: entered while the reader waits for an item that is not made yet.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[T]],
        room: int,
        waiting: AbstractContextManager[None] = NOT_COUNTED,
    ) -> None:
        self._buffer: _Buffer[T] = _Buffer(room, waiting)
        thread = threading.Thread(
            target=_fill, args=(make, self._buffer), name="hopsgpu-data", daemon=True
        )
        self._end = weakref.finalize(self, _end, self._buffer, thread)
        thread.start()

    def __next__(self) -> T:
        return self._buffer.get()

    def close(self) -> None:
        """End the thread; there are no more items."""
        self._end()


def _fill(make: Callable[[], Iterator[T]], buffer: _Buffer[T]) -> None:
    problem: BaseException | None = None
    try:
        items = make()
        try:
            for item in items:
                if not buffer.put(item):
                    break
                del item  # the reader has it now, and it may be large
        finally:
            if (close := getattr(items, "close", None)) is not None:
                close()
    except BaseException as error:  # noqa: BLE001  raised in the reader
        problem = error
    buffer.end(problem)


def _end(buffer: _Buffer[T], thread: threading.Thread) -> None:
    buffer.close()
    if thread is not threading.current_thread():
        thread.join(_LONGEST_SECONDS)
