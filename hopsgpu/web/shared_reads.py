"""Reads of the lake and of YARN for pages: in threads, shared by browsers, each with a deadline.

A NameNode that does not answer keeps the threads of its own reads busy, and nothing else: the
pages come without what it was asked for, and say so.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from hopsgpu.storage.timed_reads import ReadResult, TimedRead

T = TypeVar("T")

_FRESH_SECONDS = 2.0
# If a read fails, a value of at most this age is shown instead.
_SHOWN_SECONDS = 600.0
_MAX_KEPT = 64
_MIN_SECONDS = 0.05


class SharedReads:
    """Reads of one source; those with the same key share one call and its result.

    All methods are called by one event loop.

    Args:
        source: name of the source, for messages and threads.
        patience: how long a browser waits for a call, in seconds, from the begin of the call. The
            call continues after that; a later `get` returns its result.
    """

    def __init__(
        self,
        source: str,
        patience: float,
        most: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._patience = patience
        self._most = most
        self._clock = clock
        self._kept: OrderedDict[Hashable, tuple[Any, float]] = OrderedDict()
        # Reads in progress, with the time at which each began.
        self._under_way: dict[Hashable, tuple[asyncio.Task[ReadResult[Any]], float]] = {}

    async def get(
        self,
        key: Hashable,
        read: Callable[[], T],
        *,
        fresh: float = _FRESH_SECONDS,
    ) -> ReadResult[T]:
        """Return what a call returns; never raise what it raises.

        Args:
            key: what is read; the same `read` always has the same key.
            read: the call; it may block for as long as it likes.
            fresh: an earlier result of at most this age, in seconds, is returned at once.
        """
        before = self._before(key)
        if before.value is not None and before.age <= fresh:
            return before
        task, began = self._under_way.get(key, (None, self._clock()))
        if task is None:
            if len(self._under_way) >= self._most:
                problem = f"{self._source} has not answered {self._most} earlier requests yet"
                return ReadResult(before.value, problem, before.age)
            task = asyncio.get_running_loop().create_task(self._read(key, read))
            self._under_way[key] = (task, began)
        # If a source does not answer, only the first page waits.
        seconds_left = max(self._patience - (self._clock() - began), _MIN_SECONDS)
        try:
            answer = await asyncio.wait_for(asyncio.shield(task), seconds_left)
        except TimeoutError:
            within = f"within {self._patience:g} s"
            problem = f"{self._source} has not answered {within}; it is still asked"
            return ReadResult(before.value, problem, before.age)
        if answer.problem:
            return ReadResult(before.value, answer.problem, before.age, answer.kind)
        return answer

    def forget(self, key: Hashable) -> None:
        """Drop an earlier result, because something has changed it."""
        self._kept.pop(key, None)

    def _before(self, key: Hashable) -> ReadResult[Any]:
        value, at = self._kept.get(key, (None, 0.0))
        age = self._clock() - at
        return (
            ReadResult(None)
            if value is None or age > _SHOWN_SECONDS
            else ReadResult(value, "", age)
        )

    async def _read(self, key: Hashable, read: Callable[[], T]) -> ReadResult[T]:
        try:
            answer = await TimedRead(self._source, read).wait()
        finally:
            del self._under_way[key]
        if answer.value is None:
            return answer
        self._kept[key] = (answer.value, self._clock())
        self._kept.move_to_end(key)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return answer
