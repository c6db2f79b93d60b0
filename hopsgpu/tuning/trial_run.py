"""One try of a trial: runs its ranks from their start to their end, in a separate thread."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hopsgpu.backends.grant import Lease
from hopsgpu.control.channel import Message
from hopsgpu.control.server import Event
from hopsgpu.core.gang import Container, Exclusions, World
from hopsgpu.core.run_values import RunStatus
from hopsgpu.core.trials import RUNNING, TrialReport
from hopsgpu.errors import Cancelled, ConfigError, DiscoveryError, HopsGpuError
from hopsgpu.launcher.attempt import Trained, train_on
from hopsgpu.launcher.background import Background
from hopsgpu.launcher.rank_call import Call
from hopsgpu.launcher.rendezvous import Rendezvous
from hopsgpu.launcher.retry_policy import Fault, suspect
from hopsgpu.tuning.message_router import MessageRouter, TrialAgents
from hopsgpu.tuning.sampler_thread import Proposed
from hopsgpu.tuning.scheduler import Slot, TrialEnd
from hopsgpu.tuning.status_board import SearchBoard
from hopsgpu.tuning.trial_outcome import NoMetric, Outcome, Reports, metric_of

_FOLLOWED_SECONDS = 1.0
_CLEAN = frozenset({TrialEnd.COMPLETE, TrialEnd.PRUNED})


class RendezvousCache:
    """The meetings of single-rank trials that ended well, for the next trial on the same slot.

    Several threads may use it at the same time, because only one trial has a slot.
    """

    def __init__(self) -> None:
        self._left: dict[Slot, Rendezvous] = {}

    def taken(self, slots: Sequence[Slot]) -> Rendezvous | None:
        """Remove and return the last meeting on a slot; None if these ranks must meet anew."""
        left = [self._left.pop(slot, None) for slot in slots]
        return left[0] if len(left) == 1 else None

    def keep(self, slots: Sequence[Slot], meeting: Rendezvous | None, how: TrialEnd) -> None:
        """Keep a meeting for the next trial, if this trial has one rank and ended well.

        After another end, something of the trial may be left.
        """
        if meeting is not None and len(slots) == 1 and how in _CLEAN:
            self._left[slots[0]] = meeting


@dataclass(frozen=True)
class TrialOutput:
    """Shows a trial's output on the search's display; a `Progress`."""

    board: SearchBoard
    number: int

    def status(self, status: RunStatus) -> None:
        return

    def line(self, rank: int, host: str, *texts: str) -> None:
        self.board.line(self.number, rank, host, *texts)


class _TrialStartListener:
    """Records on the search's board that a trial runs."""

    def __init__(self, board: SearchBoard) -> None:
        self._board = board

    def entered(self, ranks: int, of: int, at: float) -> None:
        if ranks == of:
            self._board.runs(at)

    def metrics(self, metrics: object) -> None:
        """Ignore the last metrics of each rank: a search reads every report instead."""


class TrialRun:
    """One try of a trial on its slots; `start` starts it, and it calls `over` at its end.

    Args:
        proposed: the trial.
        slots: slots of its ranks.
        switch: routes the messages of its agents.
        lease: returns a lease of its executors, given the wire to them.
        world: its ranks.
        call: what the ranks run.
        meetings: meetings of earlier trials.
        metric: name of the metric that is optimized, or None.
        board: shows its output.
        background: uploads its logs to the lake.
        begun: called with the trial's number once its first rank has started.
        reported: called with the trial's number and its first rank's reports: (step, metric) pairs.
        over: called in its thread at its end.

    Attributes:
        proposed, slots: as given.
        outcome: how it ended, once it has.
        avoid: the GPUs and nodes that caused its failure.
        fatal: error that ends the search, or None.
        warnings: warnings for the user.
        followed: event that the search sets once the next trial on its slots has begun.
    """

    def __init__(
        self,
        proposed: Proposed,
        slots: tuple[Slot, ...],
        switch: MessageRouter,
        lease: Callable[[TrialAgents], Lease],
        world: World,
        call: Call,
        meetings: RendezvousCache,
        metric: str | None,
        board: SearchBoard,
        background: Background,
        begun: Callable[[int], None],
        reported: Callable[[int, Sequence[tuple[int, float]]], None],
        over: Callable[[TrialRun], None],
    ) -> None:
        self.proposed = proposed
        self.slots = slots
        self.world = world
        self.call = call
        self.began = time.time()
        self.outcome = Outcome(TrialEnd.STOPPED)
        self.avoid = Exclusions()
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
        """Start the try."""
        self._thread.start()

    def lost(self, event: Event) -> None:
        """Record that an executor is gone; the event may have been routed before the try began."""
        self._wire.put(event)

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

    def _heard(self, message: Message) -> None:
        """Handle a message about the first rank, before the try's thread handles it."""
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
                TrialOutput(self._board, self.proposed.number),
                _TrialStartListener(self._board),
                self._stopped,
            ) as training:
                try:
                    trained = training.run(self._meetings.taken(self.slots))
                    self.outcome, self.avoid = self._outcome(trained), trained.avoid
                    self.warnings = tuple(training.trained.warnings)
                    self._meetings.keep(self.slots, training.meeting, self.outcome.how)
                    told = True
                    # The upload of the logs can wait; the next trial must not.
                    self._over(self)
                    self.followed.wait(_FOLLOWED_SECONDS)
                finally:
                    training.keep_logs(self._background)
        except Cancelled:
            self.outcome = Outcome(TrialEnd.STOPPED)
        except (ConfigError, DiscoveryError) as error:
            self.fatal = error
        except Exception as error:  # noqa: BLE001 - becomes the trial's own failure, and is told
            if not told:
                self.outcome = Outcome(TrialEnd.FAILED, error=f"{type(error).__name__}: {error}")
        finally:
            self._switch.drop(self.call.run_id, self._wire)
            if not told:
                self._over(self)

    def _outcome(self, trained: Trained) -> Outcome:
        failure = trained.failure
        if failure is not None:
            if trained.fault is not Fault.INFRASTRUCTURE:
                return Outcome(TrialEnd.FAILED, error=str(failure))
            taken = suspect(failure.host or "", str(failure)) is None
            return Outcome(TrialEnd.PREEMPTED if taken else TrialEnd.LOST, error=str(failure))
        if self._was_pruned:
            return Outcome(TrialEnd.PRUNED)
        try:
            pickled = trained.values[0].content(self.call.directory)
            value, metrics = metric_of(_unpickled(pickled), self._metric)
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
            "what the function returned cannot be unpickled at the driver"
            f" ({type(error).__name__}: {error}); return numbers"
        ) from error
    return value
