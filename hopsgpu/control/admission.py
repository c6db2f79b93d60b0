"""A limit on unauthenticated connections to the driver, so that a flood keeps no agent out."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Mapping
from typing import Any

MOST_UNPROVEN = 1024
# An agent that is served proves itself within milliseconds, on a busy driver within a second.
GRACE_SECONDS = 2.0


def max_unproven(descriptors: int) -> int:
    """Return how many connections may be unproven at a time, of a process that may open so many
    files.
    """
    return max(1, min(MOST_UNPROVEN, descriptors // 2))


def displaced(since: Mapping[Any, float], *, most: int, now: float) -> float | None:
    """Return how long a newcomer waits until it takes the place of the oldest; None where there is
    room.

    Args:
        since: the clock's reading at the arrival of each connection, the oldest first.
        most: how many connections are allowed.
        now: the clock's reading.
    """
    if len(since) < most:
        return None
    return max(0.0, next(iter(since.values())) + GRACE_SECONDS - now)


class Admission:
    """The connections of one event loop that have not yet proved that they know the secret."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._most = max_unproven(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._since: dict[asyncio.Task[None], float] = {}
        self._left = asyncio.Event()

    def enter(self, task: asyncio.Task[None]) -> None:
        """Count a connection, which its task serves."""
        self._since[task] = self._loop.time()

    def leave(self, task: asyncio.Task[None]) -> None:
        """Stop counting a connection that is authenticated or has ended; idempotent."""
        if self._since.pop(task, None) is not None:
            self._left.set()

    async def room(self) -> None:
        """Wait until one more connection may enter; if none leaves in time, close the oldest."""
        while True:
            wait = displaced(self._since, most=self._most, now=self._loop.time())
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
