"""The ranks of one call on slots of executors: run from start to end, in a separate thread."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from hopsgpu.attempts.attempt import AttemptListener, Trained, Training, train_on
from hopsgpu.attempts.attempt_watcher import WatchBounds
from hopsgpu.attempts.outcome import Conclusion
from hopsgpu.attempts.rank_call import Call
from hopsgpu.attempts.rank_table import Entered, RankTable
from hopsgpu.attempts.rendezvous import Rendezvous
from hopsgpu.attempts.retry_policy import Fault, suspect
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.core.gang import Exclusions, GangExecutor, assign_ranks
from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.core.run_values import RunStatus
from hopsgpu.errors import Cancelled, ConfigError, DiscoveryError, HopsGpuError
from hopsgpu.storage.background import Background
from hopsgpu.tuning.executors_board import ExecutorsBoard
from hopsgpu.tuning.scheduler import Slot, TrialEnd
from hopsgpu.tuning.trial_outcome import Outcome


@dataclass(frozen=True)
class RanksOutput:
    """Shows the ranks' output on the display of their search; a `Progress`."""

    board: ExecutorsBoard
    number: int

    def status(self, status: RunStatus) -> None:
        return

    def line(self, rank: int, host: str, *texts: str) -> None:
        self.board.line(self.number, rank, host, *texts)


class SlotListener(AttemptListener):
    """A listener to the ranks of one call, which collects their warnings.

    Args:
        board: told that the function runs.

    Attributes:
        warnings: warnings for people.
    """

    def __init__(self, board: ExecutorsBoard) -> None:
        self.warnings: list[str] = []
        self._board = board
        self._ranks: RankTable | None = None

    def placed(self, ranks: RankTable) -> None:
        self._ranks = ranks

    def losses(self, gpus: float) -> RankLosses:
        """Return the GPU seconds that the ranks have lost; each has so many GPUs."""
        return RankLosses() if self._ranks is None else self._ranks.losses(gpus)

    def entered(self, entered: Entered) -> None:
        if entered.all:
            self._board.runs(entered.at)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class SlotRun(ABC):
    """The ranks of one call on its slots; `start` starts them.

    Args:
        number: number by which the display and the log know it.
        slots: slots of its ranks.
        allocation: allocation of its executors.
        call: what the ranks run.
        board: board of the search that it belongs to.
        background: uploads the ranks' logs to the lake.
        bounds: how long ranks and agents are waited for, and how long GPUs may idle.
        listener: notified of its progress.

    Attributes:
        number, slots, call: as given.
        world: its ranks.
        outcome: how it ended, once it has.
        avoid: the GPUs and nodes that caused its failure.
        fatal: error that ends the search, or None.
    """

    def __init__(
        self,
        number: int,
        slots: tuple[Slot, ...],
        allocation: GangAllocation,
        call: Call,
        board: ExecutorsBoard,
        background: Background,
        bounds: WatchBounds,
        listener: SlotListener,
    ) -> None:
        self.number = number
        self.slots = slots
        self.call = call
        containers = {container.key: container for container in allocation.containers}
        self.world = assign_ranks([containers[slot.executor] for slot in slots], 1)
        self.began = time.time()
        self.outcome = Outcome(TrialEnd.STOPPED)
        self.avoid = Exclusions()
        self.fatal: HopsGpuError | None = None
        self._allocation = allocation
        self._board = board
        self._background = background
        self._bounds = bounds
        self._listener = listener
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=call.run_id, daemon=True)

    @property
    @abstractmethod
    def label(self) -> str:
        """Return what warnings and the log call it."""

    @abstractmethod
    def _tell_end(self) -> None:
        """Tell the search's thread that the ranks have ended; called in this one's thread."""

    @abstractmethod
    def _returned(self, trained: Trained) -> Outcome:
        """Return the outcome of ranks that have returned."""

    def _known(self) -> Rendezvous | None:
        """Return a rendezvous that the ranks can take over; None for a new one."""
        return None

    def _concluded(self, training: Training) -> None:
        """Handle that the outcome is known, before the end is reported."""
        return

    def _told(self) -> None:
        """Wait, once the end is reported, until the logs may be uploaded."""
        return

    def start(self) -> None:
        """Start the ranks."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the ranks; what they were to do is put back."""
        self._stopped.set()

    @property
    def is_running(self) -> bool:
        """Return whether the ranks still run, or the upload of all their logs is not queued."""
        return self._thread.is_alive()

    @property
    def containers(self) -> tuple[GangExecutor, ...]:
        """Return the containers of its ranks."""
        return tuple(place.container for place in self.world.places)

    @property
    def hosts(self) -> str:
        """Return the hosts of its ranks, each once."""
        return ", ".join(sorted({container.host for container in self.containers}))

    @property
    def keys(self) -> frozenset[int]:
        """Return the keys of its agents."""
        return frozenset(slot.executor for slot in self.slots)

    def losses(self, gpus: float) -> RankLosses:
        """Return the GPU seconds that its ranks have lost until now.

        Args:
            gpus: number of GPUs of each rank.
        """
        return self._listener.losses(gpus)

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` until the upload of its logs is queued."""
        self._thread.join(seconds)

    def _run(self) -> None:
        has_told = False
        try:
            with train_on(
                self._allocation,
                self.world,
                self.call,
                RanksOutput(self._board, self.number),
                self._listener,
                self._stopped,
                self._bounds,
            ) as training:
                try:
                    trained = training.run(self._known())
                    self.outcome = self._outcome(trained)
                    if trained.conclusion is not None:
                        self.avoid = trained.conclusion.avoid
                    for text in self._listener.warnings:
                        self._board.warn(f"{self.label}: {text}")
                    self._concluded(training)
                    has_told = True
                    self._tell_end()
                    self._told()
                finally:
                    training.keep_logs(self._background)
        except Cancelled:
            self.outcome = Outcome(TrialEnd.STOPPED)
        except (ConfigError, DiscoveryError) as error:
            self.fatal = error
        except Exception as error:  # noqa: BLE001 - becomes the ranks' own failure, and is reported
            if not has_told:
                self.outcome = Outcome(TrialEnd.FAILED, error=f"{type(error).__name__}: {error}")
        finally:
            if not has_told:
                self._tell_end()

    def _outcome(self, trained: Trained) -> Outcome:
        if trained.conclusion is None:
            return self._returned(trained)
        return failed_outcome(trained.conclusion)


def failed_outcome(conclusion: Conclusion) -> Outcome:
    """Return the outcome of ranks that failed or were lost."""
    failure = conclusion.failure
    if conclusion.fault is not Fault.INFRASTRUCTURE:
        return Outcome(TrialEnd.FAILED, error=str(failure))
    is_excused = suspect(failure.host or "", str(failure)) is None
    return Outcome(TrialEnd.PREEMPTED if is_excused else TrialEnd.LOST, error=str(failure))
