"""The last status and the last lines of a search or a score, of bounded size."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic

from hopsgpu.core.gang import GangState
from hopsgpu.display.base import S
from hopsgpu.display.picture import LogTail, Tail


class StatusScene(Generic[S]):
    """The reports so far, in bounded memory; one thread reports, another draws.

    Args:
        status: the first one.
        now: seconds by any clock.
    """

    def __init__(self, status: S, now: float) -> None:
        self._lock = threading.Lock()
        self._status = status
        self._updated_at = now
        self._recent = Tail()
        self._news = 0

    @property
    def news(self) -> int:
        """Return a number that grows with every report."""
        return self._news

    def status(self, status: S, now: float) -> None:
        """Record the status."""
        with self._lock:
            self._status, self._updated_at = status, now
            self._news += 1

    def _take(self, texts: Sequence[str], writer: str) -> None:
        """Record the last lines of a writer."""
        with self._lock:
            self._news += len(texts)
            self._recent.take(texts, f"[{writer}] ")

    def _snapshot(self, now: float) -> tuple[S, float, LogTail]:
        """Return the status, the seconds since the start, and the last lines of all writers."""
        with self._lock:
            status, updated_at, recent = self._status, self._updated_at, self._recent.log()
        over = 0.0 if GangState(status.state).is_terminal else max(now - updated_at, 0.0)
        return status, status.elapsed + over, recent
