"""The reasons, in words, why executors have not arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hopsgpu.backends.gang_request import AcquisitionClock, Request, Watcher
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.core.gang import GangState, backoff_seconds, keeps_failing


class EndedContainers:
    """The containers that YARN granted and that have ended unexpectedly.

    Args:
        failing: records the hosts on which they have ended.
    """

    def __init__(self, failing: FailingHosts) -> None:
        self._failing = failing
        self._hosts: dict[str, str] = {}
        self._held: set[str] = set()
        self._seen: set[str] = set()
        self._excused: set[str] = set()
        self._lost: list[str] = []

    @property
    def count(self) -> int:
        """Return the number of these containers."""
        return len(self._lost)

    def look(self, held: Mapping[str, str], requested: int, came: Collection[str] = ()) -> None:
        """Record which containers exist now.

        YARN grants more than was requested where Spark repeats a request before it hears of the
        grant; Spark's application master releases these before anything starts in them.

        Args:
            held: the containers that YARN shows now, with their hosts.
            requested: number of containers that are here or were requested.
            came: IDs of those whose executors arrived, whatever became of them.
        """
        if (surplus := len(self._held) - requested) > 0:
            # YARN's IDs ascend.
            self._excused.update(sorted(self._held.difference(held, came))[-surplus:])
        self._held = set(held)
        self._seen |= self._held
        self._hosts.update(held)
        self._lost = sorted(self._seen.difference(held, came, self._excused))
        for container in self._lost:
            self._failing.ended(container, self._hosts[container], time.monotonic())

    def forget(self) -> None:
        """Forget these containers, because an executor has arrived."""
        self._seen, self._lost = set(), []

    def excuse(self, held: Collection[str] = ()) -> None:
        """Expect the present containers to end, because hopsgpu itself releases them.

        Args:
            held: IDs of the containers that YARN shows now, besides those that it showed last.
        """
        self._excused |= self._held.union(held)

    def beside(self, *parts: str) -> str:
        """Return the given parts as one text, with a remark about the ended containers."""
        lost = self._lost
        if lost:
            where = " and ".join(sorted({self._hosts[container] for container in lost}))
            parts += (
                f"{len(lost)} ended unexpectedly on {where}, see the node's log of {lost[-1]} (a"
                " GPU that cannot be discovered, memory, Python, the node's clock, YARN's"
                " preemption?)",
            )
        return ", ".join(parts)


class _RemarkingClock(AcquisitionClock):
    """A `AcquisitionClock` whose reports have a remark about the executors that ended."""

    def __init__(
        self, request: Request, since: float | None, add_remark: Callable[[str], str]
    ) -> None:
        super().__init__(request, since)
        self._beside = add_remark

    def report(self, hosts: Sequence[str], why: str) -> None:
        super().report(hosts, self._beside(why))


class PendingExecutors:
    """The executors of a search or an elastic gang that were requested and have not arrived.

    Args:
        failing: records the hosts on which they have ended.
    """

    def __init__(self, failing: FailingHosts) -> None:
        self._seen: set[str] = set()
        self._ended = EndedContainers(failing)
        self._before = ""
        self._given_back = 0
        self._asks_at = float("-inf")
        self._since: float | None = None
        self._clock: AcquisitionClock | None = None

    def clock(self, request: Request, now: float) -> AcquisitionClock:
        """Return the clock for the executors that are requested now.

        Args:
            request: their request, with a timeout if its owner has too few executors. The time
                starts with the first request, however often it is repeated, and ends once enough
                executors have arrived.
            now: the clock's reading.
        """
        if request.plan.spec.acquire_timeout is not None and self._since is None:
            self._since = now
        self._clock = _RemarkingClock(request, self._since, self.beside)
        return self._clock

    def check(self) -> None:
        """Check that waiting may continue.

        Raises:
            GangTimeout: no executor has arrived in time.
        """
        if self._clock is not None:
            self._clock.check_time()

    def report(self, why: str) -> None:
        """Report what the requested executors wait for."""
        if self._clock is not None:
            self._clock.report((), why)

    def connected(self, container: str) -> None:
        """Record that the executor of a container has connected, useful or not."""
        self._seen.add(container)

    def arrived(self) -> None:
        """Record that an executor can run trials, and forget those that ended before it."""
        self._ended.forget()
        self._before = ""
        self._given_back = 0
        self._asks_at = float("-inf")
        self._since = None
        if self._clock is not None:
            self._clock.remove_deadline()

    def excuse(self, held: Collection[str] = ()) -> None:
        """Expect the present containers to end, as `EndedContainers.excuse` does."""
        self._ended.excuse(held)

    def look(
        self, held: Mapping[str, str], leaving: Collection[str], requested: int
    ) -> tuple[int, str]:
        """Return how many executors YARN has not granted, and where the missing ones are.

        Args:
            held: the containers that YARN shows now, with their hosts.
            leaving: IDs of those that were released.
            requested: number of executors that are here or were requested.
        """
        self._ended.look(held, requested + len(leaving), self._seen)
        missing = max(requested - len(set(held).difference(leaving)), 0)
        where = f"YARN has not granted {missing}" if missing else "granted and starting"
        return missing, where

    def beside(self, why: str) -> str:
        """Return a text with a remark about the ended executors."""
        text = self._ended.beside(why)
        return (
            text if self._ended.count or not self._before else f"{why}; before that, {self._before}"
        )

    def give_back(self, waiting: int, now: float, chance: float) -> str:
        """Return why executors are given back now; "" if they are not.

        They are given back if they fail repeatedly, so that other gangs go first. Earlier failures
        no longer count afterwards.

        Args:
            waiting: number of executors that have not arrived.
            now: the clock's reading.
            chance: as for `backoff_seconds`.
        """
        if not waiting or not keeps_failing(self._ended.count, waiting):
            return ""
        self._given_back += 1
        self._asks_at = now + backoff_seconds(self._given_back, chance)
        self._before = self._ended.beside()
        self._ended.forget()
        return f"given back (time {self._given_back}); asks again soon"

    def may_ask(self, now: float) -> bool:
        """Return whether other gangs have gone first for long enough."""
        return now >= self._asks_at


class _Owner(Protocol):
    def waits(self, why: str) -> None: ...


@dataclass(frozen=True)
class WaitWatcher:
    """A gang's watcher that passes on only the reason for waiting, and warnings.

    Args:
        watcher: receives the warnings.
        owner: receives the reason for waiting.
    """

    watcher: Watcher
    owner: _Owner

    def state(self, state: GangState, hosts: Sequence[str], why: str = "") -> None:
        self.owner.waits(why)

    def mark(self, point: str) -> None:
        return

    def on_executors_arrived(self, times: Sequence[float]) -> None:
        return

    def on_parked(self, hosts: Sequence[str]) -> None:
        return

    def warn(self, text: str) -> None:
        self.watcher.warn(text)
