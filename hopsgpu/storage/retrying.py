"""Retries of calls to file systems, for a limited time, if another attempt can help."""

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

# The errors of file systems. Any other exception is a bug of hopsgpu, and passes unchanged.
FILE_SYSTEM_ERRORS = (OSError, RuntimeError, ValueError, StoreRefusal)
_FIRST_PAUSE = 0.2
_MAX_PAUSE = 5.0


@dataclass(frozen=True)
class RetryLimits:
    """Retries a call for a limited time.

    Attributes:
        seconds: limit from the end of the first attempt to the start of the last one. The first
            attempt does not count: a connection may break after minutes.
        clock: returns seconds, monotonic.
        jitter: returns a number between 0 and 1, which spreads the retries of many clients.
        stop: set when nobody waits for the result any more.
    """

    seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    stop: threading.Event | None = None

    def __call__(self, doing: str, url: str, attempt: Callable[[int], T]) -> T:
        """Return the result of the first attempt that succeeds.

        Args:
            doing: verb of the call, for the error.
            url: object of the call, for the error.
            attempt: called with its number, from 0.

        Raises:
            StoreError: the last attempt failed; the error says why.
            Cancelled: `stop` was set.
        """
        stop = self.stop or threading.Event()
        start = self.clock()
        first_failure: float | None = None
        number = 0
        while True:
            if stop.is_set():
                raise Cancelled(f"the attempt to {doing} {url} was cancelled")
            try:
                result = attempt(number)
            except FILE_SYSTEM_ERRORS as error:
                meaning = explain(error)
                pause = min(_FIRST_PAUSE * 2**number, _MAX_PAUSE) * (0.5 + self.jitter())
                now = self.clock()
                first_failure = now if first_failure is None else first_failure
                if not meaning.is_retryable or now - first_failure + pause > self.seconds:
                    if number:
                        log.info(
                            "attempt %d to %s %s failed after %.0f s: gives up (%s)",
                            number + 1,
                            doing,
                            url,
                            now - start,
                            meaning.reason,
                        )
                    duration = f" (tried for {now - start:.0f} s)" if number else ""
                    message = f"cannot {doing} {url}: {meaning}{duration}"
                    raise StoreError(message, meaning.kind) from error
                log.info(
                    "attempt %d to %s %s failed: tries again in %.1f s (%s)",
                    number + 1,
                    doing,
                    url,
                    pause,
                    meaning.reason,
                )
            else:
                if number:
                    log.info("attempt %d to %s %s succeeded", number + 1, doing, url)
                return result
            number += 1
            stop.wait(pause)
