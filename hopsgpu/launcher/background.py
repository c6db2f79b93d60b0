"""What a run has done beside it: its record and its logs, on their way to the lake."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hopsgpu.errors import HopsGpuError

Work = Callable[[], None]
# A small file takes HDFS half a second, nearly all of it waiting.
_MOST_THREADS = 32
# Each may keep a file open.
_MOST_WAITING = 256
# Leaves room for what may not be refused.
_MOST_OFFERED = 64
_LONGEST_WAIT = 60.0


class Background:
    """Does what is put, several at a time, and keeps what went wrong.

    Works of one key are done one after the other, in order; one that has not begun is replaced by
    the next of its key. The threads are daemons, since a lake that hangs must not keep a script
    alive, and end when nothing is left to do.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: dict[str, Work] = {}
        # Of those that wait for others: the keys of these.
        self._behind: dict[str, set[str]] = {}
        self._running: set[str] = set()
        self._threads = 0
        self._problems: list[str] = []

    def put(self, key: str, work: Work) -> None:
        """Has something done; waits where very much is to be done already, at most a minute."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < _MOST_WAITING, _LONGEST_WAIT)
            self._begin(key, work)

    def offer(self, key: str, work: Work) -> bool:
        """Has something done, unless there is much to be done already; never waits.

        For what is offered again soon. Returns whether it was taken.
        """
        with self._changed:
            if key not in self._waiting and len(self._waiting) >= _MOST_OFFERED:
                return False
            self._begin(key, work)
        return True

    def put_behind(self, key: str, work: Work) -> None:
        """Has something done once all that was put before is done; waits as `put` does.

        Args:
            key: that nothing else has.
            work: to be done.
        """
        with self._changed:
            self._behind[key] = {*self._running, *self._waiting}
        self.put(key, work)

    def flush(self, seconds: float) -> None:
        """Waits until all is done.

        Where nothing was done for so many seconds, what is left is a problem.
        """
        with self._changed:
            while left := [*self._running, *self._waiting]:
                if not self._changed.wait(seconds):
                    self._problems.append(
                        f"not on the lake after {seconds:g} s: {', '.join(left[:3])}"
                        f"{f' and {len(left) - 3} more' if len(left) > 3 else ''}"
                    )
                    return

    def problems(self) -> tuple[str, ...]:
        """What went wrong since this was asked last."""
        with self._changed:
            found, self._problems = tuple(self._problems), []
        return found

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
                    # What waits is of, or behind, a key that another thread is at, which goes on
                    # with it.
                    self._threads -= 1
                    return
                work = self._waiting.pop(key)
                self._behind.pop(key, None)
                self._running.add(key)
            problem = _done(work)
            with self._changed:
                self._running.discard(key)
                if problem is not None:
                    self._problems.append(problem)
                self._changed.notify_all()

    def _is_due(self, key: str) -> bool:
        before = self._behind.get(key, ())
        return key not in self._running and not any(
            other in self._running or other in self._waiting for other in before
        )


def _done(work: Work) -> str | None:
    """Does it; what went wrong, or None."""
    try:
        work()
    except HopsGpuError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - told to whoever asks for problems
        return f"{type(error).__name__}: {error}"
    return None
