"""Trying again, for a while, where that can help."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hopsgpu.errors import Cancelled, StoreError
from hopsgpu.storage.error_messages import Refused, explain

T = TypeVar("T")

# What file systems raise; anything else is a bug of ours, and is not retold.
RAISED = (OSError, RuntimeError, ValueError, Refused)
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0


@dataclass(frozen=True)
class Patience:
    """For how long something is tried again.

    Attributes:
        seconds: from the first attempt's end to the last one's start, however long the first took:
            a connection that breaks after minutes of an upload is no reason to give up.
        clock: seconds, monotonic.
        jitter: a number between 0 and 1, which spreads the pauses of those that wait for the
            same name node.
        stop: set where nobody waits for the result any more.
    """

    seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    stop: threading.Event | None = None

    def __call__(self, doing: str, url: str, attempt: Callable[[int], T]) -> T:
        """What an attempt returns; it is given its number, from 0.

        Args:
            doing: what it does, for the error.
            url: with what.

        Raises:
            StoreError: the last attempt's trouble.
            Cancelled: `stop` was set.
        """
        stop = self.stop or threading.Event()
        began = self.clock()
        failed: float | None = None
        number = 0
        while True:
            if stop.is_set():
                raise Cancelled(f"stopped, before it could {doing} {url}")
            try:
                return attempt(number)
            except RAISED as error:
                trouble = explain(error)
                pause = min(_FIRST_PAUSE * 2**number, _LONGEST_PAUSE) * (0.5 + self.jitter())
                now = self.clock()
                failed = now if failed is None else failed
                if not trouble.retryable or now - failed + pause > self.seconds:
                    told = f" (tried for {now - began:.0f} s)" if number else ""
                    message = f"cannot {doing} {url}: {trouble}{told}"
                    raise StoreError(message, trouble.kind) from error
            number += 1
            stop.wait(pause)
