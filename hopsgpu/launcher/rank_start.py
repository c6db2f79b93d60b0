"""The start of ranks: their processes start, and then the user's function runs in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hopsgpu.control.channel import Message
from hopsgpu.core.gang import World

# The agents' messages about it.
KINDS = ("started", "entered")


class RankStartListener(Protocol):
    """Is notified of the progress of an attempt's ranks."""

    def entered(self, ranks: int, of: int, at: float) -> None:
        """Report in how many ranks the user's function runs.

        Args:
            ranks: number of ranks in which it runs, with parameter servers.
            of: number of all ranks.
            at: when it began in the last of these, in seconds since the epoch.
        """

    def metrics(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """Report the ranks' last metrics, by rank."""


class RankStarts:
    """The starts of one attempt's ranks.

    Args:
        world: the ranks.
        told: is notified of each rank in which the function begins.

    Attributes:
        pids: process ids of the started ranks, by rank.
    """

    def __init__(self, world: World, told: RankStartListener) -> None:
        self._world = world
        self._told = told
        self.pids: dict[int, int] = {}
        self._entered: dict[int, float] = {}

    def take(self, message: Message) -> None:
        """Process a message of one of `KINDS`."""
        rank = int(message["rank"])
        if message.kind == "started":
            self.pids[rank] = message["pid"]
            return
        clock = self._world.processes[rank].container.clock
        self._entered[rank] = float(message["time"]) + clock
        last = max(self._entered.values())
        self._told.entered(len(self._entered), len(self._world.processes), last)
