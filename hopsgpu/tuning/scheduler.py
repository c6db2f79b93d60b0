"""The scheduler of a search: decides which trial runs where, and how many executors to have.

It is pure: it uses no Spark, Optuna, socket or clock. The caller, which drives the search, records
what has happened together with the time, and performs the decisions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hopsgpu.core.gang import PART_SECONDS

# After this many lost executors, the trial itself is the likely cause.
MOST_LOSSES = 3
# Enough proposals at hand for trials that end at almost the same time.
_LEAST_AHEAD = 2
_AHEAD_SHARE = 8


class TrialEnd(Enum):
    """How a trial left its slots.

    A lost, preempted or stopped trial has not ended: it is put back.
    """

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    # LOST: its executor was lost, possibly because of the trial. PREEMPTED: YARN took the executor,
    # which is not the trial's fault.
    LOST = "lost"
    PREEMPTED = "preempted"
    STOPPED = "stopped"


_PUT_BACK = frozenset({TrialEnd.LOST, TrialEnd.PREEMPTED, TrialEnd.STOPPED})


@dataclass(frozen=True)
class SearchTerms:
    """What a search should do.

    Attributes:
        trials: total number of trials that should end.
        most: largest number of trials that run at a time.
        least: number of trials that must be able to run at a time before the first one starts.
        workers: number of slots that a trial takes.
        slots: number of slots of an executor. Ranks of a trial may share an executor. NCCL does not
            connect ranks on the same GPU, so if trials share a GPU, each has one worker.
        max_failures: number of failed trials that the search tolerates, or None for any number.
        tries: how often a trial may fail until it counts as failed; before that it is put back.
        ahead: number of trials that an executor gets before it needs them, beside the one that it
            runs; only for trials of one worker, on executors of one slot.
    """

    trials: int
    most: int
    least: int = 1
    workers: int = 1
    slots: int = 1
    max_failures: int | None = None
    tries: int = 1
    ahead: int = 0

    @property
    def places(self) -> int:
        """Return how many trials, or ranks of trials, an executor may have at a time."""
        return self.slots + self.ahead

    def executors(self, trials: int) -> int:
        """Return how many executors a number of concurrent trials needs."""
        return -(-trials * self.workers // self.slots)


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
    """The decision to start a trial on some slots."""

    trial: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Decision:
    """What to do now.

    Attributes:
        starts: trials to start.
        wanted: total number of executors to have.
        at_once: how many of the missing executors must arrive together; otherwise none is kept.
        release: executors to release now.
        ask: number of proposals to request from Optuna.
        stop: whether to stop the running trials.
        over: whether nothing is left to do.
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
    """The known state of a search's executors and trials; only recorded events change it.

    Attributes:
        terms: terms of the search.
        ended: number of ended trials, including those of earlier runs of the study.
        failures: number of trials that failed in this run.
        running: slots of each running trial.
        waiting: trials that were proposed or put back, in the order in which they start.
        asking: number of proposals that were requested and have not arrived.
        exhausted: whether the sampler has no more proposals.
        closing: whether no more trials may start.
    """

    terms: SearchTerms
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
    # Since when there are idle executors, but too few free slots to start a trial.
    _part_since: float | None = None
    _asks_again_at: float = float("-inf")

    @property
    def executors(self) -> Collection[int]:
        """Return the keys of the executors that are here and not released."""
        return self._executors.keys()

    @property
    def has_failed(self) -> bool:
        """Return whether more trials failed than the search tolerates."""
        most = self.terms.max_failures
        return most is not None and self.failures > most

    @property
    def busy(self) -> Mapping[int, int]:
        """Return how many slots of each executor are taken."""
        return {key: self.terms.places - len(e.free) for key, e in self._executors.items()}

    def came(self, key: int, host: str, now: float) -> None:
        """Record that an executor is ready for trials."""
        self._executors[key] = _Executor(host, set(range(self.terms.places)))
        self._changed(now)

    def gone(self, key: int, now: float) -> None:
        """Record that an executor was lost or released."""
        self._executors.pop(key, None)
        self._changed(now)

    def proposed(self, trial: int) -> None:
        """Record that Optuna proposed a trial."""
        self.asking -= 1
        self.waiting.append(trial)

    def declined(self) -> None:
        """Record that the user's space rejected a proposed trial, which counts as ended."""
        self.asking -= 1
        self.ended += 1

    def unproposed(self) -> None:
        """Record that a proposal will not arrive, because the sampler has no more."""
        self.asking -= 1
        self.exhausted = True

    def started(self, start: Start, now: float) -> None:
        """Record that a trial was started as decided."""
        self.waiting.remove(start.trial)
        self.running[start.trial] = start.slots
        self._tries[start.trial] += 1
        for slot in start.slots:
            self._executors[slot.executor].free.discard(slot.index)
        self._gathered = True
        self._changed(now)

    def tries(self, trial: int) -> int:
        """Return how often a trial was started in this run."""
        return self._tries[trial]

    def left(self, trial: int, how: TrialEnd, now: float) -> TrialEnd:
        """Record that all ranks of a trial are gone.

        A trial that lost its executor or was stopped is put back and is the next to start. After
        three losses that YARN did not cause, it counts as failed. So it does when it has failed as
        often as the terms allow.

        Returns:
            How the end counts: `how`, or failed.
        """
        for slot in self.running.pop(trial):
            if slot.executor in self._executors:
                self._executors[slot.executor].free.add(slot.index)
        if how in (TrialEnd.LOST, TrialEnd.FAILED):
            self._losses[trial] += 1
            most = MOST_LOSSES if how is TrialEnd.LOST else self.terms.tries
            how = TrialEnd.FAILED if self._losses[trial] >= most else TrialEnd.LOST
        if how in _PUT_BACK:
            self.waiting.appendleft(trial)
        else:
            self.ended += 1
            self.failures += how is TrialEnd.FAILED
        self._changed(now)
        return how

    def released(self, keys: Iterable[int], now: float, pause: float) -> None:
        """Record that executors were released as decided.

        Args:
            keys: keys of the executors.
            now: current reading of the clock, in seconds.
            pause: seconds without new requests, so that other gangs go first; applies if the
                executors were released because no trial could start on them.
        """
        if self._part_since is not None and now - self._part_since >= PART_SECONDS:
            self._asks_again_at = now + pause
        for key in keys:
            self._executors.pop(key, None)
        self._changed(now)

    def _changed(self, now: float) -> None:
        # Only idle executors count: the free slots of a busy one cannot be given back, and nobody
        # else could use them.
        is_part = bool(self._idle()) and self._free() < self._needed()
        if not is_part:
            self._part_since = None
        elif self._part_since is None:
            self._part_since = now

    def _free(self) -> int:
        return sum(len(executor.free) for executor in self._executors.values())

    def _needed(self) -> int:
        """Return how many free slots it takes to start a trial."""
        return self._least() * self.terms.workers

    def _least(self) -> int:
        """Return how many trials must be able to start together, at most all that are left."""
        return 1 if self._gathered else min(self.terms.least, max(self._left(), 1))

    def _left(self) -> int:
        """Return the number of trials that have not ended, including those not proposed yet."""
        return len(self.running) + len(self.waiting) + self.asking + self._unasked()

    def decide(self, now: float) -> Decision:
        """Return what to do now.

        Args:
            now: current reading of the clock, in seconds.
        """
        # If the sampler has no more proposals, fewer trials are left than at the last event.
        self._changed(now)
        unasked, left = self._unasked(), self._left()
        if self.closing or self.has_failed or not left:
            over = not self.running
            return Decision(stop=bool(self.running), over=over, release=tuple(self._idle()))
        starts = self._starts()
        begun = {slot.executor for start in starts for slot in start.slots}
        wanted = self.terms.executors(min(self.terms.most, left - self._ahead()))
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

    def _ahead(self) -> int:
        """Return how many trials executors have been given before they need them."""
        if not self.terms.ahead:
            return 0
        return sum(max(taken - self.terms.slots, 0) for taken in self.busy.values())

    def _is_stuck(self, now: float) -> bool:
        """Return whether idle executors have waited too long for others to start a trial with."""
        return self._part_since is not None and now - self._part_since >= PART_SECONDS

    def _at_once(self, starts: tuple[Start, ...]) -> int:
        """Return how many more executors a trial needs, given the slots that are left over."""
        left_over = self._free() - len(starts) * self.terms.workers
        short = self._needed() - left_over
        return -(-(short if short > 0 else self._needed()) // self.terms.slots)

    def _unasked(self) -> int:
        if self.exhausted:
            return 0
        known = self.ended + len(self.running) + len(self.waiting) + self.asking
        return max(self.terms.trials - known, 0)

    def _ready_wanted(self) -> int:
        """Return how many proposals to have ready: for free slots, and for trials that end soon."""
        slots = len(self._executors) * self.terms.slots // self.terms.workers
        places = min(max(slots, self.terms.least), self.terms.most)
        free = max(places - len(self.running), 0)
        ahead = max(_LEAST_AHEAD, places // _AHEAD_SHARE)
        return free + min(ahead, places)

    def _idle(self) -> list[int]:
        """Return the executors without a running trial, the latest arrival first."""
        whole = self.terms.places
        return [key for key, e in reversed(self._executors.items()) if len(e.free) == whole]

    def _starts(self) -> tuple[Start, ...]:
        free = {key: set(e.free) for key, e in self._executors.items() if e.free}
        count = sum(map(len, free.values()))
        room = self.terms.most * self.terms.places // self.terms.slots - len(self.running)
        if not self._gathered and count < self._needed():
            return ()
        starts: list[Start] = []
        for trial in self.waiting:
            if room <= len(starts) or count < self.terms.workers:
                break
            if self.terms.ahead and self._is_early(free, len(self.waiting) - len(starts)):
                break
            starts.append(Start(trial, self._take(free)))
            count -= self.terms.workers
        return tuple(starts)

    def _is_early(self, free: Mapping[int, set[int]], waiting: int) -> bool:
        """Return whether to keep a trial back for an executor that will have none before long."""
        emptiest = self.terms.places - max(map(len, free.values()))
        return emptiest >= self.terms.slots and waiting <= len(self._executors)

    def _take(self, free: dict[int, set[int]]) -> tuple[Slot, ...]:
        """Take slots for a trial from the free ones: near each other, and on fuller executors."""
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
        if self.terms.ahead:
            return max(free, key=lambda key: len(free[key]))
        if self.terms.workers == 1:
            # On the fullest executor, so that others become idle and can be released.
            return min(free, key=lambda key: len(free[key]))
        on_hosts: dict[str, int] = defaultdict(int)
        for key, indexes in free.items():
            on_hosts[self._executors[key].host] += len(indexes)

        near = {self._executors[slot.executor].host for slot in taken}

        def preference(key: int) -> tuple[bool, bool, int]:
            host = self._executors[key].host
            room = on_hosts[host]
            # The node with the fewest free slots that suffice, else the one with the most.
            return host not in near, room < wanted, room if room >= wanted else -room

        return min(free, key=preference)
