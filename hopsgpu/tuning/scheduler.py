"""Which trial runs where, and when executors come and go: values and a clock in, decisions out.

Nothing here touches Spark, Optuna, a socket or the time: whoever drives a search tells what has
happened, and performs what is decided.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hopsgpu.core.gang import PART_SECONDS

# A trial that has lost so many executors is likely what ends them.
MOST_LOSSES = 3
# Trials that end within a moment of each other find a proposal each.
_LEAST_AHEAD = 2
_AHEAD_SHARE = 8


class End(Enum):
    """How a trial left its place.

    One that is lost, preempted or stopped has not ended: it is put back.
    """

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    # Its executor, and that may be the trial's doing; one that YARN took is not.
    LOST = "lost"
    PREEMPTED = "preempted"
    STOPPED = "stopped"


_PUT_BACK = frozenset({End.LOST, End.PREEMPTED, End.STOPPED})


@dataclass(frozen=True)
class Terms:
    """What a search is to do.

    Attributes:
        trials: that are to end, in all.
        most: that may run at a time.
        least: that must be able to run at a time before the first one starts.
        workers: slots that a trial takes.
        slots: of an executor. Ranks of a trial may share one, which NCCL refuses on a GPU: where
            trials share a GPU, each has one worker.
        max_failures: failed trials that the search bears, or None for any number.
    """

    trials: int
    most: int
    least: int = 1
    workers: int = 1
    slots: int = 1
    max_failures: int | None = None

    def executors(self, trials: int) -> int:
        """How many executors so many trials at a time take."""
        return -(-trials * self.workers // self.slots)


@dataclass(frozen=True)
class Slot:
    """A place for one rank: with one slot of an executor it has all its GPUs, else a share.

    Attributes:
        executor: key of its agent.
        index: in [0, slots of an executor).
    """

    executor: int
    index: int


@dataclass(frozen=True)
class Start:
    """A trial that is to start."""

    trial: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Decision:
    """What is to be done now.

    Attributes:
        starts: trials that are to start.
        wanted: executors to have in all.
        at_once: of those that are missing so many must come together, or none is kept.
        release: executors that are to be let go now.
        ask: proposals that Optuna is to be asked for.
        stop: whether running trials are to be stopped.
        over: whether nothing is left to be done.
    """

    starts: tuple[Start, ...] = ()
    wanted: int = 0
    at_once: int = 1
    release: tuple[int, ...] = ()
    ask: int = 0
    stop: bool = False
    over: bool = False


@dataclass
class _Executor:
    host: str
    free: set[int]


@dataclass
class Placement:
    """Executors and trials of a search, as far as is known; changed by what happens alone.

    Attributes:
        terms: of the search.
        ended: trials that have ended, those of an earlier run of the study among them.
        failures: of those how many failed in this run.
        running: slots of each trial that runs.
        waiting: trials that are proposed or were put back, in the order in which they start.
        asking: proposals that are asked for.
        exhausted: whether the sampler has no more.
        closing: whether nothing more is to start.
    """

    terms: Terms
    ended: int = 0
    failures: int = 0
    running: dict[int, tuple[Slot, ...]] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    asking: int = 0
    exhausted: bool = False
    closing: bool = False
    _executors: dict[int, _Executor] = field(default_factory=dict)
    _tries: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _losses: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _gathered: bool = False
    # Since when there are idle executors with which no trial can start.
    _part_since: float | None = None
    _asks_again_at: float = float("-inf")

    @property
    def executors(self) -> Collection[int]:
        """Keys of those that are here and are not to go."""
        return self._executors.keys()

    @property
    def has_failed(self) -> bool:
        """Whether more trials failed than the search bears."""
        most = self.terms.max_failures
        return most is not None and self.failures > most

    @property
    def busy(self) -> Mapping[int, int]:
        """How many slots of each executor are taken."""
        return {key: self.terms.slots - len(e.free) for key, e in self._executors.items()}

    def came(self, key: int, host: str, now: float) -> None:
        """An executor is ready for trials."""
        self._executors[key] = _Executor(host, set(range(self.terms.slots)))
        self._changed(now)

    def gone(self, key: int, now: float) -> tuple[int, ...]:
        """An executor was lost or let go; which trials have a rank there."""
        self._executors.pop(key, None)
        self._changed(now)
        return tuple(
            t for t, slots in self.running.items() if any(s.executor == key for s in slots)
        )

    def proposed(self, trial: int) -> None:
        """Optuna has proposed a trial."""
        self.asking -= 1
        self.waiting.append(trial)

    def declined(self) -> None:
        """Optuna has proposed a trial that the user's space does not want: it ended so."""
        self.asking -= 1
        self.ended += 1

    def unproposed(self) -> None:
        """A proposal will not come: the sampler has no more."""
        self.asking -= 1
        self.exhausted = True

    def started(self, start: Start, now: float) -> None:
        """A trial was started as decided."""
        self.waiting.remove(start.trial)
        self.running[start.trial] = start.slots
        self._tries[start.trial] += 1
        for slot in start.slots:
            self._executors[slot.executor].free.discard(slot.index)
        self._gathered = True
        self._changed(now)

    def tries(self, trial: int) -> int:
        """How often a trial was started."""
        return self._tries[trial]

    def left(self, trial: int, how: End, now: float) -> End:
        """All ranks of a trial are gone; how that counts.

        One that has lost its executor, or was stopped, is put back, and is the next to start;
        after three losses that were not YARN's doing it failed.

        Returns:
            How it counts: `how`, or failed.
        """
        for slot in self.running.pop(trial):
            if slot.executor in self._executors:
                self._executors[slot.executor].free.add(slot.index)
        if how is End.LOST:
            self._losses[trial] += 1
            if self._losses[trial] >= MOST_LOSSES:
                how = End.FAILED
        if how in _PUT_BACK:
            self.waiting.appendleft(trial)
        else:
            self.ended += 1
            self.failures += how is End.FAILED
        self._changed(now)
        return how

    def released(self, keys: Iterable[int], now: float, pause: float) -> None:
        """Executors were let go as decided.

        Args:
            keys: of them.
            now: the clock's reading.
            pause: seconds in which no others are asked for, where trials wait: others go first.
        """
        if self._part_since is not None and now - self._part_since >= PART_SECONDS:
            self._asks_again_at = now + pause
        for key in keys:
            self._executors.pop(key, None)
        self._changed(now)

    def _changed(self, now: float) -> None:
        # A share of a busy executor that is left over cannot be given back, and keeps nobody from
        # anything.
        is_part = bool(self._idle()) and self._free() < self._needed()
        if not is_part:
            self._part_since = None
        elif self._part_since is None:
            self._part_since = now

    def _free(self) -> int:
        return sum(len(executor.free) for executor in self._executors.values())

    def _needed(self) -> int:
        """Free slots without which no trial can start."""
        return self._least() * self.terms.workers

    def _least(self) -> int:
        """Trials that must be able to start together: no more than there are."""
        return 1 if self._gathered else min(self.terms.least, max(self._left(), 1))

    def _left(self) -> int:
        """Trials that have not ended, those that are not proposed yet among them."""
        return len(self.running) + len(self.waiting) + self.asking + self._unasked()

    def decide(self, now: float) -> Decision:
        """What is to be done now.

        Args:
            now: the clock's reading.
        """
        # What is left has changed since, where the sampler has come to its end.
        self._changed(now)
        unasked, left = self._unasked(), self._left()
        if self.closing or self.has_failed or not left:
            over = not self.running
            return Decision(stop=bool(self.running), over=over, release=tuple(self._idle()))
        starts = self._starts()
        begun = {slot.executor for start in starts for slot in start.slots}
        wanted = self.terms.executors(min(self.terms.most, left))
        idle = [key for key in self._idle() if key not in begun]
        release = idle[: max(len(self._executors) - wanted, 0)]
        if self._is_stuck(now) and not starts:
            release, wanted = idle, len(self._executors) - len(idle)
        elif now < self._asks_again_at:
            wanted = min(wanted, len(self._executors))
        return Decision(
            starts=starts,
            wanted=wanted,
            at_once=self._at_once(starts),
            release=tuple(release),
            ask=min(unasked, max(self._ready_wanted() - len(self.waiting) - self.asking, 0)),
        )

    def _is_stuck(self, now: float) -> bool:
        """Whether idle executors have waited too long for others with which a trial could start."""
        return self._part_since is not None and now - self._part_since >= PART_SECONDS

    def _at_once(self, starts: tuple[Start, ...]) -> int:
        """Executors with which, and the slots that are left over, a trial can start."""
        left_over = self._free() - len(starts) * self.terms.workers
        short = self._needed() - left_over
        return -(-(short if short > 0 else self._needed()) // self.terms.slots)

    def _unasked(self) -> int:
        if self.exhausted:
            return 0
        there = self.ended + len(self.running) + len(self.waiting) + self.asking
        return max(self.terms.trials - there, 0)

    def _ready_wanted(self) -> int:
        """Proposals to have at hand: for free slots, and some ahead for trials that end soon."""
        slots = len(self._executors) * self.terms.slots // self.terms.workers
        places = min(max(slots, self.terms.least), self.terms.most)
        free = max(places - len(self.running), 0)
        ahead = max(_LEAST_AHEAD, places // _AHEAD_SHARE)
        return free + min(ahead, places)

    def _idle(self) -> list[int]:
        """Executors without a running trial, those that came last first."""
        whole = self.terms.slots
        return [key for key, e in reversed(self._executors.items()) if len(e.free) == whole]

    def _starts(self) -> tuple[Start, ...]:
        free = {key: set(e.free) for key, e in self._executors.items() if e.free}
        count = sum(map(len, free.values()))
        room = self.terms.most - len(self.running)
        if not self._gathered and count < self._needed():
            return ()
        starts: list[Start] = []
        for trial in self.waiting:
            if room <= len(starts) or count < self.terms.workers:
                break
            starts.append(Start(trial, self._take(free)))
            count -= self.terms.workers
        return tuple(starts)

    def _take(self, free: dict[int, set[int]]) -> tuple[Slot, ...]:
        """Slots for a trial, which are free no more: near each other, and on fuller executors."""
        taken: list[Slot] = []
        while len(taken) < self.terms.workers:
            key = self._best(free, self.terms.workers - len(taken), taken)
            index = min(free[key])
            free[key].discard(index)
            if not free[key]:
                del free[key]
            taken.append(Slot(key, index))
        return tuple(taken)

    def _best(self, free: Mapping[int, set[int]], wanted: int, taken: Collection[Slot]) -> int:
        if self.terms.workers == 1:
            # On the fullest, so that others become idle and can go.
            return min(free, key=lambda key: len(free[key]))
        on_hosts: dict[str, int] = defaultdict(int)
        for key, indexes in free.items():
            on_hosts[self._executors[key].host] += len(indexes)

        near = {self._executors[slot.executor].host for slot in taken}

        def preference(key: int) -> tuple[bool, bool, int]:
            host = self._executors[key].host
            room = on_hosts[host]
            # The smallest host that takes all, else the one that takes most.
            return host not in near, room < wanted, room if room >= wanted else -room

        return min(free, key=preference)
