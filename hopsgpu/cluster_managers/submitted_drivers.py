"""The interface of drivers that run in a cluster (cluster mode), for the command that waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hopsgpu.cluster_managers.manager import StartProblem


@dataclass(frozen=True)
class DriverState:
    """The state of an application whose driver runs in the cluster.

    Attributes:
        id: the application's ID.
        user: the user that the cluster manager knows for it; "" if it knows none.
        place: where it was submitted to, such as "queue root.default".
        situation: what it does now, or what it waits for.
        gist: the situation without the parts that change from one answer to the next.
        driver: what the cluster manager calls the driver, such as a container; "" before there is
            one.
        node: address of the node that has the driver's log; "" if the cluster manager has it.
        log: where the driver's log is, such as a URL; "" before there is one.
        is_killed: whether somebody ended it from outside.
        outcome: how it ended, in the cluster manager's words.
        diagnostics: the reason of its end, on one line; "" for none.
        exit_code: that of the driver's Python; None if it is unknown.
        problem: what keeps the driver from starting; None for nothing.
    """

    id: str
    name: str
    user: str
    place: str
    situation: str
    gist: str
    driver: str
    node: str
    log: str
    has_ended: bool
    has_succeeded: bool
    is_killed: bool
    outcome: str
    diagnostics: str
    exit_code: int | None
    problem: StartProblem | None = None


class SubmittedDrivers(ABC):
    """The drivers that a cluster manager runs.

    All methods raise HopsGpuError if the cluster manager does not answer, or refuses the caller.
    """

    @abstractmethod
    def find(self, tag: str) -> DriverState | None:
        """Return the application that was submitted with a tag; None if there is none."""

    @abstractmethod
    def state(self, application_id: str) -> DriverState:
        """Return the state of an application.

        Raises:
            HopsGpuError: the cluster manager does not know it any more.
        """

    @abstractmethod
    def end(self, state: DriverState) -> None:
        """Have the cluster manager end an application."""

    @abstractmethod
    def outputs(self, state: DriverState) -> Sequence[str]:
        """Return the names of the driver's outputs that people need at its end."""

    @abstractmethod
    def read_end(self, state: DriverState, output: str, max_bytes: int) -> str:
        """Return the end of an output of the driver."""

    @abstractmethod
    def log_command(self, state: DriverState) -> str:
        """Return the command with which people read the driver's log after its end."""

    @abstractmethod
    def list_command(self) -> str:
        """Return the command with which people find the application."""

    @abstractmethod
    def end_command(self, application_id: str) -> str:
        """Return the command with which people end an application."""
