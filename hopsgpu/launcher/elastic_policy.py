"""The decisions of an elastic gang: when a world starts, grows, gives way, and what it asks for.

It is pure: the clock's reading is a parameter, and `launcher.elastic_gang` does what it decides.
Sizes are counted in executors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hopsgpu.core.gang import PART_SECONDS, backoff_seconds
from hopsgpu.units import count_of

# A first world waits so long for further executors, after the last one arrived.
SETTLE_SECONDS = 3.0
# Executors that are granted may take this long to start, on a busy node.
_STARTING_SECONDS = PART_SECONDS
# Further executors are requested so long before they can be used: what their start takes.
_LEAD_SECONDS = 20.0
# Executors that a running world has no use for yet are held so long, and then given back.
_SPARE_SECONDS = 60.0
# What a resize costs before one was measured.
_RESIZE_SECONDS = 10.0
# From the first complete checkpoint of a world until it counts: other ranks may be about to save.
_FIRST_SECONDS = 3.0
# Ranks that did not agree on a checkpoint, or did not save it, are asked again after this time; an
# agreement takes 2 minutes at most.
_ASK_AGAIN_SECONDS = 150.0
_REFUSED_SECONDS = 10.0
# Losses in a row, without a checkpoint between them, that end a run.
MOST_LOSSES = 5


class WorldEnd(Enum):
    """Why a world ended.

    Attributes:
        RETURNED: all ranks returned.
        GREW: a larger world follows.
        GAVE_WAY: a smaller world follows, because other gangs wait for its GPUs.
        LOST: executors or ranks were lost; a world of those that are left follows.
        FAILED: a rank failed; a world follows if `retries` are left.
        CANCELLED: the run was cancelled.
    """

    RETURNED = "returned"
    GREW = "grew"
    GAVE_WAY = "gave way"
    LOST = "lost"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class ElasticTerms:
    """What an elastic gang may do.

    Attributes:
        least: executors of the smallest world.
        most: executors of the largest world.
        interval: seconds between two growths at least.
        gives_way: whether it shrinks while other gangs wait for its GPUs.
        spread: whether no two executors of a world may share a node.
        run_timeout: seconds that the ranks of one world may take, None for no bound.
    """

    least: int
    most: int
    interval: float = 300.0
    gives_way: bool = True
    spread: bool = False
    run_timeout: float | None = None


@dataclass(frozen=True)
class ElasticDecision:
    """What an elastic gang does next.

    Attributes:
        wanted: executors to have, those that are here included.
        at_once: how many of the missing ones to request together.
        start: keys of the executors of the world to start; empty for none.
        stop: why the running world is to be stopped now, to be resized; None to leave it.
        ask: whether the ranks are to be asked to save a checkpoint.
        release: keys of executors to give back.
    """

    wanted: int
    at_once: int = 1
    start: tuple[int, ...] = ()
    stop: WorldEnd | None = None
    ask: bool = False
    release: frozenset[int] = frozenset()


@dataclass
class _Executor:
    host: str
    came: float
    ready: float | None = None


@dataclass
class _World:
    keys: tuple[int, ...]
    began: float
    # When the function ran in all ranks.
    entered: float | None = None
    stopping: WorldEnd | None = None
    # When the gang decided to resize it at the next checkpoint; None if it did not.
    wants_since: float | None = None
    # Executors that it gets at its next checkpoint.
    growth: int = 0
    # When the ranks were asked for a checkpoint.
    asked_at: float | None = None
    # Whether all ranks have returned; what they left may still be published.
    has_returned: bool = False
    saved: list[float] = field(default_factory=list)


class DurableCheckpoints:
    """Tells when a checkpoint that was reported as complete can be relied upon.

    Which ranks save is known only from their saves. So the first complete checkpoint of a world may
    lack the part of a rank that has not saved yet, and it counts only some seconds later. A
    checkpoint on whose step the ranks have agreed counts once all of them have passed that step; it
    may be uploaded after an earlier one, which does not count then.
    """

    def __init__(self) -> None:
        self._agreed: int | None = None
        self._have_passed = False
        self._is_complete = False
        self._first_at: float | None = None
        self._has_first = False

    def agreed(self, step: int) -> None:
        """Record that all ranks save at a step, or at the first one after it."""
        self._agreed, self._have_passed, self._is_complete = step, False, False

    def passed(self) -> bool:
        """Record that all ranks have passed the agreed step; return whether one counts now."""
        self._have_passed = True
        return self._is_met()

    def saved(self, agreed: int | None, now: float) -> bool:
        """Record that a checkpoint is complete; return whether it counts now.

        Args:
            agreed: the last step at which its ranks had been told that all of them save, or None.
                The step that it was saved under tells nothing: code may save under the number of an
                epoch, and ask about batches.
            now: the clock's reading.
        """
        if self._agreed is not None:
            # One that was handed over before counts for nothing: the agreed one would be lost.
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

    def due(self, now: float) -> float | None:
        """Return when the first checkpoint was complete, once it counts; else None."""
        if self._agreed is not None:
            return None
        if self._first_at is None or now < self._first_at + _FIRST_SECONDS:
            return None
        at, self._first_at, self._has_first = self._first_at, None, True
        return at

    def refused(self) -> None:
        """Record that the ranks do not agree again: what they agreed on before is dropped.

        They may never come to that step: their code counts the steps of each epoch anew, or asks
        about none any more. Their own checkpoints count again.
        """
        self._agreed, self._have_passed, self._is_complete = None, False, False

    def ended(self) -> None:
        """Record the end of a world, and with it of all agreements."""
        self._agreed, self._have_passed, self._is_complete = None, False, False
        self._has_first, self._first_at = False, None


class ElasticPolicy:
    """Decides on the worlds of one elastic gang; only one thread uses it.

    Args:
        terms: what the gang may do.
        now: the clock's reading.

    Attributes:
        losses: losses in a row, without a checkpoint between them; preemptions do not count.
        reclaimed_count: executors that gangs which wait need from this one.
        coming: executors that YARN has granted and that start.
    """

    def __init__(self, terms: ElasticTerms, now: float) -> None:
        self._terms = terms
        self._here: dict[int, _Executor] = {}
        self._world: _World | None = None
        self._has_begun = False
        self._last_came = now
        self._resized = float("-inf")
        self._stopped_at: float | None = None
        self._cost = _RESIZE_SECONDS
        self._period: float | None = None
        self._last_saved: float | None = None
        self._given_back = 0
        # Executors for which a world was stopped: they are given even if the gang that waits is
        # asking YARN just then, and so does not stand in line.
        self._promised = 0
        # When executors are requested again: without a world, and for a larger one.
        self._asks_at = self._grows_at = float("-inf")
        self.losses = 0
        self.reclaimed_count = 0
        self.coming = 0

    @property
    def here(self) -> int:
        """Return the number of executors that are here."""
        return len(self._here)

    @property
    def warming(self) -> int:
        """Return how many of the executors that are here cannot start ranks at once yet."""
        return sum(executor.ready is None for executor in self._here.values())

    @property
    def world(self) -> tuple[int, ...]:
        """Return the keys of the executors of the running world; empty if none runs."""
        return () if self._world is None else self._world.keys

    @property
    def above_least(self) -> int:
        """Return how many executors the gang has above its minimum."""
        return max(len(self._here) - self._terms.least, 0)

    @property
    def giving(self) -> int:
        """Return how many executors the running world gives at its next checkpoint."""
        if self._world is None or not self._terms.gives_way:
            return 0
        return self._surplus_of(self._world)

    @property
    def growing(self) -> int:
        """Return how many executors the running world gets at its next checkpoint."""
        return 0 if self._world is None else self._world.growth

    @property
    def stopping(self) -> WorldEnd | None:
        """Return why the running world is being stopped, to be resized; None if it is not."""
        return None if self._world is None else self._world.stopping

    @property
    def resize_seconds(self) -> float:
        """Return what the last resize cost: from the order to stop until all ranks ran again."""
        return self._cost

    def came(self, key: int, host: str, now: float) -> None:
        """Record that an executor has arrived; it is not warm yet."""
        self._here[key] = _Executor(host, now)
        self._last_came = now

    def warmed(self, key: int, now: float) -> None:
        """Record that an executor can start ranks at once."""
        if key in self._here and self._here[key].ready is None:
            self._here[key].ready = now

    def gone(self, key: int) -> None:
        """Record that an executor was lost, given back or set aside."""
        self._here.pop(key, None)

    def entered(self, now: float) -> None:
        """Record that the function runs in all ranks of the world."""
        if self._world is not None and self._world.entered is None:
            self._world.entered = now
            if self._stopped_at is not None:
                self._cost = now - self._stopped_at
                self._stopped_at = None

    def refused(self, now: float) -> None:
        """Record that the ranks do not agree on a checkpoint: they are asked again soon."""
        if self._world is not None:
            self._world.asked_at = now + _REFUSED_SECONDS - _ASK_AGAIN_SECONDS

    def returned(self) -> None:
        """Record that all ranks of the world have returned: it is not resized any more."""
        if self._world is not None:
            self._world.has_returned = True

    def saved(self, now: float) -> None:
        """Record that a checkpoint of the running world was complete on the lake at a time."""
        world = self._world
        if world is None:
            return
        self.losses = 0
        if world.saved:
            self._period = now - world.saved[-1]
        self._last_saved = now
        world.saved.append(now)

    def ended(self, how: WorldEnd, now: float, *, preempted: bool = False) -> None:
        """Record that all ranks of the running world have ended.

        Args:
            how: why it ended.
            now: the clock's reading.
            preempted: whether YARN took executors for a queue that has a right to them. Nothing is
                wrong then, and the gang does not ask for them again at once.
        """
        self._world = None
        # A part that is left is kept as long as one that has just arrived.
        self._last_came = max(self._last_came, now)
        if self._stopped_at is None:
            self._stopped_at = now
        if how is WorldEnd.LOST and not preempted:
            self.losses += 1
        if how is WorldEnd.GAVE_WAY or preempted:
            # Until the gang that waits has seen that the GPUs are free, and has asked for them.
            self._grows_at = now + _SPARE_SECONDS
        if how in (WorldEnd.GREW, WorldEnd.GAVE_WAY) or preempted:
            self._resized = now

    def decide(self, now: float, chance: float = 0.0) -> ElasticDecision:
        """Return what to do next.

        Args:
            now: the clock's reading.
            chance: as for `backoff_seconds`.
        """
        if self._world is None:
            return self._assemble(now, chance)
        if (how := self._world.stopping) is not None:
            grows = how is WorldEnd.GREW
            return ElasticDecision(wanted=self._terms.most if grows else len(self._here))
        return self._resize(self._world, now)

    def _assemble(self, now: float, chance: float) -> ElasticDecision:
        """Decide without a world: whether one can start, or has to be waited for."""
        terms = self._terms
        if now < self._asks_at:
            return ElasticDecision(wanted=0)
        usable, surplus = self._usable()
        most = self._room(len(usable))
        warm = [key for key in usable if self._here[key].ready is not None]
        if len(warm) >= terms.least:
            # After a world, the next one starts at once: its executors are idle.
            waited = now - self._last_came
            # An executor that cannot start, or load its frameworks, does not keep the others
            # waiting.
            are_all_warm = len(warm) == len(usable) and not self.coming
            settled = are_all_warm or waited >= _STARTING_SECONDS
            if len(warm) >= most or (settled and waited >= SETTLE_SECONDS) or self._has_begun:
                return self._start(tuple(warm[:most]), surplus, now)
        elif self._here and now - self._last_came >= PART_SECONDS + _STARTING_SECONDS:
            # A part that others may need to be whole.
            self._given_back += 1
            self._asks_at = now + backoff_seconds(self._given_back, chance)
            return ElasticDecision(wanted=0, release=self._give_back(list(self._here)))
        missing = max(terms.least - len(usable), 1)
        return ElasticDecision(wanted=terms.most, at_once=missing)

    def _room(self, usable: int) -> int:
        """Return the largest size that the next world may have."""
        most, given = self._terms.most, self._given_now
        return min(most, max(usable - given, self._terms.least)) if given else most

    @property
    def _given_now(self) -> int:
        """Return how many executors the next world leaves to gangs that wait."""
        return max(self.reclaimed_count, self._promised) if self._terms.gives_way else 0

    def _start(
        self, keys: tuple[int, ...], surplus: Collection[int], now: float
    ) -> ElasticDecision:
        self._world = _World(keys, now)
        self._has_begun = True
        self._given_back = 0
        left = set(surplus)
        if self._given_now:
            left |= self._here.keys() - set(keys)
        self._promised = 0
        released = self._give_back(left)
        wanted = self._wanted(now)
        return ElasticDecision(wanted=wanted, start=keys, release=released)

    def _resize(self, world: _World, now: float) -> ElasticDecision:
        """Decide on a running world: whether it is resized, and how many executors it wants."""
        world.growth = 0
        usable, surplus = self._usable(world.keys)
        spare = [key for key in usable if key not in world.keys]
        if world.has_returned:
            released = self._give_back([*spare, *surplus])
            return ElasticDecision(wanted=len(self._here), release=released)
        if self.reclaimed_count and self._terms.gives_way:
            released = self._give_back([*spare, *surplus])
            if self._surplus_of(world):
                return self._at_checkpoint(world, WorldEnd.GAVE_WAY, now, released)
            world.wants_since = None
            return ElasticDecision(wanted=len(world.keys), release=released)
        warm = [key for key in spare if self._here[key].ready is not None]
        if spare and not self._may_grow(world, len(spare), now + _LEAD_SECONDS):
            # They would be idle until the next growth is allowed.
            world.wants_since = None
            released = self._give_back([*spare, *surplus])
            return ElasticDecision(wanted=self._wanted(now), release=released)
        if warm and world.entered is not None and self._may_grow(world, len(warm), now):
            allowed = max(self._resized + self._terms.interval, world.entered)
            oldest = max(min(self._here[key].ready or now for key in warm), allowed)
            if now - oldest < self._patience(world):
                world.growth = len(warm)
                return self._at_checkpoint(world, WorldEnd.GREW, now, self._give_back(surplus))
            # No checkpoint came: the GPUs serve others until one is near.
            surplus = [*surplus, *spare]
        world.wants_since = None
        if surplus:
            rest = self._period or self._terms.interval
            self._grows_at = max((self._last_saved or now) + rest, now + _SPARE_SECONDS)
        released = self._give_back(surplus)
        return ElasticDecision(wanted=self._wanted(now), release=released)

    def _give_back(self, keys: Collection[int]) -> frozenset[int]:
        for key in keys:
            del self._here[key]
        return frozenset(keys)

    def _at_checkpoint(
        self, world: _World, how: WorldEnd, now: float, released: frozenset[int]
    ) -> ElasticDecision:
        """Stop the world if a checkpoint was completed since the decision to resize; else ask."""
        if world.wants_since is None:
            world.wants_since, world.asked_at = now, None
        if any(at >= world.wants_since for at in world.saved):
            world.stopping, self._stopped_at = how, now
            if how is WorldEnd.GAVE_WAY:
                self._promised = self._surplus_of(world)
            return ElasticDecision(wanted=len(self._here), stop=how, release=released)
        ask = world.entered is not None and (
            world.asked_at is None or now - world.asked_at >= _ASK_AGAIN_SECONDS
        )
        if ask:
            world.asked_at = now
        wanted = self._terms.most if how is WorldEnd.GREW else len(world.keys)
        return ElasticDecision(wanted=wanted, ask=ask, release=released)

    def _surplus_of(self, world: _World) -> int:
        return min(self.reclaimed_count, len(world.keys) - self._terms.least)

    def _may_grow(self, world: _World, more: int, now: float) -> bool:
        """Return whether a growth is allowed now, and brings more than it costs."""
        if now - self._resized < self._terms.interval:
            return False
        if self._terms.run_timeout is None:
            return True
        left = self._terms.run_timeout - (now - world.began)
        size = len(world.keys)
        return self._cost < left * more / (size + more)

    def _patience(self, world: _World) -> float:
        """Return how long spare executors are held for a checkpoint."""
        if self._period is not None and self._last_saved is not None:
            return max(_SPARE_SECONDS, min(self._period, 2 * _SPARE_SECONDS))
        return _SPARE_SECONDS

    def _wanted(self, now: float) -> int:
        """Return how many executors a world that is not being resized wants.

        More are requested shortly before they can be used: before the next growth is allowed, or
        before a checkpoint after one that did not come in time.
        """
        may_at = max(self._resized + self._terms.interval, self._grows_at) - _LEAD_SECONDS
        more = self._terms.most - len(self._here)
        world = self._world
        brings = world is None or more <= 0 or self._may_grow(world, more, now + _LEAD_SECONDS)
        return len(self._here) if now < may_at or not brings else self._terms.most

    def _usable(self, first: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Return the executors that a world could have, in order, and those that it could not.

        The executors of a node stay together at the end, so that what a smaller world gives back
        comes from few nodes. Of a spread gang, a node's further executors are of no use.

        Args:
            first: keys of executors that come first, because they have a world.
        """
        hosts = Counter(executor.host for executor in self._here.values())
        there = set(first)
        order = sorted(
            self._here,
            key=lambda key: (
                key not in there,
                -hosts[self._here[key].host],
                self._here[key].host,
                self._here[key].came,
            ),
        )
        if not self._terms.spread:
            return order[: self._terms.most], order[self._terms.most :]
        usable, surplus, seen = list[int](), list[int](), set[str]()
        for key in order:
            host = self._here[key].host
            (surplus if host in seen or len(usable) == self._terms.most else usable).append(key)
            seen.add(host)
        return usable, surplus


