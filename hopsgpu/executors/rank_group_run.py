"""A group of ranks on slots of executors: run from start to end, in a separate thread."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from hopsgpu.attempts.attempt import AttemptListener, AttemptResult, AttemptRunner, open_attempt
from hopsgpu.attempts.attempt_watcher import WatchBounds
from hopsgpu.attempts.outcome import AttemptFailure
from hopsgpu.attempts.rank_call import Call
from hopsgpu.attempts.rank_table import FunctionEntry, RankTable
from hopsgpu.attempts.rendezvous import Rendezvous
from hopsgpu.attempts.retry_policy import FailureCause, suspect_host
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.core.gang import Exclusions, GangExecutor, assign_ranks
from hopsgpu.core.gpu_losses import RankLosses
from hopsgpu.core.run_values import RunStatus
from hopsgpu.errors import Cancelled, ConfigError, DiscoveryError, HopsGpuError
from hopsgpu.executors.executors_board import ExecutorsBoard
from hopsgpu.executors.item_placement import ItemEnd, Slot
from hopsgpu.storage.background import Background

# A group that has ended has no executor, so it can wait while many logs of others are queued.
_ROOM_SECONDS = 60.0


@dataclass(frozen=True)
class RankGroupOutcome:
    """How a group of ranks ended.

    Attributes:
        error: what failed, with the user's traceback; "" if nothing failed.
    """

    how: ItemEnd
    error: str = ""


@dataclass(frozen=True)
class RankGroupSetting:
    """The values that all groups of ranks of a run share."""

    board: ExecutorsBoard
    background: Background
    bounds: WatchBounds


@dataclass(frozen=True)
class _RankOutput:
    """Shows the output of ranks on the display of their run; a `Progress`."""

    board: ExecutorsBoard
    number: int

    def status(self, status: RunStatus) -> None:
        return

    def line(self, rank: int, host: str, *texts: str) -> None:
        self.board.line(self.number, rank, host, *texts)


class RankGroupListener(AttemptListener):
    """A listener to a group of ranks, which collects their warnings."""

    def __init__(self, board: ExecutorsBoard) -> None:
        self.warnings: list[str] = []
        self._board = board
        self._ranks: RankTable | None = None

    def on_placement(self, ranks: RankTable) -> None:
        self._ranks = ranks

    def losses(self, gpus: float) -> RankLosses:
        """Return the GPU seconds that the ranks have lost; each has so many GPUs."""
        return RankLosses() if self._ranks is None else self._ranks.losses(gpus)

    def on_entry(self, entered: FunctionEntry) -> None:
        if entered.is_complete:
            self._board.record_entry(entered.at)

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


class RankGroupRun(ABC):
    """A group of ranks on its slots; `start` starts them.

    Args:
        number: number by which the display and the log know it.

    Attributes:
        exclusions: the GPUs and nodes that caused its failure.
        fatal: error that ends the run, or None.
    """

    def __init__(
        self,
        number: int,
        slots: tuple[Slot, ...],
        allocation: GangAllocation,
        call: Call,
        setting: RankGroupSetting,
        listener: RankGroupListener,
    ) -> None:
        self.number = number
        self.slots = slots
        self.call = call
        containers = {container.key: container for container in allocation.containers}
        self.world = assign_ranks([containers[slot.executor] for slot in slots], 1)
        self.created_at = time.time()
        self.outcome = RankGroupOutcome(ItemEnd.STOPPED)
        self.exclusions = Exclusions()
        self.fatal: HopsGpuError | None = None
        self._allocation = allocation
        self._board = setting.board
        self._background = setting.background
        self._bounds = setting.bounds
        self._listener = listener
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=call.run_id, daemon=True)

    @property
    @abstractmethod
    def label(self) -> str:
        """Return what warnings and the log call it."""

    @abstractmethod
    def _report_end(self) -> None:
        """Notify the run's loop that the ranks have ended; called in this group's thread."""

    @abstractmethod
    def _outcome_of(self, result: AttemptResult) -> RankGroupOutcome:
        """Return the outcome of ranks that have returned."""

    def _take_rendezvous(self) -> Rendezvous | None:
        """Return a rendezvous that the ranks can take over; None for a new one."""
        return None

    def _on_conclusion(self, runner: AttemptRunner) -> None:
        """Handle that the outcome is known, before the end is reported."""
        return

    def _wait_before_log_upload(self) -> None:
        """Wait, once the end is reported, until the logs may be uploaded."""
        return

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the ranks; what they were to do is put back."""
        self._stopped.set()

    @property
    def is_alive(self) -> bool:
        """Return whether the ranks still run, or the upload of all their logs is not queued."""
        return self._thread.is_alive()

    @property
    def containers(self) -> tuple[GangExecutor, ...]:
        return tuple(place.container for place in self.world.places)

    @property
    def hosts(self) -> str:
        """Return the hosts of its ranks, each once."""
        return ", ".join(sorted({container.host for container in self.containers}))

    @property
    def keys(self) -> frozenset[int]:
        return frozenset(slot.executor for slot in self.slots)

    def losses(self, gpus: float) -> RankLosses:
        """Return the GPU seconds that its ranks have lost until now."""
        return self._listener.losses(gpus)

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` until the upload of its logs is queued."""
        self._thread.join(seconds)

    def _run(self) -> None:
        is_end_reported = False
        try:
            with open_attempt(
                self._allocation,
                self.world,
                self.call,
                _RankOutput(self._board, self.number),
                self._listener,
                self._stopped,
                self._bounds,
            ) as runner:
                try:
                    result = runner.run(self._take_rendezvous())
                    if result.failure is None:
                        self.outcome = self._outcome_of(result)
                    else:
                        self.outcome = outcome_of_failure(result.failure)
                        self.exclusions = result.failure.exclusions
                    for text in self._listener.warnings:
                        self._board.warn(f"{self.label}: {text}")
                    self._on_conclusion(runner)
                    is_end_reported = True
                    self._report_end()
                    self._wait_before_log_upload()
                finally:
                    runner.queue_log_uploads(self._background, _ROOM_SECONDS)
        except Cancelled:
            self.outcome = RankGroupOutcome(ItemEnd.STOPPED)
        except (ConfigError, DiscoveryError) as error:
            self.fatal = error
        except Exception as error:  # noqa: BLE001 - becomes the ranks' own failure, and is reported
            if not is_end_reported:
                self.outcome = RankGroupOutcome(ItemEnd.FAILED, f"{type(error).__name__}: {error}")
        finally:
            if not is_end_reported:
                self._report_end()


def outcome_of_failure(failure: AttemptFailure) -> RankGroupOutcome:
    error = failure.error
    if failure.cause is not FailureCause.INFRASTRUCTURE:
        return RankGroupOutcome(ItemEnd.FAILED, str(error))
    is_excused = suspect_host(error.host or "", str(error)) is None
    return RankGroupOutcome(ItemEnd.PREEMPTED if is_excused else ItemEnd.LOST, str(error))
