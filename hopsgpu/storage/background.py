"""Background work of a run: writing its record and its logs to the lake."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from hopsgpu.errors import HopsGpuError

log = logging.getLogger(__name__)

Work = Callable[[], None]
# Many threads, because each mostly waits: HDFS takes half a second for a small file.
_MAX_THREADS = 32
# From this number on, `put_all` waits, because each queued work may keep a file open.
_MAX_WAITING = 256
# Less than `_MAX_WAITING`: the rest is for work that must not be refused.
_MAX_TRY_PUT = 64
# A lake that fails refuses all logs of a gang.
_MAX_PROBLEMS = 20


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
        self._unnamed_problems = 0
        self._succeeded = 0

    def put(self, key: str, work: Work) -> None:
        """Queue work before all that waits: a run's record must not wait for logs."""
        with self._changed:
            self._waiting = {key: work} | {k: w for k, w in self._waiting.items() if k != key}
            self._start_thread()

    def put_all(self, works: Iterable[tuple[str, Work]], seconds: float) -> None:
        """Queue works with their keys; wait at most `seconds` in all for room in a full queue."""
        deadline = time.monotonic() + seconds
        with self._changed:
            for key, work in works:
                seconds_left = max(deadline - time.monotonic(), 0.0)
                self._changed.wait_for(lambda: len(self._waiting) < _MAX_WAITING, seconds_left)
                self._start(key, work)

    def try_put(self, key: str, work: Work) -> bool:
        """Queue work without a wait; return False if too much is queued."""
        with self._changed:
            if key not in self._waiting and len(self._waiting) >= _MAX_TRY_PUT:
                return False
            self._start(key, work)
        return True

    def put_after_all(self, key: str, work: Work) -> None:
        """Queue work with a new key, which starts after all earlier work."""
        with self._changed:
            self._behind[key] = {*self._running, *self._waiting}
        self.put(key, work)

    def flush(self, seconds: float) -> None:
        """Wait for all work; report a problem if no work succeeds for `seconds`.

        Failures do not count: with a lake that hangs, each of many logs fails after a minute.
        """
        with self._changed:
            succeeded, deadline = self._succeeded, time.monotonic() + seconds
            while pending := [*self._running, *self._waiting]:
                log.debug(
                    "%s: waits for %d writes, first: %s", self._name, len(pending), pending[0]
                )
                self._changed.wait(max(deadline - time.monotonic(), 0.0))
                if self._succeeded > succeeded:
                    succeeded, deadline = self._succeeded, time.monotonic() + seconds
                elif time.monotonic() >= deadline:
                    self._problems.append(
                        f"not written to the lake within {seconds:g} s: {', '.join(pending[:3])}"
                        f"{f' and {len(pending) - 3} more' if len(pending) > 3 else ''}"
                    )
                    return

    def problems(self) -> tuple[str, ...]:
        """Return the problems since the last call, the first ones of many."""
        with self._changed:
            problems, self._problems = self._problems, []
            unnamed, self._unnamed_problems = self._unnamed_problems, 0
        if unnamed:
            problems.append(f"{unnamed} more writes to the lake failed")
        return tuple(problems)

    def _start(self, key: str, work: Work) -> None:
        self._waiting[key] = work
        self._start_thread()

    def _start_thread(self) -> None:
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
                if problem is None:
                    self._succeeded += 1
                else:
                    log.info("%s: %s failed: %s", self._name, key, problem)
                    if len(self._problems) < _MAX_PROBLEMS:
                        self._problems.append(problem)
                    else:
                        self._unnamed_problems += 1
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
