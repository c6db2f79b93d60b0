"""Reads of the lake and of YARN that may hang: each in a thread of its own, with a deadline.

Whoever waits gets an answer in any case: the value, or why there is none, in words.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hopsgpu.errors import HopsGpuError
from hopsgpu.storage.bounded_calls import BoundedCall
from hopsgpu.storage.error_messages import JSON_ERRORS

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadResult(Generic[T]):
    """What a read gave, or why it gave nothing.

    Attributes:
        value: the value; None if there is none.
        problem: why there is no new value, in words; "" if there is one.
        age: seconds since the value was read.
        kind: kind of the problem, as of a StoreError.
        seconds: how long the read took, or was waited for.
    """

    value: T | None
    problem: str = ""
    age: float = 0.0
    kind: str = ""
    seconds: float = 0.0


class TimedRead(Generic[T]):
    """A read that is under way; it goes on after a deadline, and the process may end without it.

    Args:
        source: name of what is read, for the thread and the log.
        read: the call; it may block for as long as it likes.
    """

    def __init__(self, source: str, read: Callable[[], T]) -> None:
        self._source = source
        self._began = time.monotonic()
        self._answer: concurrent.futures.Future[ReadResult[T]] = concurrent.futures.Future()
        BoundedCall(f"hopsgpu-read-{source}", lambda: self._answer.set_result(self._ask(read)))

    @property
    def is_done(self) -> bool:
        """Return whether the read has ended."""
        return self._answer.done()

    def _ask(self, read: Callable[[], T]) -> ReadResult[T]:
        value, problem, kind = None, "", ""
        try:
            value = read()
        except HopsGpuError as error:
            problem, kind = str(error), getattr(error, "kind", "")
        except JSON_ERRORS as error:
            log.info("%s: an answer cannot be understood", self._source, exc_info=True)
            problem = f"it cannot be understood: {type(error).__name__}: {error}"
        except OSError as error:
            problem = str(error)
        except Exception as error:
            # One source's oddities are not the others'.
            log.warning("%s: an unexpected error", self._source, exc_info=True)
            problem = f"unexpected {type(error).__name__}: {error}"
        return ReadResult(value, problem, kind=kind, seconds=time.monotonic() - self._began)

    def answer(self, until: float) -> ReadResult[T] | None:
        """Return the answer, or None if it does not come in time.

        Args:
            until: how long to wait at most, by `time.monotonic`.
        """
        try:
            return self._answer.result(max(until - time.monotonic(), 0.0))
        except concurrent.futures.TimeoutError:
            return None

    @property
    def seconds_waited(self) -> float:
        """Return the seconds since the read began."""
        return time.monotonic() - self._began

    async def wait(self) -> ReadResult[T]:
        """Return the answer once it comes; cancelling this leaves the read under way."""
        return await asyncio.shield(asyncio.wrap_future(self._answer))
