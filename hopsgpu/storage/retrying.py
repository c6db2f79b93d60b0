"""Repeated attempts of a call, for a limited time, if another attempt can help."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hopsgpu.errors import Cancelled, StoreError
from hopsgpu.storage.error_messages import StoreRefusal, explain

T = TypeVar("T")

log = logging.getLogger(__name__)

# What file systems raise; anything else is a bug of hopsgpu, and passes unchanged.
FILE_SYSTEM_ERRORS = (OSError, RuntimeError, ValueError, StoreRefusal)
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0


@dataclass(frozen=True)
class RetryLimits:
    """The time for which a call is tried again.

    Attributes:
        seconds: from the end of the first attempt to the start of the last, however long the first
            took: a connection that breaks after minutes of an upload is no reason to give up.
        clock: returns seconds, monotonic.
        jitter: returns a number between 0 and 1, which spreads the pauses of those that wait for
            the same NameNode.
        stop: set when nobody waits for the result any more.
    """

    seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    stop: threading.Event | None = None

    def __call__(self, doing: str, url: str, attempt: Callable[[int], T]) -> T:
        """Return what an attempt returns; each attempt is given its number, from 0.

        Args:
            doing: what the attempt does, for the error.
            url: the URL that it works on, for the error.
            attempt: called until it succeeds, fails for good, or the time is over.

        Raises:
            StoreError: the last attempt failed; the error says why.
            Cancelled: `stop` was set.
        """
        stop = self.stop or threading.Event()
        began = self.clock()
        failed: float | None = None
        number = 0
        while True:
            if stop.is_set():
                raise Cancelled(f"the attempt to {doing} {url} was cancelled")
            try:
                result = attempt(number)
            except FILE_SYSTEM_ERRORS as error:
                trouble = explain(error)
                pause = min(_FIRST_PAUSE * 2**number, _LONGEST_PAUSE) * (0.5 + self.jitter())
                now = self.clock()
                failed = now if failed is None else failed
                if not trouble.retryable or now - failed + pause > self.seconds:
                    if number:
                        log.info(
                            "attempt %d to %s %s failed after %.0f s: gives up (%s)",
                            number + 1,
                            doing,
                            url,
                            now - began,
                            trouble.reason,
                        )
                    duration = f" (tried for {now - began:.0f} s)" if number else ""
                    message = f"cannot {doing} {url}: {trouble}{duration}"
                    raise StoreError(message, trouble.kind) from error
                log.info(
                    "attempt %d to %s %s failed: tries again in %.1f s (%s)",
                    number + 1,
                    doing,
                    url,
                    pause,
                    trouble.reason,
                )
            else:
                if number:
                    log.info("attempt %d to %s %s succeeded", number + 1, doing, url)
                return result
            number += 1
            stop.wait(pause)
