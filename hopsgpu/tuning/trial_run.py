"""One try of a trial: runs its ranks from their start to their end, in a separate thread."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hopsgpu.attempts.attempt import Trained, Training
from hopsgpu.attempts.attempt_watcher import WatchBounds
from hopsgpu.attempts.failures import EndedRank
from hopsgpu.attempts.rank_call import Call
from hopsgpu.attempts.rendezvous import Rendezvous
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.core.trials import RUNNING, TrialReport
from hopsgpu.errors import HopsGpuError
from hopsgpu.storage.background import Background
from hopsgpu.tuning.sampler_thread import Proposed
from hopsgpu.tuning.scheduler import Slot, TrialEnd
from hopsgpu.tuning.search_board import SearchBoard
from hopsgpu.tuning.slot_run import SlotListener, SlotRun
from hopsgpu.tuning.trial_outcome import NoMetric, Outcome, Reports, metric_of

_FOLLOWED_SECONDS = 1.0
_CLEAN = frozenset({TrialEnd.COMPLETE, TrialEnd.PRUNED})


class RendezvousCache:
    """The rendezvous of single-rank trials that ended well, for the next trial on the same slot.

    Several threads may use it at the same time, because only one trial has a slot.
    """

    def __init__(self) -> None:
        self._left: dict[Slot, Rendezvous] = {}

    def taken(self, slots: Sequence[Slot]) -> Rendezvous | None:
        """Remove and return the last rendezvous on a slot; None if these ranks need a new one."""
        last = [self._left.pop(slot, None) for slot in slots]
        return last[0] if len(last) == 1 else None

    def keep(self, slots: Sequence[Slot], rendezvous: Rendezvous | None, how: TrialEnd) -> None:
        """Keep a rendezvous for the next trial, if this trial has one rank and ended well.

        After another end, something of the trial may be left.
        """
        if rendezvous is not None and len(slots) == 1 and how in _CLEAN:
            self._left[slots[0]] = rendezvous


@dataclass(frozen=True)
class Begun:
    """News of a trial: its first rank has started."""

    number: int


@dataclass(frozen=True)
class Reported:
    """News of a trial: what its first rank has reported, as pairs of step and metric."""

    number: int
    values: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class TrialSetting:
    """What all trials of a search have in common.

    Attributes:
        board: the search's status board.
        background: uploads the trials' logs to the lake.
        metric: name of the metric that is optimized, or None.
        rendezvous_cache: the rendezvous of earlier trials.
        bounds: how long ranks and agents are waited for, and how long GPUs may idle.
        tell: called with news of a trial, in the trial's thread; a TrialRun is the news of its own
            end.
    """

    board: SearchBoard
    background: Background
    metric: str | None
    rendezvous_cache: RendezvousCache
    bounds: WatchBounds
    tell: Callable[[Begun | Reported | TrialRun], None]


class _TrialListener(SlotListener):
    """Tells the search about a trial's first rank.

    Attributes:
        was_pruned: whether the first rank ended early because the search had asked for that.
    """

    def __init__(self, number: int, setting: TrialSetting) -> None:
        super().__init__(setting.board)
        self.was_pruned = False
        self._number = number
        self._setting = setting
        self._reports = Reports(setting.metric)

    def started(self, rank: int) -> None:
        if rank == 0:
            self._setting.tell(Begun(self._number))

    def record(self, rank: int, chunk: bytes) -> None:
        if rank == 0 and (reported := self._reports.take(chunk)):
            self._setting.tell(Reported(self._number, reported))

    def ended(self, end: EndedRank) -> None:
        if end.place.rank == 0:
            self.was_pruned = end.pruned


class TrialRun(SlotRun):
    """One try of a trial on its slots; it tells its end to the search.

    Args:
        proposed: the trial.
        slots: slots of its ranks.
        allocation: allocation of its executors.
        call: what the ranks run.
        setting: what it has in common with other trials.

    Attributes:
        proposed: as given.
        followed: event that the search sets once the next trial on its slots has begun.
    """

    def __init__(
        self,
        proposed: Proposed,
        slots: tuple[Slot, ...],
        allocation: GangAllocation,
        call: Call,
        setting: TrialSetting,
    ) -> None:
        self.proposed = proposed
        self.followed = threading.Event()
        self._setting = setting
        self._first = _TrialListener(proposed.number, setting)
        super().__init__(
            proposed.number,
            slots,
            allocation,
            call,
            setting.board,
            setting.background,
            setting.bounds,
            self._first,
        )

    @property
    def label(self) -> str:
        return f"trial {self.number}"

    def report(self) -> TrialReport:
        """Return what is known of the trial when the try starts."""
        return TrialReport(
            number=self.number,
            params=self.proposed.params,
            state=RUNNING,
            gpu=",".join(gpu for container in self.containers for gpu in container.gpus),
            host=",".join(dict.fromkeys(container.host for container in self.containers)),
            started=self.began,
            tries=self.call.attempt + 1,
            log=self.call.logs.url,
        )

    def _known(self) -> Rendezvous | None:
        return self._setting.rendezvous_cache.taken(self.slots)

    def _concluded(self, training: Training) -> None:
        self._setting.rendezvous_cache.keep(self.slots, training.rendezvous, self.outcome.how)

    def _tell_end(self) -> None:
        self._setting.tell(self)

    def _told(self) -> None:
        # The upload of the logs can wait; the next trial must not.
        self.followed.wait(_FOLLOWED_SECONDS)

    def _returned(self, trained: Trained) -> Outcome:
        if self._first.was_pruned:
            return Outcome(TrialEnd.PRUNED)
        try:
            pickled = trained.values[0].content(self.call.directory)
            value, metrics = metric_of(_unpickled(pickled), self._setting.metric)
        except (NoMetric, HopsGpuError) as error:
            return Outcome(TrialEnd.FAILED, error=str(error))
        return Outcome(TrialEnd.COMPLETE, value, metrics)


def _unpickled(pickled: bytes) -> object:
    """Return the unpickled value of a rank.

    It is safe to unpickle: it comes from an agent that proved to know the run's secret, or from a
    file on the lake that matches the digest of that agent.

    Raises:
        NoMetric: the value cannot be unpickled.
    """
    try:
        value: object = pickle.loads(pickled)
    except Exception as error:
        raise NoMetric(
            "the function's return value cannot be unpickled at the driver"
            f" ({type(error).__name__}: {error}); return numbers"
        ) from error
    return value
