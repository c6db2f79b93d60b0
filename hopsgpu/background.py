"""What a run leaves to be done beside it: its record and its logs, on their way to the lake."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from hopsgpu.errors import HopsGpuError

Work = Callable[[], None]


class Background:
    """Does what is put, in order, in a thread of its own, and keeps what went wrong.

    The thread is a daemon, since a lake that hangs must not keep a script alive, and ends when
    nothing is left to do; the next work starts another.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._works: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._open = 0
        self._problems: list[str] = []

    def put(self, work: Work) -> None:
        """Has something done once all that was put before is."""
        with self._changed:
            self._works.put(work)
            self._open += 1
            if self._open == 1:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def flush(self, seconds: float) -> None:
        """Waits until all is done, at most so long; what is not done then is a problem."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._open:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    self._problems.append(
                        f"records or logs are not on the lake yet: it has not answered for"
                        f" {seconds:g} s"
                    )
                    return

    def problems(self) -> tuple[str, ...]:
        """What went wrong since this was asked last."""
        with self._changed:
            found, self._problems = tuple(self._problems), []
        return found

    def _run(self) -> None:
        while True:
            work = self._works.get()
            problem = _done(work)
            with self._changed:
                self._open -= 1
                if problem is not None:
                    self._problems.append(problem)
                self._changed.notify_all()
                if not self._open:
                    return


def _done(work: Work) -> str | None:
    """Does it; what went wrong, or None."""
    try:
        work()
    except HopsGpuError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - told to whoever asks for problems
        return f"{type(error).__name__}: {error}"
    return None
