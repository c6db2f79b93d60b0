"""How ranks begin: their processes are started, and then the user's function runs in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hopsgpu.control.channel import Message
from hopsgpu.core.gang import World

# What an agent says of it.
KINDS = ("started", "entered")


class Told(Protocol):
    """Who is told how the ranks of an attempt fare."""

    def entered(self, ranks: int, of: int, at: float) -> None:
        """The user's function runs in so many of the ranks, in the last of them since then.

        Args:
            ranks: parameter servers among them.
            of: how many there are.
            at: seconds since the epoch.
        """

    def metrics(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """The ranks' last metrics, by rank."""


class Beginnings:
    """Those of one attempt.

    Args:
        world: its ranks.
        told: told of each in which the function runs.

    Attributes:
        pids: of the processes that were started, by rank.
    """

    def __init__(self, world: World, told: Told) -> None:
        self._world = world
        self._told = told
        self.pids: dict[int, int] = {}
        self._entered: dict[int, float] = {}

    def take(self, message: Message) -> None:
        """Takes in a message of `KINDS`."""
        rank = int(message["rank"])
        if message.kind == "started":
            self.pids[rank] = message["pid"]
            return
        clock = self._world.processes[rank].container.clock
        self._entered[rank] = float(message["time"]) + clock
        last = max(self._entered.values())
        self._told.entered(len(self._entered), len(self._world.processes), last)
