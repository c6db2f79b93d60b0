"""One try of a trial: its ranks, from their start to their end, in a thread of its own."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hopsgpu.backends.grant import Lease
from hopsgpu.control.channel import Message
from hopsgpu.control.server import Event
from hopsgpu.core.gang import Avoid, Container, World
from hopsgpu.core.run_values import RunStatus
from hopsgpu.core.trials import RUNNING, TrialReport
from hopsgpu.errors import Cancelled, ConfigError, DiscoveryError, HopsGpuError
from hopsgpu.launcher.attempt import Trained, train_on
from hopsgpu.launcher.background import Background
from hopsgpu.launcher.rank_call import Call
from hopsgpu.launcher.rendezvous import Meeting
from hopsgpu.launcher.retry_policy import Fault, suspect
from hopsgpu.tuning.message_router import Switch, TrialWire
from hopsgpu.tuning.sampler_thread import Proposed
from hopsgpu.tuning.scheduler import End, Slot
from hopsgpu.tuning.status_board import SearchBoard
from hopsgpu.tuning.trial_outcome import NoMetric, Outcome, Reports, measured

_FOLLOWED_SECONDS = 1.0
_CLEAN = frozenset({End.COMPLETE, End.PRUNED})


class Meetings:
    """Where trials of a single rank met that ended well, for the next on the same slot.

    Threads may use it at the same time: a slot is only one trial's.
    """

    def __init__(self) -> None:
        self._left: dict[Slot, Meeting] = {}

    def taken(self, slots: Sequence[Slot]) -> Meeting | None:
        """Where the last rank met on the slot; None where these ranks are to meet anew."""
        left = [self._left.pop(slot, None) for slot in slots]
        return left[0] if len(left) == 1 else None

    def keep(self, slots: Sequence[Slot], meeting: Meeting | None, how: End) -> None:
        """Leaves a meeting to the next trial, unless of this one something may be left."""
        if meeting is not None and len(slots) == 1 and how in _CLEAN:
            self._left[slots[0]] = meeting


@dataclass(frozen=True)
class Shown:
    """A trial's output on the search's display; a `Progress`."""

    board: SearchBoard
    number: int

    def status(self, status: RunStatus) -> None:
        return

    def line(self, rank: int, host: str, *texts: str) -> None:
        self.board.line(self.number, rank, host, *texts)


class _Told:
    """Tells the search's board that a trial runs."""

    def __init__(self, board: SearchBoard) -> None:
        self._board = board

    def entered(self, ranks: int, of: int, at: float) -> None:
        if ranks == of:
            self._board.runs(at)

    def metrics(self, metrics: object) -> None:
        """The last ones of each rank: a search reads each report instead."""


