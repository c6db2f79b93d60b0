"""One try of a trial: runs its ranks from their start to their end, in a separate thread."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hopsgpu.backends.grant import Lease
from hopsgpu.core.gang import Container, Exclusions, assign_ranks
from hopsgpu.core.run_values import RunStatus
from hopsgpu.core.trials import RUNNING, TrialReport
from hopsgpu.errors import Cancelled, ConfigError, DiscoveryError, HopsGpuError
from hopsgpu.launcher.attempt import AttemptListener, Trained, train_on
from hopsgpu.launcher.background import Background
from hopsgpu.launcher.failures import EndedRank
from hopsgpu.launcher.rank_call import Call
from hopsgpu.launcher.rank_table import Entered
from hopsgpu.launcher.rendezvous import Rendezvous
from hopsgpu.launcher.retry_policy import Fault, suspect
from hopsgpu.tuning.sampler_thread import Proposed
from hopsgpu.tuning.scheduler import Slot, TrialEnd
from hopsgpu.tuning.search_board import SearchBoard
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
class TrialOutput:
    """Shows a trial's output on the search's display; a `Progress`."""

    board: SearchBoard
    number: int

    def status(self, status: RunStatus) -> None:
        return

    def line(self, rank: int, host: str, *texts: str) -> None:
        self.board.line(self.number, rank, host, *texts)


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
        tell: called with news of a trial, in the trial's thread; a TrialRun is the news of its own
            end.
    """

    board: SearchBoard
    background: Background
    metric: str | None
    rendezvous_cache: RendezvousCache
    tell: Callable[[Begun | Reported | TrialRun], None]


class _TrialListener(AttemptListener):
    """Tells the search about a trial's first rank, and collects the trial's warnings.

    Attributes:
        was_pruned: whether the first rank ended early because the search had asked for that.
        warnings: warnings for people.
    """

    def __init__(self, number: int, setting: TrialSetting) -> None:
        self.was_pruned = False
        self.warnings: list[str] = []
        self._number = number
        self._setting = setting
        self._reports = Reports(setting.metric)

    def started(self, rank: int) -> None:
        if rank == 0:
            self._setting.tell(Begun(self._number))

    def entered(self, entered: Entered) -> None:
        if entered.all:
            self._setting.board.runs(entered.at)

    def record(self, rank: int, chunk: bytes) -> None:
        if rank == 0 and (reported := self._reports.take(chunk)):
            self._setting.tell(Reported(self._number, reported))

    def ended(self, end: EndedRank) -> None:
        if end.place.rank == 0:
            self.was_pruned = end.pruned

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class TrialRun:
    """One try of a trial on its slots; `start` starts it, and it tells its end to the search.

    Args:
        proposed: the trial.
        slots: slots of its ranks.
        lease: lease of its executors.
        call: what the ranks run.
        setting: what it has in common with other trials.

    Attributes:
        proposed, slots, call: as given.
        world: its ranks.
        outcome: how it ended, once it has.
        avoid: the GPUs and nodes that caused its failure.
        fatal: error that ends the search, or None.
        followed: event that the search sets once the next trial on its slots has begun.
    """

    def __init__(
        self,
        proposed: Proposed,
        slots: tuple[Slot, ...],
        lease: Lease,
        call: Call,
        setting: TrialSetting,
    ) -> None:
        self.proposed = proposed
        self.slots = slots
        self.call = call
        containers = {container.key: container for container in lease.containers}
        self.world = assign_ranks([containers[slot.executor] for slot in slots], 1)
        self.began = time.time()
        self.outcome = Outcome(TrialEnd.STOPPED)
        self.avoid = Exclusions()
        self.fatal: HopsGpuError | None = None
        self.followed = threading.Event()
        self._lease = lease
        self._setting = setting
        self._listener = _TrialListener(proposed.number, setting)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=call.run_id, daemon=True)

    def start(self) -> None:
        """Start the try."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the try; its trial is put back."""
        self._stopped.set()

    @property
    def goes_on(self) -> bool:
        """Return whether the try still runs or has not queued the upload of all its logs."""
        return self._thread.is_alive()

    @property
    def containers(self) -> tuple[Container, ...]:
        """Return the containers of its ranks."""
        return tuple(place.container for place in self.world.places)

    def report(self) -> TrialReport:
        """Return what is known of the trial when the try starts."""
        return TrialReport(
            number=self.proposed.number,
            params=self.proposed.params,
            state=RUNNING,
            gpu=",".join(gpu for container in self.containers for gpu in container.gpus),
            host=",".join(dict.fromkeys(container.host for container in self.containers)),
            started=self.began,
            tries=self.call.attempt + 1,
            log=self.call.logs.url,
        )

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` until the upload of its logs is queued."""
        self._thread.join(seconds)

    @property
    def keys(self) -> frozenset[int]:
        """Return the keys of its agents."""
        return frozenset(slot.executor for slot in self.slots)

    def _run(self) -> None:
        board, cache, number = (
            self._setting.board,
            self._setting.rendezvous_cache,
            self.proposed.number,
        )
        has_told = False
        try:
            with train_on(
                self._lease,
                self.world,
                self.call,
                TrialOutput(board, number),
                self._listener,
                self._stopped,
            ) as training:
                try:
                    trained = training.run(cache.taken(self.slots))
                    self.outcome = self._outcome(trained)
                    if trained.conclusion is not None:
                        self.avoid = trained.conclusion.avoid
                    for text in self._listener.warnings:
                        board.warn(f"trial {number}: {text}")
                    cache.keep(self.slots, training.rendezvous, self.outcome.how)
                    has_told = True
                    # The upload of the logs can wait; the next trial must not.
                    self._setting.tell(self)
                    self.followed.wait(_FOLLOWED_SECONDS)
                finally:
                    training.keep_logs(self._setting.background)
        except Cancelled:
            self.outcome = Outcome(TrialEnd.STOPPED)
        except (ConfigError, DiscoveryError) as error:
            self.fatal = error
        except Exception as error:  # noqa: BLE001 - becomes the trial's own failure, and is told
            if not has_told:
                self.outcome = Outcome(TrialEnd.FAILED, error=f"{type(error).__name__}: {error}")
        finally:
            if not has_told:
                self._setting.tell(self)

    def _outcome(self, trained: Trained) -> Outcome:
        if trained.conclusion is not None:
            failure = trained.conclusion.failure
            if trained.conclusion.fault is not Fault.INFRASTRUCTURE:
                return Outcome(TrialEnd.FAILED, error=str(failure))
            is_excused = suspect(failure.host or "", str(failure)) is None
            return Outcome(TrialEnd.PREEMPTED if is_excused else TrialEnd.LOST, error=str(failure))
        if self._listener.was_pruned:
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
