"""The loop of a run that places items on executors: trials of a search, or parts of a table."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from hopsgpu.attempts.rank_call import Call, PackedFunction, script_name
from hopsgpu.backends.elastic_allocator import ElasticAllocator
from hopsgpu.core.gang import GangExecutor, GangState, backoff_seconds
from hopsgpu.executors.executor_loop import ExecutorLoop
from hopsgpu.executors.executors_board import ExecutorsBoard
from hopsgpu.executors.item_placement import Decision, Placement, Start
from hopsgpu.executors.rank_group_run import RankGroupRun
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.runs.active_run import ActiveRun

log = logging.getLogger(__name__)

# A thread that has an event waits one interval for each other thread that computes. Python's
# default, 5 ms, is several times what the driver needs to start an item.
_SWITCH_SECONDS = 0.0005
_LOGS_SECONDS = 60.0


@contextlib.contextmanager
def quick_switching() -> Iterator[None]:
    """Let threads that start items interrupt threads that compute sooner, within the context."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        if before > _SWITCH_SECONDS:  # else another run set the interval, and resets it
            sys.setswitchinterval(before)


class PlacementLoop(ExecutorLoop):
    """Performs what a `Placement` decides; a subclass knows what an item is.

    Args:
        timeout: seconds that the items may take in all, or None.
    """

    def __init__(
        self,
        active: ActiveRun[ExecutorsBoard],
        placement: Placement,
        timeout: float | None,
        python_env: PythonEnv | None,
    ) -> None:
        super().__init__(active)
        self._executors_board = active.board
        self._directory = active.directory()
        # Read once, because Spark takes a millisecond to return it.
        self._interface = active.application.interface
        self._log_limit = active.application.log_limit
        self._placement = placement
        self._timeout = timeout
        self._python_env = python_env
        self._deadline: float | None = None
        self._wanted = 0
        self._partial_releases = 0
        self._has_started = False
        self._ending: list[RankGroupRun] = []

    @property
    @abstractmethod
    def _running(self) -> Iterable[RankGroupRun]:
        """Return the runs whose end was not handled yet, including those that are being stopped."""

    @abstractmethod
    def _start(self, start: Start, now: float) -> None:
        """Start an item as decided."""

    @abstractmethod
    def _on_timeout(self, timeout: float) -> None:
        """Handle that the items took too long; they are being stopped."""

    def _is_ending(self) -> bool:
        """Return whether something is still to end although no item is left."""
        return False

    def _on_decision(self, decision: Decision, now: float) -> None:
        """Do what else follows from a decision, after starts and releases."""

    def run(self, allocator: ElasticAllocator) -> None:
        if self._timeout is not None:
            self._deadline = time.monotonic() + self._timeout
        with quick_switching():
            super().run(allocator)

    @contextlib.contextmanager
    def queuing_logs(self) -> Iterator[None]:
        """On exit, wait at most a minute until the uploads of all logs are queued.

        Enter this before the executors are allocated, so that they are released before the wait.
        """
        try:
            yield
        finally:
            deadline = time.monotonic() + _LOGS_SECONDS
            for ending in self._ending:
                ending.join(max(deadline - time.monotonic(), 0.0))

    def _close(self) -> None:
        for running in self._running:
            running.stop()
        self._active.board.mark("returned")

    def _decide(self, now: float) -> bool:
        decision = self._placement.decide(now)
        for start in decision.starts:
            self._placement.record_start(start, now)
            self._start(start, now)
        self._wanted = decision.wanted
        self.allocator.set_wanted(decision.wanted, decision.at_once)
        if decision.release:
            self._partial_releases += 1
            self._release(decision.release)
            pause = backoff_seconds(self._partial_releases, random.random())  # noqa: S311
            self._placement.record_release(decision.release, now, pause)
        self._on_decision(decision, now)
        if decision.should_stop:
            for running in self._running:
                running.stop()
        return decision.is_over and not self._is_ending()

    def _on_arrival(self, executor: GangExecutor, now: float) -> None:
        self._active.board.mark("granted")
        self._placement.add_executor(executor.key, executor.host, now)

    def _on_loss(self, key: int, now: float) -> None:
        self._placement.remove_executor(key, now)

    def _on_exclusion(self, key: int, now: float) -> None:
        self._placement.remove_executor(key, now)

    def _on_error(self) -> None:
        self._placement.is_closing = True

    def _on_poll(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            assert self._timeout is not None, "run() set the deadline by it"
            self._deadline = None
            self._placement.is_closing = True
            self._on_timeout(self._timeout)
        ready, most = len(self.allocator.ready_executors), self._wanted
        self._executors_board.record_executors(
            self.allocator.held_count, ready, max(most, ready), self.allocator.wait_reason
        )

    def _make_call(
        self, function: PackedFunction, kind: str, number: int, attempt: int = 0, **options: Any
    ) -> Call:
        """Return the call of an item's ranks.

        Args:
            kind: "trial" or "worker"; part of the call's id and directory.
            options: further fields of the call.
        """
        return Call(
            self._active.plan,
            function,
            f"{self.run_id}-{kind}-{number}",
            self._directory / f"{kind}s" / str(number),
            attempt,
            interface=self._interface,
            python_env=self._python_env,
            script=script_name(),
            log_limit=self._log_limit,
            **options,
        )

    def _record_first_start(self) -> None:
        if not self._has_started:
            self._has_started = True
            for state in (GangState.GRANTED, GangState.READY, GangState.STARTING):
                self._active.board.state(state)

    def _take_end(self, ended: RankGroupRun) -> None:
        """Take what the end of ranks says about the run, and about the place where they ran."""
        self._ending = [run for run in (*self._ending, ended) if run.is_alive]
        if ended.fatal is not None:
            self._fail(ended.fatal)
        if ended.exclusions.is_any:
            self._exclude(self.allocator.request.exclusions | ended.exclusions)
