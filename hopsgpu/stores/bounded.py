"""What may hang is waited for no longer than a person would."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

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
            # The error's traceback has this frame: what it holds, connections too, would wait for
            # a collection.
            del self

    def wait(self, seconds: float) -> bool:
        """Waits for its end, at most so long; whether it has ended."""
        return self._done.wait(seconds)

    def result(self, seconds: float) -> T:
        """Its result, or what it raised.

        Raises:
            TimeoutError: it takes longer; it may be asked again.
        """
        if not self.wait(seconds):
            raise TimeoutError
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self
        return self._results[0]


class Hand:
    """A thread that does one thing after another, each waited for no longer than is said.

    A daemon, as `Bounded`; once something took too long, the hand is of no more use.
    """

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Hand:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._asked.put(None)

    def do(self, work: Callable[[], T], seconds: float) -> T:
        """Its result, or what it raised.

        Raises:
            TimeoutError: it takes longer, and goes on.
        """
        self._asked.put(work)
        try:
            result, error = self._done.get(timeout=seconds)
        except queue.Empty as late:
            raise TimeoutError from late
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result  # type: ignore[no-any-return]

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            try:
                self._done.put((work(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in whoever asks
                self._done.put((None, error))
            del work  # what it holds is large
