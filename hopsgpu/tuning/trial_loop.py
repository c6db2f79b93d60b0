"""The main loop of what runs trials on executors that arrive and leave, in one thread.

It performs what `scheduler` decides; a subclass knows what a trial is.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.control.events import Event
from hopsgpu.core.gang import Exclusions, GangState, backoff_seconds
from hopsgpu.errors import Cancelled, HopsGpuError
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.tuning.executors_board import ExecutorsBoard
from hopsgpu.tuning.scheduler import Decision, Placement, Start
from hopsgpu.tuning.slot_run import SlotRun

log = logging.getLogger(__name__)

# How often the loop checks for what no event announces: that executors can no longer arrive, that
# the run was cancelled, or that its time is over.
_LOOK_SECONDS = 0.25
# A thread that has an event waits one interval for each other thread that computes. Python's
# default, 5 ms, is several times what the driver needs to start a trial.
_SWITCH_SECONDS = 0.0005
_LOGS_SECONDS = 60.0
_MOST_TAKEN = 256

# News of the trials, which a subclass defines.
N = TypeVar("N")


@contextlib.contextmanager
def quick_switching() -> Iterator[None]:
    """Let threads that start trials interrupt threads that compute sooner, within the context."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        if before > _SWITCH_SECONDS:  # else another search set the interval, and resets it
            sys.setswitchinterval(before)