def outlook(policy: ElasticPolicy, wanted: int, gpus: int, why: str) -> str:
    """Return what an elastic gang waits for, and how it is about to be resized, in words; or "".

    Args:
        policy: decides on the gang.
        wanted: executors that it wants at present, those that are here included.
        gpus: GPUs of each executor.
        why: why more executors have not arrived, or "".
    """
    if not policy.world:
        if wanted == 0:
            return "gave its executors back, because the others did not arrive; asks again soon"
        if not why and policy.warming:
            return f"{count_of(policy.warming, 'executor')} cannot start ranks yet: frameworks load"
        return why
    missing, parts = wanted - policy.here, list[str]()
    if policy.stopping is not None:
        grows = policy.stopping is WorldEnd.GREW
        parts.append(f"the ranks start again as a {'larger' if grows else 'smaller'} world")
    elif policy.giving:
        given = (
            count_of(policy.giving * gpus, "GPU") if gpus else count_of(policy.giving, "executor")
        )
        parts.append(f"gives {given} to waiting gangs at its next checkpoint")
    elif policy.growing:
        parts.append(f"grows by {count_of(policy.growing, 'executor')} at its next checkpoint")
    if missing > 0:
        more = f"waits for {missing} more {'executor' if missing == 1 else 'executors'}"
        parts.append(f"{more}: {why}" if why else more)
    return "; ".join(parts)
