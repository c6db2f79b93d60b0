"""An iterator whose items a thread makes ahead."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# Longest wait for a running read of the lake. The thread ends after that read in any case.
_MAX_JOIN_SECONDS = 10.0

# For waits that do not delay a training.
NOT_COUNTED: Final[AbstractContextManager[None]] = contextlib.nullcontext()


class _Buffer(Generic[T]):
    def __init__(self, capacity: int, waiting: AbstractContextManager[None]) -> None:
        self._capacity = capacity
        self._waiting = waiting
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_complete = False
        self._is_closed = False
        self._error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Wait for room and add an item; return False if the reader has closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._capacity)
            if self._is_closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
        return True

    def end(self, error: BaseException | None) -> None:
        """End the items; the reader then raises the error, if there is one."""
        with self._changed:
            self._is_complete, self._error = True, error
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            if not (self._items or self._is_complete or self._is_closed):
                with self._waiting:
                    self._changed.wait_for(
                        lambda: self._items or self._is_complete or self._is_closed
                    )
            if self._items and not self._is_closed:
                self._changed.notify_all()
                return self._items.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()


class PrefetchIterator(Iterator[T]):
    """An iterator whose items are made in a thread.

    The thread ends when all items are made, by `close()`, when the iterator is garbage-collected,
    and when the process exits. An error while an item is made is raised in the item's place.

    Args:
        make: called in the thread; returns the items, an iterator that the thread closes.
        capacity: number of items that are made in advance.
        waiting: entered while the reader waits for an item.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[T]],
        capacity: int,
        waiting: AbstractContextManager[None] = NOT_COUNTED,
    ) -> None:
        self._buffer: _Buffer[T] = _Buffer(capacity, waiting)
        thread = threading.Thread(
            target=_fill, args=(make, self._buffer), name="hopsgpu-data", daemon=True
        )
        self._end = weakref.finalize(self, _end, self._buffer, thread)
        thread.start()

    def __next__(self) -> T:
        return self._buffer.get()

    def close(self) -> None:
        self._end()


def _fill(make: Callable[[], Iterator[T]], buffer: _Buffer[T]) -> None:
    problem: BaseException | None = None
    try:
        items = make()
        try:
            for item in items:
                if not buffer.put(item):
                    break
                del item  # do not keep the item, which may be large, after the reader has used it
        finally:
            if (close := getattr(items, "close", None)) is not None:
                close()
    except BaseException as error:  # noqa: BLE001  raised in the reader
        problem = error
    buffer.end(problem)


def _end(buffer: _Buffer[T], thread: threading.Thread) -> None:
    buffer.close()
    if thread is not threading.current_thread():
        thread.join(_MAX_JOIN_SECONDS)
