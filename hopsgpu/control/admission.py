"""A limit on unauthenticated connections to the driver, so that a flood excludes no agent."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Mapping
from typing import Any

MAX_UNPROVEN = 1024
# An agent authenticates within milliseconds, on a busy driver within a second.
GRACE_SECONDS = 2.0


def max_unproven(descriptors: int) -> int:
    """Return the limit of unauthenticated connections for a limit of open files."""
    return max(1, min(MAX_UNPROVEN, descriptors // 2))


def seconds_until_room(since: Mapping[Any, float], *, limit: int, now: float) -> float | None:
    """Return after how long a new connection may replace the oldest one; None if there is room.

    Args:
        since: time at which each connection arrived, the oldest first.
    """
    if len(since) < limit:
        return None
    return max(0.0, next(iter(since.values())) + GRACE_SECONDS - now)


class Admission:
    """The connections of one event loop that are not authenticated yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._limit = max_unproven(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._since: dict[asyncio.Task[None], float] = {}
        self._left = asyncio.Event()

    def enter(self, task: asyncio.Task[None]) -> None:
        self._since[task] = self._loop.time()

    def leave(self, task: asyncio.Task[None]) -> None:
        """Stop counting a connection that is authenticated or has ended; idempotent."""
        if self._since.pop(task, None) is not None:
            self._left.set()

    async def wait_for_room(self) -> None:
        """Wait until one more connection may enter; after a while, close the oldest."""
        while True:
            wait = seconds_until_room(self._since, limit=self._limit, now=self._loop.time())
            if wait is None:
                return
            if wait == 0.0:
                oldest = next(iter(self._since))
                oldest.cancel()
                self.leave(oldest)
                return
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._left.wait()
