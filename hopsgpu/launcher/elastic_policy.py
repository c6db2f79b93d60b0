"""The decisions of an elastic gang: when a world starts, grows, gives way, and requests executors.

The module is pure: the clock's reading is a parameter. `launcher.elastic_gang` performs the
decisions. Sizes are counted in executors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hopsgpu.core import wait_reasons
from hopsgpu.core.gang import PART_SECONDS, backoff_seconds
from hopsgpu.core.wait_reasons import NO_WAIT, WaitReason

# Wait of the first world for further executors after the latest arrival.
SETTLE_SECONDS = 3.0
# Longest start of a granted executor, on a busy node.
_STARTING_SECONDS = PART_SECONDS
# Further executors are requested this long before they can be used: an executor's start.
_LEAD_SECONDS = 20.0
# Executors that a running world cannot use yet are released after this time.
_SPARE_SECONDS = 60.0
# Assumed duration of a resize until one was measured.
_RESIZE_SECONDS = 10.0
# The first complete checkpoint of a world counts after this time: other ranks may be about to save.
_FIRST_SECONDS = 3.0
# A checkpoint is requested again after this time if the ranks did not save the agreed one. An
# agreement takes 2 minutes at most.
_REQUEST_AGAIN_SECONDS = 150.0
_REFUSED_SECONDS = 10.0
# This many losses without a checkpoint between them end a run.
MAX_LOSSES_IN_A_ROW = 5


class WorldEnd(Enum):
    """Why a world ended.

    Attributes:
        GREW: a larger world follows.
        GAVE_WAY: a smaller world follows, because other gangs wait for its GPUs.
        LOST: executors or ranks were lost; a world of those that are left follows.
        FAILED: a rank failed; a world follows if `retries` are left.
    """

    RETURNED = "returned"
    GREW = "grew"
    GAVE_WAY = "gave way"
    LOST = "lost"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class ElasticTerms:
    """The bounds of an elastic gang.

    Attributes:
        interval: seconds between two growths at least.
        should_give_way: whether it shrinks while other gangs wait for its GPUs.
        is_spread: whether no two executors of a world may share a node.
        run_timeout: seconds that the ranks of one world may take, None for no bound.
    """

    min_executors: int
    max_executors: int
    interval: float = 300.0
    should_give_way: bool = True
    is_spread: bool = False
    run_timeout: float | None = None


@dataclass(frozen=True)
class ElasticDecision:
    """The next actions of an elastic gang.

    Attributes:
        wanted: number of executors to have, including those that have arrived.
        at_once: how many of the missing ones to request together.
        start: keys of the executors of the world to start; empty for none.
        stop_reason: why the running world is to be stopped now, to be resized; None to leave it.
        needs_checkpoint: whether to request a checkpoint of the ranks.
    """

    wanted: int
    at_once: int = 1
    start: tuple[int, ...] = ()
    stop_reason: WorldEnd | None = None
    needs_checkpoint: bool = False
    release: frozenset[int] = frozenset()


@dataclass
class _ElasticExecutor:
    host: str
    arrived_at: float
    warm_since: float | None = None


@dataclass
class _World:
    keys: tuple[int, ...]
    started_at: float
    # Time at which the function ran in all ranks.
    entered_at: float | None = None
    stop_reason: WorldEnd | None = None
    # Time of the decision to resize the world at its next checkpoint; None without one.
    resize_wanted_since: float | None = None
    # Number of executors that the world gets at its next checkpoint.
    growth: int = 0
    # Time at which a checkpoint was requested of the ranks.
    requested_at: float | None = None
    # Whether all ranks have returned; their files may still be published.
    has_returned: bool = False
    checkpoint_times: list[float] = field(default_factory=list)


class DurableCheckpoints:
    """Decides when a world's checkpoint that was reported as complete counts.

    A world's first complete checkpoint may lack the part of a rank that has not saved yet, because
    only saves tell which ranks save. It therefore counts only some seconds later. If the ranks have
    agreed on a step, that step's checkpoint counts once all ranks have passed the step. An earlier
    checkpoint whose upload ends meanwhile does not count.
    """

    def __init__(self) -> None:
        self._agreed: int | None = None
        self._have_passed = False
        self._is_complete = False
        self._first_at: float | None = None
        self._has_first = False

    def record_agreement(self, step: int) -> None:
        """Record that all ranks save at a step, or at the first one after it."""
        self._agreed, self._have_passed, self._is_complete = step, False, False

    def record_passed(self) -> bool:
        """Record that all ranks have passed the agreed step; return whether a checkpoint counts."""
        self._have_passed = True
        return self._is_met()

    def record_save(self, agreed: int | None, now: float) -> bool:
        """Record that a checkpoint is complete; return whether it counts now.

        Args:
            agreed: the last step at which its ranks had been told that all of them save, or None.
                The step of the checkpoint itself says nothing: user code may save under the number
                of an epoch, and ask about batches.
        """
        if self._agreed is not None:
            # Ignore checkpoints saved before the agreed step: a stop now would lose the agreed one.
            self._is_complete |= agreed is not None and agreed >= self._agreed
            return self._is_met()
        if not self._has_first and self._first_at is None:
            self._first_at = now
        return self._has_first

    def _is_met(self) -> bool:
        if not (self._have_passed and self._is_complete):
            return False
        self._agreed, self._has_first = None, True
        return True

    def take_due(self, now: float) -> float | None:
        """Return when the first checkpoint was complete, once it counts; else None."""
        if self._agreed is not None:
            return None
        if self._first_at is None or now < self._first_at + _FIRST_SECONDS:
            return None
        at, self._first_at, self._has_first = self._first_at, None, True
        return at

    def record_refusal(self) -> None:
        """Record that the ranks do not agree, and drop an earlier agreement.

        The ranks may never reach the agreed step: user code may count the steps of each epoch anew,
        or ask about no further step. Afterwards all complete checkpoints count.
        """
        self._agreed, self._have_passed, self._is_complete = None, False, False


class ElasticPolicy:
    """Decides on the worlds of one elastic gang; only one thread uses it.

    Attributes:
        losses: losses without a checkpoint between them; preemptions do not count.
        reclaimed_count: number of executors that waiting gangs need from this gang.
        starting_count: number of executors that the cluster manager has granted and that start.
    """

    def __init__(self, terms: ElasticTerms, now: float) -> None:
        self._terms = terms
        self._executors: dict[int, _ElasticExecutor] = {}
        self._world: _World | None = None
        self._has_started_world = False
        self._last_arrival = now
        self._resized_at = float("-inf")
        self._stopped_at: float | None = None
        self._resize_seconds = _RESIZE_SECONDS
        self._checkpoint_period: float | None = None
        self._last_checkpoint: float | None = None
        self._partial_releases = 0
        # Executors for whose release a world was stopped. They are released even if the waiting
        # gang requests executors at that moment, and so has no ticket in the queue.
        self._promised_count = 0
        # Times from which executors are requested again: without a world, and for a larger world.
        self._requests_at = self._grows_at = float("-inf")
        self.losses = 0
        self.reclaimed_count = 0
        self.starting_count = 0

    @property
    def executor_count(self) -> int:
        return len(self._executors)

    @property
    def warming_count(self) -> int:
        """Return how many executors still import the frameworks."""
        return sum(executor.warm_since is None for executor in self._executors.values())

    @property
    def world(self) -> tuple[int, ...]:
        """Return the keys of the executors of the running world; empty if none runs."""
        return () if self._world is None else self._world.keys

    @property
    def surplus_count(self) -> int:
        """Return how many executors the gang has above its minimum."""
        return max(len(self._executors) - self._terms.min_executors, 0)

    @property
    def giving_count(self) -> int:
        """Return how many executors the running world gives at its next checkpoint."""
        if self._world is None or not self._terms.should_give_way:
            return 0
        return self._count_surplus(self._world)

    @property
    def growing_count(self) -> int:
        """Return how many executors the running world gets at its next checkpoint."""
        return 0 if self._world is None else self._world.growth

    @property
    def stop_reason(self) -> WorldEnd | None:
        """Return why the running world is being stopped, to be resized; None if it is not."""
        return None if self._world is None else self._world.stop_reason

    @property
    def resize_seconds(self) -> float:
        """Return the duration of the last resize, from the stop until all ranks ran again."""
        return self._resize_seconds

    def add_executor(self, key: int, host: str, now: float) -> None:
        """Record the arrival of an executor, which is not warm yet."""
        self._executors[key] = _ElasticExecutor(host, now)
        self._last_arrival = now

    def record_warm(self, key: int, now: float) -> None:
        if key in self._executors and self._executors[key].warm_since is None:
            self._executors[key].warm_since = now

    def remove_executor(self, key: int) -> None:
        self._executors.pop(key, None)

    def record_entry(self, now: float) -> None:
        if self._world is not None and self._world.entered_at is None:
            self._world.entered_at = now
            if self._stopped_at is not None:
                self._resize_seconds = now - self._stopped_at
                self._stopped_at = None

    def record_refusal(self, now: float) -> None:
        """Record that the ranks do not agree on a checkpoint; it is requested again soon."""
        if self._world is not None:
            self._world.requested_at = now + _REFUSED_SECONDS - _REQUEST_AGAIN_SECONDS

    def record_return(self) -> None:
        """Record that all ranks of the world have returned; it is not resized any more."""
        if self._world is not None:
            self._world.has_returned = True

    def record_checkpoint(self, now: float) -> None:
        world = self._world
        if world is None:
            return
        self.losses = 0
        if world.checkpoint_times:
            self._checkpoint_period = now - world.checkpoint_times[-1]
        self._last_checkpoint = now
        world.checkpoint_times.append(now)

    def record_end(self, how: WorldEnd, now: float, *, was_preempted: bool = False) -> None:
        """Record that all ranks of the running world have ended.

        Args:
            was_preempted: whether the cluster manager took executors for a queue that has a right
                to them. This is no failure, and the gang does not request the executors again at
                once.
        """
        self._world = None
        # The remaining executors are kept as long as if they had just arrived.
        self._last_arrival = max(self._last_arrival, now)
        if self._stopped_at is None:
            self._stopped_at = now
        if how is WorldEnd.LOST and not was_preempted:
            self.losses += 1
        if how is WorldEnd.GAVE_WAY or was_preempted:
            # Do not grow before the waiting gang has had time to request the freed GPUs.
            self._grows_at = now + _SPARE_SECONDS
        if how in (WorldEnd.GREW, WorldEnd.GAVE_WAY) or was_preempted:
            self._resized_at = now

    def decide(self, now: float, chance: float = 0.0) -> ElasticDecision:
        """Return what to do next.

        Args:
            chance: as for `backoff_seconds`.
        """
        if self._world is None:
            return self._assemble(now, chance)
        if (how := self._world.stop_reason) is not None:
            is_growth = how is WorldEnd.GREW
            return ElasticDecision(
                wanted=self._terms.max_executors if is_growth else len(self._executors)
            )
        return self._resize(self._world, now)

    def _assemble(self, now: float, chance: float) -> ElasticDecision:
        """Decide, without a world, whether one can start."""
        terms = self._terms
        if now < self._requests_at:
            return ElasticDecision(wanted=0)
        usable, surplus = self._split_usable()
        most = self._max_size(len(usable))
        warm = [key for key in usable if self._executors[key].warm_since is not None]
        if len(warm) >= terms.min_executors:
            # After a world, the next one starts at once, because its executors are idle.
            waited = now - self._last_arrival
            # Do not wait long for an executor that cannot start or import its frameworks.
            are_all_warm = len(warm) == len(usable) and not self.starting_count
            is_settled = are_all_warm or waited >= _STARTING_SECONDS
            if (
                len(warm) >= most
                or (is_settled and waited >= SETTLE_SECONDS)
                or self._has_started_world
            ):
                return self._start(tuple(warm[:most]), surplus, now)
        elif self._executors and now - self._last_arrival >= PART_SECONDS + _STARTING_SECONDS:
            # Release the partial allocation: other gangs may need it.
            self._partial_releases += 1
            self._requests_at = now + backoff_seconds(self._partial_releases, chance)
            return ElasticDecision(wanted=0, release=self._release(list(self._executors)))
        missing = max(terms.min_executors - len(usable), 1)
        return ElasticDecision(wanted=terms.max_executors, at_once=missing)

    def _max_size(self, usable: int) -> int:
        """Return the largest size that the next world may have."""
        most, reserved = self._terms.max_executors, self._reserved_count
        return min(most, max(usable - reserved, self._terms.min_executors)) if reserved else most

    @property
    def _reserved_count(self) -> int:
        """Return how many executors the next world leaves to gangs that wait."""
        return max(self.reclaimed_count, self._promised_count) if self._terms.should_give_way else 0

    def _start(
        self, keys: tuple[int, ...], surplus: Collection[int], now: float
    ) -> ElasticDecision:
        self._world = _World(keys, now)
        self._has_started_world = True
        self._partial_releases = 0
        unused = set(surplus)
        if self._reserved_count:
            unused |= self._executors.keys() - set(keys)
        self._promised_count = 0
        released = self._release(unused)
        wanted = self._count_wanted(now)
        return ElasticDecision(wanted=wanted, start=keys, release=released)

    def _resize(self, world: _World, now: float) -> ElasticDecision:
        """Decide on a running world: whether it is resized, and how many executors it wants."""
        world.growth = 0
        usable, surplus = self._split_usable(world.keys)
        spare = [key for key in usable if key not in world.keys]
        if world.has_returned:
            released = self._release([*spare, *surplus])
            return ElasticDecision(wanted=len(self._executors), release=released)
        if self.reclaimed_count and self._terms.should_give_way:
            released = self._release([*spare, *surplus])
            if self._count_surplus(world):
                return self._resize_at_checkpoint(world, WorldEnd.GAVE_WAY, now, released)
            world.resize_wanted_since = None
            return ElasticDecision(wanted=len(world.keys), release=released)
        warm = [key for key in spare if self._executors[key].warm_since is not None]
        if spare and not self._may_grow(world, len(spare), now + _LEAD_SECONDS):
            # Release executors that would be idle until the next growth is allowed.
            world.resize_wanted_since = None
            released = self._release([*spare, *surplus])
            return ElasticDecision(wanted=self._count_wanted(now), release=released)
        if warm and world.entered_at is not None and self._may_grow(world, len(warm), now):
            allowed = max(self._resized_at + self._terms.interval, world.entered_at)
            oldest = max(min(self._executors[key].warm_since or now for key in warm), allowed)
            if now - oldest < self._spare_seconds(world):
                world.growth = len(warm)
                return self._resize_at_checkpoint(world, WorldEnd.GREW, now, self._release(surplus))
            # No checkpoint came: release the GPUs until a checkpoint is near.
            surplus = [*surplus, *spare]
        world.resize_wanted_since = None
        if surplus:
            rest = self._checkpoint_period or self._terms.interval
            self._grows_at = max((self._last_checkpoint or now) + rest, now + _SPARE_SECONDS)
        released = self._release(surplus)
        return ElasticDecision(wanted=self._count_wanted(now), release=released)

    def _release(self, keys: Collection[int]) -> frozenset[int]:
        for key in keys:
            del self._executors[key]
        return frozenset(keys)

    def _resize_at_checkpoint(
        self, world: _World, how: WorldEnd, now: float, released: frozenset[int]
    ) -> ElasticDecision:
        """Stop the world if a checkpoint was completed since the decision to resize; else ask."""
        if world.resize_wanted_since is None:
            world.resize_wanted_since, world.requested_at = now, None
        if any(at >= world.resize_wanted_since for at in world.checkpoint_times):
            world.stop_reason, self._stopped_at = how, now
            if how is WorldEnd.GAVE_WAY:
                self._promised_count = self._count_surplus(world)
            return ElasticDecision(wanted=len(self._executors), stop_reason=how, release=released)
        is_request_due = world.entered_at is not None and (
            world.requested_at is None or now - world.requested_at >= _REQUEST_AGAIN_SECONDS
        )
        if is_request_due:
            world.requested_at = now
        wanted = self._terms.max_executors if how is WorldEnd.GREW else len(world.keys)
        return ElasticDecision(wanted=wanted, needs_checkpoint=is_request_due, release=released)

    def _count_surplus(self, world: _World) -> int:
        return min(self.reclaimed_count, len(world.keys) - self._terms.min_executors)

    def _may_grow(self, world: _World, more: int, now: float) -> bool:
        """Return whether a growth is allowed now, and brings more than it costs."""
        if now - self._resized_at < self._terms.interval:
            return False
        if self._terms.run_timeout is None:
            return True
        seconds_left = self._terms.run_timeout - (now - world.started_at)
        size = len(world.keys)
        return self._resize_seconds < seconds_left * more / (size + more)

    def _spare_seconds(self, world: _World) -> float:
        """Return how long spare executors are held for a checkpoint."""
        if self._checkpoint_period is not None and self._last_checkpoint is not None:
            return max(_SPARE_SECONDS, min(self._checkpoint_period, 2 * _SPARE_SECONDS))
        return _SPARE_SECONDS

    def _count_wanted(self, now: float) -> int:
        """Return how many executors a world that is not being resized wants.

        More are requested shortly before they can be used: before the next growth is allowed, or
        before a checkpoint after one that did not come in time.
        """
        may_at = max(self._resized_at + self._terms.interval, self._grows_at) - _LEAD_SECONDS
        more = self._terms.max_executors - len(self._executors)
        world = self._world
        brings = world is None or more <= 0 or self._may_grow(world, more, now + _LEAD_SECONDS)
        return len(self._executors) if now < may_at or not brings else self._terms.max_executors

    def _split_usable(self, first: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Return the executors that a world could have, in order, and those that it could not.

        The executors of a node stay together, so that a smaller world releases executors of few
        nodes. A spread gang uses only one executor of a node.

        Args:
            first: keys of executors that come first, because they have a world.
        """
        hosts = Counter(executor.host for executor in self._executors.values())
        first_keys = set(first)
        order = sorted(
            self._executors,
            key=lambda key: (
                key not in first_keys,
                -hosts[self._executors[key].host],
                self._executors[key].host,
                self._executors[key].arrived_at,
            ),
        )
        if not self._terms.is_spread:
            return order[: self._terms.max_executors], order[self._terms.max_executors :]
        usable, surplus, seen = list[int](), list[int](), set[str]()
        for key in order:
            host = self._executors[key].host
            (
                surplus if host in seen or len(usable) == self._terms.max_executors else usable
            ).append(key)
            seen.add(host)
        return usable, surplus


def outlook(policy: ElasticPolicy, wanted: int, gpus: int, why: WaitReason) -> WaitReason:
    """Return what an elastic gang waits for, and how it is about to be resized.

    Args:
        wanted: number of executors that it wants now, including those that have arrived.
        why: why more executors have not arrived.
    """
    if not policy.world:
        if wanted == 0:
            return wait_reasons.gave_all_back()
        if not why and policy.warming_count:
            return wait_reasons.loading_frameworks(policy.warming_count)
        return why
    change = NO_WAIT
    if policy.stop_reason is not None:
        change = wait_reasons.resizing(is_growth=policy.stop_reason is WorldEnd.GREW)
    elif policy.giving_count:
        change = wait_reasons.giving(policy.giving_count, gpus)
    elif policy.growing_count:
        change = wait_reasons.growing(policy.growing_count)
    if (missing := wanted - policy.executor_count) > 0:
        return change.before(wait_reasons.missing_executors(missing, why))
    return change
