"""Background work of a run: writing its record and its logs to the lake."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hopsgpu.errors import HopsGpuError

log = logging.getLogger(__name__)

Work = Callable[[], None]
# A small file takes HDFS half a second, nearly all of it waiting.
_MOST_THREADS = 32
# Bounded, because each waiting work may keep a file open.
_MOST_WAITING = 256
# Less than the bound above, so that there is room for work that must not be refused.
_MOST_OFFERED = 64
_LONGEST_WAIT = 60.0


class Background:
    """Does the work that is put, several pieces at a time, and collects the problems.

    Work with the same key is done one piece after the other, in order; a piece that has not begun
    is replaced by the next one of its key. The threads are daemons, since a lake that hangs must
    not keep a script alive, and end when nothing is left to do.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: dict[str, Work] = {}
        # By the key of work that must wait for other work: the keys of the latter.
        self._behind: dict[str, set[str]] = {}
        self._running: set[str] = set()
        self._threads = 0
        self._problems: list[str] = []

    def put(self, key: str, work: Work) -> None:
        """Queue some work; if very much is queued already, wait for room, at most a minute."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < _MOST_WAITING, _LONGEST_WAIT)
            self._begin(key, work)

    def offer(self, key: str, work: Work) -> bool:
        """Queue some work unless much is queued already, and never wait; return whether it was.

        This is for work that is offered again soon.
        """
        with self._changed:
            if key not in self._waiting and len(self._waiting) >= _MOST_OFFERED:
                return False
            self._begin(key, work)
        return True

    def put_behind(self, key: str, work: Work) -> None:
        """Queue some work that begins once all earlier work is done; wait for room as `put` does.

        Args:
            key: a key that no other work has.
            work: the work.
        """
        with self._changed:
            self._behind[key] = {*self._running, *self._waiting}
        self.put(key, work)

    def flush(self, seconds: float) -> None:
        """Wait until all work is done.

        If no work finishes for this many seconds, stop waiting; the rest becomes a problem.
        """
        with self._changed:
            while left := [*self._running, *self._waiting]:
                log.debug("%s: waits for %d writes, first: %s", self._name, len(left), left[0])
                if not self._changed.wait(seconds):
                    self._problems.append(
                        f"not written to the lake within {seconds:g} s: {', '.join(left[:3])}"
                        f"{f' and {len(left) - 3} more' if len(left) > 3 else ''}"
                    )
                    return

    def problems(self) -> tuple[str, ...]:
        """Return the problems since the last call."""
        with self._changed:
            problems, self._problems = tuple(self._problems), []
        return problems

    def _begin(self, key: str, work: Work) -> None:
        self._waiting[key] = work
        if self._threads < _MOST_THREADS:
            self._threads += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                key = next((key for key in self._waiting if self._is_due(key)), None)
                if key is None:
                    # All waiting work has, or waits for, a key that another thread works on; that
                    # thread continues with it.
                    self._threads -= 1
                    return
                work = self._waiting.pop(key)
                self._behind.pop(key, None)
                self._running.add(key)
            problem = _done(work)
            with self._changed:
                self._running.discard(key)
                if problem is not None:
                    log.info("%s: %s failed: %s", self._name, key, problem)
                    self._problems.append(problem)
                self._changed.notify_all()

    def _is_due(self, key: str) -> bool:
        before = self._behind.get(key, ())
        return key not in self._running and not any(
            other in self._running or other in self._waiting for other in before
        )


def _done(work: Work) -> str | None:
    """Do the work; return its error as text, or None."""
    try:
        work()
    except HopsGpuError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - reported by problems()
        return f"{type(error).__name__}: {error}"
    return None
