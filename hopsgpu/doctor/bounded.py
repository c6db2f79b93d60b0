"""What may hang is waited for no longer than a person would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Bounded(Generic[T]):
    """Something that is done in a thread of its own, begun at once.

    A daemon: where it hangs, the process ends without it.
    """

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in whoever asks
            self._error = error
        finally:
            self._done.set()

    def result(self, seconds: float) -> T:
        """Its result, or what it raised.

        Raises:
            TimeoutError: it takes longer; it may be asked again.
        """
        if not self._done.wait(seconds):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._results[0]