class Try:
    """A trial on its slots; `start` begins it, and `over` is called at its end.

    Args:
        proposed: the trial.
        slots: of its ranks.
        switch: brings what its agents say.
        lease: its executors, given the wire to them.
        world: its ranks.
        call: what they run.
        meetings: where the ranks of earlier trials met.
        metric: name of what is searched for, or None.
        board: on which its output is shown.
        background: brings its logs to the lake.
        begun: called with its number once its ranks begin.
        reported: called with the metric at steps that its first rank reports.
        over: called in its thread at its end.

    Attributes:
        proposed, slots: as given.
        outcome: how it ended, once it has.
        avoid: the GPUs and nodes that were to blame for its failure.
        fatal: what ends the search, or None.
        warnings: what a person should know.
        followed: to be set once what follows on its slots has begun.
    """

    def __init__(
        self,
        proposed: Proposed,
        slots: tuple[Slot, ...],
        switch: Switch,
        lease: Callable[[TrialWire], Lease],
        world: World,
        call: Call,
        meetings: Meetings,
        metric: str | None,
        board: SearchBoard,
        background: Background,
        begun: Callable[[int], None],
        reported: Callable[[int, Sequence[tuple[int, float]]], None],
        over: Callable[[Try], None],
    ) -> None:
        self.proposed = proposed
        self.slots = slots
        self.world = world
        self.call = call
        self.began = time.time()
        self.outcome = Outcome(End.STOPPED)
        self.avoid = Avoid()
        self.fatal: HopsGpuError | None = None
        self.warnings: tuple[str, ...] = ()
        self.followed = threading.Event()
        self._reports = Reports(metric)
        self._was_pruned = False
        self._switch = switch
        self._wire = switch.add(call.run_id, self.keys, self._heard)
        self._lease = lease(self._wire)
        self._meetings = meetings
        self._metric = metric
        self._board = board
        self._background = background
        self._begun = begun
        self._reported = reported
        self._over = over
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=call.run_id, daemon=True)

    def start(self) -> None:
        """Begins it."""
        self._thread.start()

    def lost(self, event: Event) -> None:
        """Tells it that an executor is gone: it may have begun just then, and not have heard."""
        self._wire.put(event)

    def stop(self) -> None:
        """Ends it; it is put back."""
        self._stopped.set()

    @property
    def goes_on(self) -> bool:
        """Whether its logs are not all on their way yet."""
        return self._thread.is_alive()

    @property
    def containers(self) -> tuple[Container, ...]:
        """Those of its ranks."""
        return tuple(place.container for place in self.world.places)

    def report(self) -> TrialReport:
        """What is known of it when it begins."""
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
        """Waits until its logs are on their way."""
        self._thread.join(seconds)

    @property
    def keys(self) -> frozenset[int]:
        """Its agents'."""
        return frozenset(slot.executor for slot in self.slots)

    def _heard(self, message: Message) -> None:
        """Takes in what its first rank says of itself, before its end is told."""
        if message.kind == "record" and message["rank"] == 0:
            if reported := self._reports.take(message.payload):
                self._reported(self.proposed.number, reported)
        elif message.kind == "started" and message["rank"] == 0:
            self._begun(self.proposed.number)
        elif message.kind == "ended" and message["rank"] == 0:
            self._was_pruned = bool(message["pruned"])

    def _run(self) -> None:
        told = False
        try:
            with train_on(
                self._lease,
                self.world,
                self.call,
                Shown(self._board, self.proposed.number),
                _Told(self._board),
                self._stopped,
            ) as training:
                try:
                    trained = training.run(self._meetings.taken(self.slots))
                    self.outcome, self.avoid = self._outcome(trained), trained.avoid
                    self.warnings = tuple(training.trained.warnings)
                    self._meetings.keep(self.slots, training.meeting, self.outcome.how)
                    told = True
                    # What follows has time; the next trial has not.
                    self._over(self)
                    self.followed.wait(_FOLLOWED_SECONDS)
                finally:
                    training.keep_logs(self._background)
        except Cancelled:
            self.outcome = Outcome(End.STOPPED)
        except (ConfigError, DiscoveryError) as error:
            self.fatal = error
        except Exception as error:  # noqa: BLE001 - becomes the trial's own failure, and is told
            if not told:
                self.outcome = Outcome(End.FAILED, error=f"{type(error).__name__}: {error}")
        finally:
            self._switch.drop(self.call.run_id, self._wire)
            if not told:
                self._over(self)

    def _outcome(self, trained: Trained) -> Outcome:
        failure = trained.failure
        if failure is not None:
            if trained.fault is not Fault.INFRASTRUCTURE:
                return Outcome(End.FAILED, error=str(failure))
            taken = suspect(failure.host or "", str(failure)) is None
            return Outcome(End.PREEMPTED if taken else End.LOST, error=str(failure))
        if self._was_pruned:
            return Outcome(End.PRUNED)
        try:
            pickled = trained.values[0].content(self.call.directory)
            value, metrics = measured(_unpickled(pickled), self._metric)
        except (NoMetric, HopsGpuError) as error:
            return Outcome(End.FAILED, error=str(error))
        return Outcome(End.COMPLETE, value, metrics)


def _unpickled(pickled: bytes) -> object:
    """A value from an agent that proved the run's secret; what lay on the lake bears its digest."""
    try:
        value: object = pickle.loads(pickled)
    except Exception as error:
        raise NoMetric(
            "what the function returned cannot be unpickled at the driver"
            f" ({type(error).__name__}: {error}); return numbers"
        ) from error
    return value
