"""Decides which item runs on which executor, and how many executors a run requests.

An item is a trial of a search, or a part of a table that is scored. The module is pure: the caller
records events with their time, and performs the decisions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hopsgpu.core.gang import PART_SECONDS

# After this many lost executors, the item itself is the likely cause.
MAX_LOSSES = 3
# Enough proposals at hand for items that end at almost the same time.
_MIN_AHEAD = 2
_AHEAD_SHARE = 8


class ItemEnd(Enum):
    """How an item left its slots.

    A lost, preempted or stopped item has not ended: it is put back.
    """

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    # LOST: its executor was lost, possibly because of the item. PREEMPTED: YARN took the executor,
    # which is not the item's fault.
    LOST = "lost"
    PREEMPTED = "preempted"
    STOPPED = "stopped"


_PUT_BACK = frozenset({ItemEnd.LOST, ItemEnd.PREEMPTED, ItemEnd.STOPPED})


@dataclass(frozen=True)
class PlacementTerms:
    """The bounds of a run's work on its executors.

    Attributes:
        items: total number of items that should end.
        max_running: largest number of items that run at a time.
        min_running: number of items that must be able to run at a time before the first one starts.
        ranks: number of ranks of an item; each rank takes a slot.
        slots: number of slots of an executor. Ranks of an item may share an executor. NCCL does not
            connect ranks on the same GPU, so if items share a GPU, each has one rank.
        max_failures: number of failed items that the run tolerates, or None for any number.
        max_tries: how often an item may fail until it counts as failed; before that it is put back.
        ahead: number of items that an executor gets before it needs them, beside the one that it
            runs; only for items of one rank, on executors of one slot.
    """

    items: int
    max_running: int
    min_running: int = 1
    ranks: int = 1
    slots: int = 1
    max_failures: int | None = None
    max_tries: int = 1
    ahead: int = 0

    @property
    def places(self) -> int:
        """Return how many items, or ranks of items, an executor may have at a time."""
        return self.slots + self.ahead

    def count_executors(self, items: int) -> int:
        """Return how many executors a number of concurrent items needs."""
        return -(-items * self.ranks // self.slots)


@dataclass(frozen=True)
class Slot:
    """A place for one rank: all GPUs of an executor that has one slot, else a share of them.

    Attributes:
        executor: key of the executor's agent.
        index: index of the slot, in [0, slots of an executor).
    """

    executor: int
    index: int


@dataclass(frozen=True)
class Start:
    item: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Decision:
    """The next actions on items and executors.

    Attributes:
        wanted: total number of executors to have.
        at_once: how many of the missing executors must arrive together; otherwise none is kept.
        proposals: number of items to request from what proposes them.
    """

    starts: tuple[Start, ...] = ()
    wanted: int = 0
    at_once: int = 1
    release: tuple[int, ...] = ()
    proposals: int = 0
    should_stop: bool = False
    is_over: bool = False


@dataclass
class _PlacedExecutor:
    host: str
    free: set[int]


@dataclass
class Placement:
    """The known state of a run's executors and items; only recorded events change it.

    Attributes:
        ended: number of ended items, including those of earlier runs that this one resumes.
        waiting: items that were proposed or put back, in the order in which they start.
        requested: number of proposals that were requested and have not arrived.
        is_exhausted: whether no more items will be proposed.
        is_closing: whether no more items may start.
    """

    terms: PlacementTerms
    ended: int = 0
    failures: int = 0
    running: dict[int, tuple[Slot, ...]] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    requested: int = 0
    is_exhausted: bool = False
    is_closing: bool = False
    _executors: dict[int, _PlacedExecutor] = field(default_factory=dict)
    _tries: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _losses: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _has_gathered: bool = False
    # Since when there are idle executors, but too few free slots to start an item.
    _partial_since: float | None = None
    _requests_again_at: float = float("-inf")

    @property
    def executors(self) -> Collection[int]:
        return self._executors.keys()

    @property
    def has_failed(self) -> bool:
        """Return whether more items failed than the run tolerates."""
        most = self.terms.max_failures
        return most is not None and self.failures > most

    @property
    def taken_slots(self) -> Mapping[int, int]:
        """Return how many slots of each executor are taken."""
        return {key: self.terms.places - len(e.free) for key, e in self._executors.items()}

    def add_executor(self, key: int, host: str, now: float) -> None:
        self._executors[key] = _PlacedExecutor(host, set(range(self.terms.places)))
        self._update_partial_since(now)

    def remove_executor(self, key: int, now: float) -> None:
        self._executors.pop(key, None)
        self._update_partial_since(now)

    def add_item(self, item: int) -> None:
        self.requested -= 1
        self.waiting.append(item)

    def record_decline(self) -> None:
        """Record that a proposed item was rejected; it counts as ended."""
        self.requested -= 1
        self.ended += 1

    def record_exhaustion(self) -> None:
        """Record that a requested proposal will not arrive, and no other one either."""
        self.requested -= 1
        self.is_exhausted = True

    def record_start(self, start: Start, now: float) -> None:
        self.waiting.remove(start.item)
        self.running[start.item] = start.slots
        self._tries[start.item] += 1
        for slot in start.slots:
            self._executors[slot.executor].free.discard(slot.index)
        self._has_gathered = True
        self._update_partial_since(now)

    def count_tries(self, item: int) -> int:
        return self._tries[item]

    def record_end(self, item: int, how: ItemEnd, now: float) -> ItemEnd:
        """Record that all ranks of an item are gone.

        An item that lost its executor or was stopped is put back and is the next to start. An item
        counts as failed after three losses that YARN did not cause, or as many failures as the
        terms allow.

        Returns:
            How the end counts: `how`, or failed.
        """
        for slot in self.running.pop(item):
            if slot.executor in self._executors:
                self._executors[slot.executor].free.add(slot.index)
        if how in (ItemEnd.LOST, ItemEnd.FAILED):
            self._losses[item] += 1
            most = MAX_LOSSES if how is ItemEnd.LOST else self.terms.max_tries
            how = ItemEnd.FAILED if self._losses[item] >= most else ItemEnd.LOST
        if how in _PUT_BACK:
            self.waiting.appendleft(item)
        else:
            self.ended += 1
            self.failures += how is ItemEnd.FAILED
        self._update_partial_since(now)
        return how

    def record_release(self, keys: Iterable[int], now: float, pause: float) -> None:
        """Record that executors were released as decided.

        Args:
            pause: seconds without new requests, so that other gangs go first; applies if the
                executors were released because no item could start on them.
        """
        if self._partial_since is not None and now - self._partial_since >= PART_SECONDS:
            self._requests_again_at = now + pause
        for key in keys:
            self._executors.pop(key, None)
        self._update_partial_since(now)

    def _update_partial_since(self, now: float) -> None:
        # Only idle executors count: the free slots of a busy executor cannot be released.
        is_partial = bool(self._idle_executors()) and self._count_free() < self._count_needed()
        if not is_partial:
            self._partial_since = None
        elif self._partial_since is None:
            self._partial_since = now

    def _count_free(self) -> int:
        return sum(len(executor.free) for executor in self._executors.values())

    def _count_needed(self) -> int:
        """Return how many free slots it takes to start an item."""
        return self._min_items() * self.terms.ranks

    def _min_items(self) -> int:
        """Return how many items must be able to start together, at most all that are left."""
        if self._has_gathered:
            return 1
        return min(self.terms.min_running, max(self._count_remaining(), 1))

    def _count_remaining(self) -> int:
        """Return the number of items that have not ended, including those not proposed yet."""
        return len(self.running) + len(self.waiting) + self.requested + self._count_unrequested()

    def decide(self, now: float) -> Decision:
        """Return what to do now."""
        # Fewer items are left than at the last event if no more of them are proposed.
        self._update_partial_since(now)
        unrequested, remaining = self._count_unrequested(), self._count_remaining()
        if self.is_closing or self.has_failed or not remaining:
            return Decision(
                should_stop=bool(self.running),
                is_over=not self.running,
                release=tuple(self._idle_executors()),
            )
        starts = self._choose_starts()
        starting = {slot.executor for start in starts for slot in start.slots}
        wanted = self.terms.count_executors(
            min(self.terms.max_running, remaining - self._count_ahead())
        )
        idle = [key for key in self._idle_executors() if key not in starting]
        release = idle[: max(len(self._executors) - wanted, 0)]
        if self._is_stuck(now) and not starts:
            release, wanted = idle, len(self._executors) - len(idle)
        elif now < self._requests_again_at:
            wanted = min(wanted, len(self._executors))
        return Decision(
            starts=starts,
            wanted=wanted,
            at_once=self._count_at_once(starts),
            release=tuple(release),
            proposals=min(
                unrequested, max(self._count_ready_wanted() - len(self.waiting) - self.requested, 0)
            ),
        )

    def _count_ahead(self) -> int:
        """Return how many items executors have been given before they need them."""
        if not self.terms.ahead:
            return 0
        return sum(max(count - self.terms.slots, 0) for count in self.taken_slots.values())

    def _is_stuck(self, now: float) -> bool:
        """Return whether idle executors have waited too long for others to start an item with."""
        return self._partial_since is not None and now - self._partial_since >= PART_SECONDS

    def _count_at_once(self, starts: tuple[Start, ...]) -> int:
        """Return how many more executors an item needs, given the slots that are left over."""
        left_over = self._count_free() - len(starts) * self.terms.ranks
        short = self._count_needed() - left_over
        return -(-(short if short > 0 else self._count_needed()) // self.terms.slots)

    def _count_unrequested(self) -> int:
        if self.is_exhausted:
            return 0
        assigned = self.ended + len(self.running) + len(self.waiting) + self.requested
        return max(self.terms.items - assigned, 0)

    def _count_ready_wanted(self) -> int:
        """Return how many proposals to have ready: for free slots, and for items that end soon."""
        slots = len(self._executors) * self.terms.slots // self.terms.ranks
        places = min(max(slots, self.terms.min_running), self.terms.max_running)
        free = max(places - len(self.running), 0)
        ahead = max(_MIN_AHEAD, places // _AHEAD_SHARE)
        return free + min(ahead, places)

    def _idle_executors(self) -> list[int]:
        """Return the executors without a running item, the latest arrival first."""
        all_places = self.terms.places
        return [key for key, e in reversed(self._executors.items()) if len(e.free) == all_places]

    def _choose_starts(self) -> tuple[Start, ...]:
        free = {key: set(e.free) for key, e in self._executors.items() if e.free}
        count = sum(map(len, free.values()))
        room = self.terms.max_running * self.terms.places // self.terms.slots - len(self.running)
        if not self._has_gathered and count < self._count_needed():
            return ()
        starts: list[Start] = []
        for item in self.waiting:
            if room <= len(starts) or count < self.terms.ranks:
                break
            if self.terms.ahead and self._is_early(free, len(self.waiting) - len(starts)):
                break
            starts.append(Start(item, self._choose_slots(free)))
            count -= self.terms.ranks
        return tuple(starts)

    def _is_early(self, free: Mapping[int, set[int]], waiting: int) -> bool:
        """Return whether to keep an item back for an executor that will have none before long."""
        emptiest = self.terms.places - max(map(len, free.values()))
        return emptiest >= self.terms.slots and waiting <= len(self._executors)

    def _choose_slots(self, free: dict[int, set[int]]) -> tuple[Slot, ...]:
        """Take slots for an item from the free ones: near each other, and on fuller executors."""
        chosen: list[Slot] = []
        while len(chosen) < self.terms.ranks:
            key = self._choose_executor(free, self.terms.ranks - len(chosen), chosen)
            index = min(free[key])
            free[key].discard(index)
            if not free[key]:
                del free[key]
            chosen.append(Slot(key, index))
        return tuple(chosen)

    def _choose_executor(
        self, free: Mapping[int, set[int]], wanted: int, chosen: Collection[Slot]
    ) -> int:
        if self.terms.ahead:
            return max(free, key=lambda key: len(free[key]))
        if self.terms.ranks == 1:
            # On the fullest executor, so that others become idle and can be released.
            return min(free, key=lambda key: len(free[key]))
        on_hosts: dict[str, int] = defaultdict(int)
        for key, indexes in free.items():
            on_hosts[self._executors[key].host] += len(indexes)

        near = {self._executors[slot.executor].host for slot in chosen}

        def preference(key: int) -> tuple[bool, bool, int]:
            host = self._executors[key].host
            room = on_hosts[host]
            # The node with the fewest free slots that suffice, else the one with the most.
            return host not in near, room < wanted, room if room >= wanted else -room

        return min(free, key=preference)
