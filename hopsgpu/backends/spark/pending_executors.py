"""Executors that have not arrived: pending ones, and containers that ended unexpectedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.backends.gang_request import AcquisitionClock, Request, Watcher
from hopsgpu.backends.spark.failing_hosts import FailingHosts
from hopsgpu.core import wait_reasons
from hopsgpu.core.gang import GangState, backoff_seconds, is_failing_repeatedly
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason


class EndedContainers:
    """The containers that YARN granted and that have ended unexpectedly."""

    def __init__(self, failing: FailingHosts) -> None:
        self._failing = failing
        self._hosts: dict[str, str] = {}
        self._held: set[str] = set()
        self._seen: set[str] = set()
        self._expected: set[str] = set()
        self._lost: list[str] = []
        self._wanted = 0

    @property
    def count(self) -> int:
        return len(self._lost)

    def update(self, held: Mapping[str, str], wanted: int, arrived: Collection[str] = ()) -> None:
        """Record which containers exist now.

        YARN grants more than was requested if Spark repeats a request before it receives the grant.
        Spark's application master releases the surplus before anything starts in it.

        Args:
            wanted: number of containers that Spark wants to have.
            arrived: IDs of the containers whose executors have ever arrived.
        """
        # Spark may have wanted fewer when the surplus was granted than it wants now.
        surplus = len(self._held) - min(wanted, self._wanted)
        self._wanted = wanted
        if self._held and surplus > 0:
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

    def with_exits(self, why: WaitReason = NO_WAIT) -> WaitReason:
        """Return a reason with the containers that have ended, which come first."""
        if not self._lost:
            return why
        hosts = [self._hosts[container] for container in self._lost]
        exits = (self._failing.exit_of(container) for container in reversed(self._lost))
        cause = next(filter(None, exits), None)
        return wait_reasons.ended_executors(
            hosts,
            self._lost[-1],
            why,
            "" if cause is None else cause.reason,
            "" if cause is None else cause.remedy,
        )


class _NotingClock(AcquisitionClock):
    """An `AcquisitionClock` whose reports name the executors that ended."""

    def __init__(
        self, request: Request, since: float | None, add_exits: Callable[[WaitReason], WaitReason]
    ) -> None:
        super().__init__(request, since)
        self._with_exits = add_exits

    def report(self, hosts: Sequence[str], why: WaitReason) -> None:
        super().report(hosts, self._with_exits(why))


class PendingExecutors:
    """The executors of a search or an elastic gang that were requested and have not arrived.

    Args:
        image: container image of the executors, or None.
    """

    def __init__(self, failing: FailingHosts, image: str | None = None) -> None:
        self._image = image
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
        self._clock = _NotingClock(request, self._since, self.with_exits)
        return self._clock

    def check(self) -> None:
        if self._clock is not None:
            self._clock.check_time()

    def report(self, why: WaitReason) -> None:
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
        self, held: Mapping[str, str], leaving: Collection[str], requested: int, target: int
    ) -> tuple[int, WaitReason]:
        """Return how many executors YARN has not granted, and what the missing ones do.

        Args:
            leaving: IDs of the containers that were released.
            requested: number of executors that exist or were requested.
            target: number of executors that Spark wants to have.
        """
        self._ended.update(held, min(requested, target) + len(leaving), self._seen)
        staying = {id_: host for id_, host in held.items() if id_ not in leaving}
        if missing := max(requested - len(staying), 0):
            return missing, wait_reasons.granted_part(requested - missing, requested, NO_WAIT)
        starting = [host for id_, host in staying.items() if id_ not in self._seen]
        ready = [host for id_, host in staying.items() if id_ in self._seen]
        return 0, wait_reasons.starting_executors(starting, ready, self._image)

    def with_exits(self, why: WaitReason) -> WaitReason:
        if self._ended.count or not self._earlier:
            return self._ended.with_exits(why)
        return why.with_details(f"before that, {self._earlier}")

    def give_back(self, waiting: int, now: float, chance: float) -> WaitReason:
        """Give the requests back if executors fail repeatedly; return the reason, or `NO_WAIT`.

        Other gangs then go first. Earlier failures no longer count afterwards.
        """
        if not waiting or not is_failing_repeatedly(self._ended.count, waiting):
            return NO_WAIT
        self._given_back += 1
        self._asks_at = now + backoff_seconds(self._given_back, chance)
        self._earlier = str(self._ended.with_exits())
        self._ended.forget()
        return wait_reasons.withdrew_requests(waiting, self._given_back)

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
    on_wait: Callable[[WaitReason], None]

    def state(self, state: GangState, hosts: Sequence[str], why: WaitReason = NO_WAIT) -> None:
        self.on_wait(why)

    def mark(self, point: str) -> None:
        return

    def on_executors_arrived(self, times: Sequence[float]) -> None:
        return

    def on_parked(self, hosts: Sequence[str]) -> None:
        return

    def warn(self, text: str) -> None:
        self.watcher.warn(text)
