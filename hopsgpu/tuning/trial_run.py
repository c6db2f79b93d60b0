"""One try of a trial: runs its ranks from their start to their end, in a separate thread."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hopsgpu.attempts.attempt import AttemptResult, AttemptRunner
from hopsgpu.attempts.failures import RankExit
from hopsgpu.attempts.rank_call import Call
from hopsgpu.attempts.rendezvous import Rendezvous
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.core.trials import RUNNING, TrialReport
from hopsgpu.errors import HopsGpuError
from hopsgpu.executors.item_placement import ItemEnd, Slot
from hopsgpu.executors.rank_group_run import (
    RankGroupListener,
    RankGroupOutcome,
    RankGroupRun,
    RankGroupSetting,
)
from hopsgpu.tuning.sampler_thread import Proposed
from hopsgpu.tuning.trial_outcome import NoMetric, Reports, metric_of

_NEXT_TRIAL_SECONDS = 1.0
# After another end, something of the trial may be left on its slot.
_CLEAN = frozenset({ItemEnd.COMPLETE, ItemEnd.PRUNED})


class RendezvousCache:
    """The rendezvous of single-rank trials that ended well, for the next trial on the same slot.

    Several threads may use it at the same time, because only one trial has a slot.
    """

    def __init__(self) -> None:
        self._by_slot: dict[Slot, Rendezvous] = {}

    def take(self, slots: Sequence[Slot]) -> Rendezvous | None:
        """Remove and return the last rendezvous on a slot; None if these ranks need a new one."""
        last = [self._by_slot.pop(slot, None) for slot in slots]
        return last[0] if len(last) == 1 else None

    def keep(self, slots: Sequence[Slot], rendezvous: Rendezvous | None, how: ItemEnd) -> None:
        """Keep a rendezvous for the next trial, if this trial has one rank and ended well."""
        if rendezvous is not None and len(slots) == 1 and how in _CLEAN:
            self._by_slot[slots[0]] = rendezvous


class TrialEvents(Protocol):
    """Is notified of the progress of trials and of their first ranks, in the trials' threads."""

    def on_trial_started(self, number: int) -> None: ...

    def on_report(self, number: int, values: Sequence[tuple[int, float]]) -> None:
        """Handle pairs of step and metric."""

    def on_trial_ended(self, trial: TrialRun) -> None: ...


@dataclass(frozen=True)
class TrialSetting(RankGroupSetting):
    """The values that all trials of a search share."""

    metric: str | None
    rendezvous_cache: RendezvousCache
    events: TrialEvents


class _TrialListener(RankGroupListener):
    """Notifies the search of a trial's first rank.

    Attributes:
        was_pruned: whether the first rank ended early because the search had asked for that.
    """

    def __init__(self, number: int, setting: TrialSetting) -> None:
        super().__init__(setting.board)
        self.was_pruned = False
        self._number = number
        self._events = setting.events
        self._reports = Reports(setting.metric)

    def on_start(self, rank: int) -> None:
        if rank == 0:
            self._events.on_trial_started(self._number)

    def on_record(self, rank: int, chunk: bytes) -> None:
        if rank == 0 and (reported := self._reports.take(chunk)):
            self._events.on_report(self._number, reported)

    def on_end(self, end: RankExit) -> None:
        if end.place.rank == 0:
            self.was_pruned = end.was_pruned


class TrialRun(RankGroupRun):
    """One try of a trial on its slots.

    Attributes:
        value: the metric of a complete trial; None otherwise.
        metrics: numbers that the function returned, by name.
        next_trial_started: event that the search sets once the next trial on its slots has started.
    """

    def __init__(
        self,
        proposed: Proposed,
        slots: tuple[Slot, ...],
        allocation: GangAllocation,
        call: Call,
        setting: TrialSetting,
    ) -> None:
        self._first = _TrialListener(proposed.number, setting)
        super().__init__(proposed.number, slots, allocation, call, setting, self._first)
        self.proposed = proposed
        self.value: float | None = None
        self.metrics: Mapping[str, float] = {}
        self.next_trial_started = threading.Event()
        self._setting = setting

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
            started=self.created_at,
            tries=self.call.attempt + 1,
            log=self.call.logs.url,
        )

    def _take_rendezvous(self) -> Rendezvous | None:
        return self._setting.rendezvous_cache.take(self.slots)

    def _on_conclusion(self, runner: AttemptRunner) -> None:
        self._setting.rendezvous_cache.keep(self.slots, runner.rendezvous, self.outcome.how)

    def _report_end(self) -> None:
        self._setting.events.on_trial_ended(self)

    def _wait_before_log_upload(self) -> None:
        # The upload of the logs can wait; the next trial must not.
        self.next_trial_started.wait(_NEXT_TRIAL_SECONDS)

    def _outcome_of(self, result: AttemptResult) -> RankGroupOutcome:
        if self._first.was_pruned:
            return RankGroupOutcome(ItemEnd.PRUNED)
        try:
            pickled = result.values[0].content(self.call.directory)
            self.value, self.metrics = metric_of(_unpickle(pickled), self._setting.metric)
        except (NoMetric, HopsGpuError) as error:
            return RankGroupOutcome(ItemEnd.FAILED, str(error))
        return RankGroupOutcome(ItemEnd.COMPLETE)


def _unpickle(pickled: bytes) -> object:
    """Return the unpickled value of a rank.

    The value is safe to unpickle. Its sender is an agent that proved to know the run's secret; a
    file on the lake must match that agent's digest.

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