class TrialLoop(ABC, Generic[N]):
    """Runs trials on executors; its thread is the only one that decides.

    Args:
        active: the run.
        placement: the scheduler's state.
        timeout: seconds that the trials may take in all, or None.
    """

    def __init__(
        self, active: ActiveRun[ExecutorsBoard], placement: Placement, timeout: float | None
    ) -> None:
        self._active = active
        self._background = active.background
        self._directory = active.directory()
        # Read once, because Spark takes a millisecond to return it.
        self._interface = active.application.interface
        self._placement = placement
        self._timeout = timeout
        self._deadline: float | None = None
        self._python_env: PythonEnv | None = None
        self._error: BaseException | None = None
        self._given_back = 0
        self._has_begun = False
        self._looked = float("-inf")
        self._ending: list[SlotRun] = []
        self._inbox: queue.SimpleQueue[Event | N] = queue.SimpleQueue()

    @property
    def run_id(self) -> str:
        """Return the id of the run."""
        return self._active.run_id

    @property
    @abstractmethod
    def _running(self) -> Iterable[SlotRun]:
        """Return the ranks that run."""

    @abstractmethod
    def _start(self, start: Start, allocator: ElasticAllocator, now: float) -> None:
        """Start a trial as decided."""

    @abstractmethod
    def _handle(self, news: N, allocator: ElasticAllocator) -> None:
        """Handle news of the trials."""

    @abstractmethod
    def _late(self, timeout: float) -> None:
        """Handle that the time is over; the trials are being stopped."""

    def _prepare(self, decision: Decision, now: float) -> None:
        """Do what else is decided, after starts and releases."""

    def _stop(self) -> None:
        """Stop the running trials, because no more may start."""
        for running in self._running:
            running.stop()

    def _let_go(self, keys: tuple[int, ...], allocator: ElasticAllocator) -> None:
        """Give back executors on which no trial runs."""
        allocator.release_executors(keys)

    def _lost(self, key: int) -> None:
        """Handle that an executor is gone; the trials there hear of it themselves."""

    def _observe(self, allocator: ElasticAllocator) -> None:
        """Check for what no event announces."""

    def _patience(self, now: float) -> float:
        """Return in how many seconds the loop must decide again, without an event."""
        return _LOOK_SECONDS

    def _close(self) -> None:
        """Finish, before the executors are released, whether or not an error ended the loop."""

    def run(self, allocator: ElasticAllocator, python_env: PythonEnv | None) -> None:
        """Run all trials on executors that arrive and leave.

        Args:
            allocator: acquires and releases the executors.
            python_env: Python environment of the ranks, or None.

        Raises:
            HopsGpuError: an error ended the run; raised once no trial runs.
        """
        self._python_env = python_env
        if self._timeout is not None:
            self._deadline = time.monotonic() + self._timeout
        with quick_switching(), allocator.server.listening(self._inbox.put):
            try:
                while not self._step(allocator):
                    pass
            finally:
                # No trial is left here, unless an error of this loop ended it.
                for running in self._running:
                    running.stop()
                self._close()
        for ending in self._ending:
            ending.join(_LOGS_SECONDS)
        self._active.board.mark("returned")
        if self._error is not None:
            raise self._error

    def _step(self, allocator: ElasticAllocator) -> bool:
        """Decide, perform the decision, and handle what arrives; return whether all is over."""
        now = time.monotonic()
        decision = self._placement.decide(now)
        self._perform(decision, allocator, now)
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look(allocator, decision)
        if decision.over and not self._awaits_more():
            return True
        with contextlib.suppress(queue.Empty):
            patience = min(_LOOK_SECONDS, self._patience(time.monotonic()))
            self._take(self._inbox.get(timeout=patience), allocator)
            # One decision for all that arrived together.
            for _ in range(_MOST_TAKEN):
                self._take(self._inbox.get_nowait(), allocator)
        return False

    def _awaits_more(self) -> bool:
        """Return whether something is still to end although no trial is left."""
        return False

    def _perform(self, decision: Decision, allocator: ElasticAllocator, now: float) -> None:
        for start in decision.starts:
            self._placement.started(start, now)
            self._start(start, allocator, now)
        allocator.set_wanted(decision.wanted, decision.at_once)
        if decision.release:
            log.info(
                "%s: gives back %d executors; needs %d",
                self.run_id,
                len(decision.release),
                decision.wanted,
            )
            self._given_back += 1
            self._let_go(decision.release, allocator)
            pause = backoff_seconds(self._given_back, random.random())  # noqa: S311
            self._placement.released(decision.release, now, pause)
        self._prepare(decision, now)
        if decision.stop:
            self._stop()

    def _begin(self) -> None:
        """Record that the first ranks are started."""
        if not self._has_begun:
            self._has_begun = True
            for state in (GangState.GRANTED, GangState.READY, GangState.STARTING):
                self._active.board.state(state)

    def _look(self, allocator: ElasticAllocator, decision: Decision) -> None:
        """Check for what no event announces, and update the display."""
        try:
            allocator.check()
        except HopsGpuError as error:
            self._fail(error)
        if self._active.cancelled.is_set():
            self._fail(Cancelled(f"{self.run_id} was cancelled; its ranks were stopped"))
        if self._deadline is not None and time.monotonic() >= self._deadline:
            assert self._timeout is not None, "run() set the deadline by it"
            self._deadline = None
            self._placement.closing = True
            self._late(self._timeout)
        board = self._active.board
        board.executors(
            allocator,
            len(allocator.ready_executors),
            max(decision.wanted, len(allocator.ready_executors)),
        )
        self._observe(allocator)
        board.show()

    def _fail(self, error: BaseException) -> None:
        """End the run by an error; only the first error counts."""
        if self._error is None:
            log.info("%s: ends by an error: %s", self.run_id, type(error).__name__)
            self._error = error
        self._placement.closing = True

    def _take(self, item: Event | N, allocator: ElasticAllocator) -> None:
        if isinstance(item, Event):
            self._hear(item, allocator)
        else:
            self._handle(item, allocator)

    def _hear(self, event: Event, allocator: ElasticAllocator) -> None:
        now = time.monotonic()
        try:
            container = allocator.handle_event(event)
        except HopsGpuError as error:
            self._fail(error)
            return
        if event.message is None:
            # The trials there get this event themselves.
            self._placement.gone(event.peer, now)
            self._lost(event.peer)
        if container is not None:
            self._active.board.mark("granted")
            self._placement.came(container.key, container.host, now)
        self._looked = float("-inf")

    def _ended(self, running: SlotRun, allocator: ElasticAllocator) -> None:
        """Take what the end of ranks says about the run, and about the place where they ran."""
        self._ending = [one for one in (*self._ending, running) if one.is_running]
        if running.fatal is not None:
            self._fail(running.fatal)
        if running.avoid.is_any:
            self._avoid(running.avoid, allocator)

    def _avoid(self, blamed: Exclusions, allocator: ElasticAllocator) -> None:
        """Start no more trials on a GPU or node that failed, where they would fail too."""
        log.info("%s: excludes %s", self.run_id, blamed)
        try:
            excluded = allocator.exclude(allocator.request.exclusions | blamed)
        except HopsGpuError as error:
            self._fail(error)
            return
        for key in excluded:
            # Running trials that share the executor are not stopped.
            self._placement.gone(key, time.monotonic())
