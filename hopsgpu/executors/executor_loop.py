"""The main loop of a run whose executors arrive and leave one by one, in one thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.control.events import Event
from hopsgpu.core.gang import Exclusions, GangExecutor
from hopsgpu.errors import Cancelled, HopsGpuError
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.status_board import StatusBoard
from hopsgpu.units import count_of

log = logging.getLogger(__name__)

# Poll for what no event announces: that executors can no longer arrive, or a cancellation.
POLL_SECONDS = 0.25
_MAX_EVENTS = 256


class ExecutorLoop(ABC):
    """Decides what a run does on its executors; its thread is the only one that decides.

    Attributes:
        allocator: acquires and releases the executors; `run` sets it.
    """

    allocator: ElasticAllocator

    def __init__(self, active: ActiveRun[StatusBoard]) -> None:
        self._active = active
        self._error: BaseException | None = None
        self._polled_at = float("-inf")
        self._inbox: queue.SimpleQueue[Event | Callable[[], None]] = queue.SimpleQueue()

    @property
    def run_id(self) -> str:
        return self._active.run_id

    @abstractmethod
    def _decide(self, now: float) -> bool:
        """Decide, and perform the decision; return whether the run needs no more executors."""

    @abstractmethod
    def _on_arrival(self, executor: GangExecutor, now: float) -> None:
        """Handle that an executor is ready."""

    @abstractmethod
    def _on_loss(self, key: int, now: float) -> None:
        """Handle that an executor was lost; the ranks on it get the event themselves."""

    @abstractmethod
    def _on_exclusion(self, key: int, now: float) -> None:
        """Handle that an executor gets no more ranks; those that run on it are not stopped."""

    @abstractmethod
    def _on_error(self) -> None:
        """Start no more ranks, because an error ended the run."""

    @abstractmethod
    def _on_poll(self) -> None:
        """Poll what no event announces, and record the executors on the run's board."""

    @abstractmethod
    def _close(self) -> None:
        """Stop ranks that an error of this loop left; called before the executors are released."""

    def _on_shortage(self, error: HopsGpuError) -> None:
        """Handle that no more executors can arrive."""
        self._fail(error)

    def _seconds_until_due(self, now: float) -> float:
        """Return in how many seconds the loop must decide again, without an event."""
        return POLL_SECONDS

    def post(self, handle: Callable[[], None]) -> None:
        """Have a function called in the loop's thread; may be called from any thread."""
        self._inbox.put(handle)

    def run(self, allocator: ElasticAllocator) -> None:
        """Run ranks on executors that arrive and leave, until the run needs no more executors.

        Raises:
            HopsGpuError: an error ended the run; raised once no rank runs.
        """
        self.allocator = allocator
        with allocator.server.listening(self._inbox.put):
            try:
                while not self._step():
                    pass
            finally:
                self._close()
        if self._error is not None:
            raise self._error

    def _step(self) -> bool:
        """Decide, and handle what arrives; return whether the run needs no more executors."""
        now = time.monotonic()
        if now - self._polled_at >= POLL_SECONDS:
            self._polled_at = now
            self._poll()
        if self._decide(time.monotonic()):
            return True
        with contextlib.suppress(queue.Empty):
            seconds = min(POLL_SECONDS, self._seconds_until_due(time.monotonic()))
            self._handle(self._inbox.get(timeout=seconds))
            # One decision for all that arrived together.
            for _ in range(_MAX_EVENTS):
                self._handle(self._inbox.get_nowait())
        return False

    def _handle(self, item: Event | Callable[[], None]) -> None:
        if isinstance(item, Event):
            self._on_event(item)
        else:
            item()

    def _on_event(self, event: Event) -> None:
        """Handle an event of the executors' control channel."""
        now = time.monotonic()
        try:
            executor = self.allocator.handle_event(event)
        except HopsGpuError as error:
            self._on_shortage(error)
            return
        if event.message is None:
            self._on_loss(event.peer, now)
        if executor is not None:
            self._on_arrival(executor, now)
        self._polled_at = float("-inf")

    def _poll(self) -> None:
        if self._error is None:
            try:
                self.allocator.raise_if_impossible()
            except HopsGpuError as error:
                self._on_shortage(error)
        if self._active.cancelled.is_set():
            self._fail(Cancelled(f"{self.run_id} was cancelled; its ranks were stopped"))
        self._on_poll()
        self._active.board.show()

    def _fail(self, error: BaseException) -> None:
        """End the run by an error; only the first error counts."""
        if self._error is None:
            log.info("%s: ends by an error: %s", self.run_id, type(error).__name__)
            self._error = error
            self._on_error()

    def _release(self, keys: Collection[int]) -> None:
        """Release executors on which no rank runs."""
        log.info("%s: releases %s", self.run_id, count_of(len(keys), "executor"))
        self.allocator.release_executors(keys)

    def _exclude(self, exclusions: Exclusions) -> None:
        """Start no more ranks on these GPUs and nodes.

        Args:
            exclusions: include all earlier exclusions.
        """
        log.info("%s: excludes %s", self.run_id, exclusions)
        try:
            excluded = self.allocator.exclude(exclusions)
        except HopsGpuError as error:
            self._fail(error)
            return
        for key in excluded:
            self._on_exclusion(key, time.monotonic())
