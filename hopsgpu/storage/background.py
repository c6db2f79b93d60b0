"""Background work of a run: writing its record and its logs to the lake."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hopsgpu.errors import HopsGpuError

log = logging.getLogger(__name__)

Work = Callable[[], None]
# Many threads, because each mostly waits: HDFS takes half a second for a small file.
_MAX_THREADS = 32
# Bounded, because each queued work may keep a file open.
_MAX_WAITING = 256
# Less than `_MAX_WAITING`: the rest is for work that must not be refused.
_MAX_TRY_PUT = 64
_MAX_WAIT_SECONDS = 60.0


class Background:
    """Runs queued work in several threads, and collects the problems.

    Work with the same key runs sequentially. New work replaces queued work with the same key. The
    threads are daemons: a lake that hangs must not keep a script alive. They end when no work is
    queued.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: dict[str, Work] = {}
        # The key of work that must wait → the keys of earlier work.
        self._behind: dict[str, set[str]] = {}
        self._running: set[str] = set()
        self._threads = 0
        self._problems: list[str] = []

    def put(self, key: str, work: Work) -> None:
        """Queue work; wait at most a minute for room in a full queue."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < _MAX_WAITING, _MAX_WAIT_SECONDS)
            self._start(key, work)

    def try_put(self, key: str, work: Work) -> bool:
        """Queue work without a wait; return False if too much is queued."""
        with self._changed:
            if key not in self._waiting and len(self._waiting) >= _MAX_TRY_PUT:
                return False
            self._start(key, work)
        return True

    def put_after_all(self, key: str, work: Work) -> None:
        """Queue work with a new key, which starts after all earlier work; wait as in `put`."""
        with self._changed:
            self._behind[key] = {*self._running, *self._waiting}
        self.put(key, work)

    def flush(self, seconds: float) -> None:
        """Wait for all work; report a problem if no work finishes for `seconds`."""
        with self._changed:
            while pending := [*self._running, *self._waiting]:
                log.debug(
                    "%s: waits for %d writes, first: %s", self._name, len(pending), pending[0]
                )
                if not self._changed.wait(seconds):
                    self._problems.append(
                        f"not written to the lake within {seconds:g} s: {', '.join(pending[:3])}"
                        f"{f' and {len(pending) - 3} more' if len(pending) > 3 else ''}"
                    )
                    return

    def problems(self) -> tuple[str, ...]:
        """Return the problems since the last call."""
        with self._changed:
            problems, self._problems = tuple(self._problems), []
        return problems

    def _start(self, key: str, work: Work) -> None:
        self._waiting[key] = work
        if self._threads < _MAX_THREADS:
            self._threads += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                key = next((key for key in self._waiting if self._is_due(key)), None)
                if key is None:
                    # All queued work waits for the work of other threads, which continue with it.
                    self._threads -= 1
                    return
                work = self._waiting.pop(key)
                self._behind.pop(key, None)
                self._running.add(key)
            problem = _run_work(work)
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


def _run_work(work: Work) -> str | None:
    try:
        work()
    except HopsGpuError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - reported by problems()
        return f"{type(error).__name__}: {error}"
    return None
