"""Executors that have not arrived: pending ones, and containers that ended unexpectedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.backends.gang_request import AcquisitionClock, Request, Watcher
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.core.gang import GangState, backoff_seconds, is_failing_repeatedly


class EndedContainers:
    """The containers that YARN granted and that have ended unexpectedly."""

    def __init__(self, failing: FailingHosts) -> None:
        self._failing = failing
        self._hosts: dict[str, str] = {}
        self._held: set[str] = set()
        self._seen: set[str] = set()
        self._expected: set[str] = set()
        self._lost: list[str] = []

    @property
    def count(self) -> int:
        return len(self._lost)

    def update(
        self, held: Mapping[str, str], requested: int, arrived: Collection[str] = ()
    ) -> None:
        """Record which containers exist now.

        YARN grants more than was requested if Spark repeats a request before it receives the grant.
        Spark's application master releases the surplus before anything starts in it.

        Args:
            requested: number of containers that exist or were requested.
            arrived: IDs of the containers whose executors have ever arrived.
        """
        if (surplus := len(self._held) - requested) > 0:
            # Container IDs ascend, so the last ones are the surplus.
            self._expected.update(sorted(self._held.difference(held, arrived))[-surplus:])
        self._held = set(held)
        self._seen |= self._held
        self._hosts.update(held)
        self._lost = sorted(self._seen.difference(held, arrived, self._expected))
        for container in self._lost:
            self._failing.record_end(container, self._hosts[container], time.monotonic())

    def forget(self) -> None:
        self._seen, self._lost = set(), []

    def expect_exit(self, held: Collection[str] = ()) -> None:
        """Expect the present containers, and `held`, to end: hopsgpu itself releases them."""
        self._expected |= self._held.union(held)

    def with_exit_note(self, *parts: str) -> str:
        lost = self._lost
        if lost:
            where = " and ".join(sorted({self._hosts[container] for container in lost}))
            parts += (
                f"{len(lost)} ended unexpectedly on {where}, see the node's log of {lost[-1]} (a"
                " GPU that cannot be discovered, memory, Python, the node's clock, YARN's"
                " preemption?)",
            )
        return ", ".join(parts)


class _NotingClock(AcquisitionClock):
    """An `AcquisitionClock` whose reports have a note about the executors that ended."""

    def __init__(
        self, request: Request, since: float | None, add_note: Callable[[str], str]
    ) -> None:
        super().__init__(request, since)
        self._with_exit_note = add_note

    def report(self, hosts: Sequence[str], why: str) -> None:
        super().report(hosts, self._with_exit_note(why))


class PendingExecutors:
    """The executors of a search or an elastic gang that were requested and have not arrived."""

    def __init__(self, failing: FailingHosts) -> None:
        self._seen: set[str] = set()
        self._ended = EndedContainers(failing)
        self._earlier = ""
        self._given_back = 0
        self._asks_at = float("-inf")
        self._since: float | None = None
        self._clock: AcquisitionClock | None = None

    def new_clock(self, request: Request, now: float) -> AcquisitionClock:
        """Return the clock for the executors that are requested now.

        Args:
            request: the request, with a timeout if its caller has too few executors. The time
                starts with the first request, even if the request is repeated, and ends once enough
                executors have arrived.
        """
        if request.plan.spec.acquire_timeout is not None and self._since is None:
            self._since = now
        self._clock = _NotingClock(request, self._since, self.with_exit_note)
        return self._clock

    def check(self) -> None:
        if self._clock is not None:
            self._clock.check_time()

    def report(self, why: str) -> None:
        if self._clock is not None:
            self._clock.report((), why)

    def record_connection(self, container: str) -> None:
        """Record that the executor of a container has connected, even if it gets no rank."""
        self._seen.add(container)

    def record_arrival(self) -> None:
        """Record that an executor can run ranks, and forget earlier failures."""
        self._ended.forget()
        self._earlier = ""
        self._given_back = 0
        self._asks_at = float("-inf")
        self._since = None
        if self._clock is not None:
            self._clock.remove_deadline()

    def expect_exit(self, held: Collection[str] = ()) -> None:
        self._ended.expect_exit(held)

    def update(
        self, held: Mapping[str, str], leaving: Collection[str], requested: int
    ) -> tuple[int, str]:
        """Return how many executors YARN has not granted, and where the missing ones are.

        Args:
            leaving: IDs of the containers that were released.
            requested: number of executors that exist or were requested.
        """
        self._ended.update(held, requested + len(leaving), self._seen)
        missing = max(requested - len(set(held).difference(leaving)), 0)
        where = f"YARN has not granted {missing}" if missing else "granted and starting"
        return missing, where

    def with_exit_note(self, why: str) -> str:
        text = self._ended.with_exit_note(why)
        return (
            text
            if self._ended.count or not self._earlier
            else f"{why}; before that, {self._earlier}"
        )

    def give_back(self, waiting: int, now: float, chance: float) -> str:
        """Give the requests back if executors fail repeatedly; return the reason, or "".

        Other gangs then go first. Earlier failures no longer count afterwards.
        """
        if not waiting or not is_failing_repeatedly(self._ended.count, waiting):
            return ""
        self._given_back += 1
        self._asks_at = now + backoff_seconds(self._given_back, chance)
        self._earlier = self._ended.with_exit_note()
        self._ended.forget()
        return f"given back (time {self._given_back}); asks again soon"

    def may_request(self, now: float) -> bool:
        return now >= self._asks_at


@dataclass(frozen=True)
class WaitWatcher:
    """A gang's watcher that passes on only the reason for waiting, and warnings.

    Args:
        watcher: receives the warnings.
        on_wait: notified of the reason for waiting.
    """

    watcher: Watcher
    on_wait: Callable[[str], None]

    def state(self, state: GangState, hosts: Sequence[str], why: str = "") -> None:
        self.on_wait(why)

    def mark(self, point: str) -> None:
        return

    def on_executors_arrived(self, times: Sequence[float]) -> None:
        return

    def on_parked(self, hosts: Sequence[str]) -> None:
        return

    def warn(self, text: str) -> None:
        self.watcher.warn(text)
