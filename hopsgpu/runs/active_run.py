"""A run in progress: what its parts have in common, for a launch and for a search."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Generic, TypeVar

from hopsgpu.attempts.attempt_watcher import WatchBounds
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.core.gpu_idle import IdleBounds
from hopsgpu.core.spec import LaunchPlan
from hopsgpu.runs.status_board import StatusBoard
from hopsgpu.storage.background import Background
from hopsgpu.storage.lake import LakePath

B = TypeVar("B", bound=StatusBoard, covariant=True)


@dataclass(frozen=True)
class ActiveRun(Generic[B]):
    """A run in progress.

    Attributes:
        plan: its plan; a search's is that of one executor.
    """

    plan: LaunchPlan
    application: GangApplication
    board: B
    cancelled: threading.Event
    background: Background

    @property
    def run_id(self) -> str:
        """The id of the run, which is also the name of its directory on the lake."""
        return self.board.run_id

    @property
    def bounds(self) -> WatchBounds:
        """How long its ranks and agents are waited for, and how long their GPUs may idle.

        Raises:
            ConfigError: an option of the application is invalid.
        """
        idle = IdleBounds(self.application.gpu_idle_warning, self.plan.spec.gpu_idle_timeout)
        return WatchBounds(idle=idle)

    def directory(self) -> LakePath:
        """Return the run's directory on the lake.

        Each call creates a new client, so that a run that has ended holds no connections.
        """
        return LakePath(self.plan.paths["run"])
