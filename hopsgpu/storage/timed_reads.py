"""Reads of the lake and of YARN that may hang: each in a thread of its own, with a deadline.

A caller always gets an answer: the value, or the reason why there is none.
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
    """The value of a read, or the reason why there is none.

    Attributes:
        problem: why there is no new value, as text; "" if there is one.
        age: seconds since the value was read.
        kind: kind of the problem, as of a StoreError.
        seconds: duration of the read, or of the wait for the read.
    """

    value: T | None
    problem: str = ""
    age: float = 0.0
    kind: str = ""
    seconds: float = 0.0


class TimedRead(Generic[T]):
    """A running read; it continues after a deadline, and does not delay the process's exit.

    Args:
        source: name of the source, for the thread and the log.
    """

    def __init__(self, source: str, read: Callable[[], T]) -> None:
        self._source = source
        self._start = time.monotonic()
        self._answer: concurrent.futures.Future[ReadResult[T]] = concurrent.futures.Future()
        BoundedCall(f"hopsgpu-read-{source}", lambda: self._answer.set_result(self._read(read)))

    @property
    def is_done(self) -> bool:
        return self._answer.done()

    def _read(self, read: Callable[[], T]) -> ReadResult[T]:
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
            # An error of one source must not affect the others.
            log.warning("%s: an unexpected error", self._source, exc_info=True)
            problem = f"unexpected {type(error).__name__}: {error}"
        return ReadResult(value, problem, kind=kind, seconds=time.monotonic() - self._start)

    def answer(self, deadline: float) -> ReadResult[T] | None:
        """Return the answer; None if there is none by the deadline, a `time.monotonic()`."""
        try:
            return self._answer.result(max(deadline - time.monotonic(), 0.0))
        except concurrent.futures.TimeoutError:
            return None

    @property
    def seconds_waited(self) -> float:
        return time.monotonic() - self._start

    async def wait(self) -> ReadResult[T]:
        """Return the answer; a cancelled wait does not stop the read."""
        return await asyncio.shield(asyncio.wrap_future(self._answer))
