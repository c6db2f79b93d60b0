"""What executors are waited for by: why they do not come, in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from hopsgpu.gang import GangState
from hopsgpu.spark.request import Watcher


class EndedAgain:
    """Containers that YARN granted and that have ended, but for those that may."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._seen: set[str] = set()
        self._excused: set[str] = set()
        self._lost: list[str] = []

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self._lost)

    def look(self, held: Collection[str], came: Collection[str] = ()) -> None:
        """Takes in which there are.

        Args:
            held: ids of those that YARN shows now.
            came: of those whose executors came, whatever became of them.
        """
        self._held = set(held)
        self._seen |= self._held
        self._lost = sorted(self._seen.difference(held, came, self._excused))

    def forget(self) -> None:
        """They count no longer: one has come."""
        self._seen, self._lost = set(), []

    def excuse(self) -> None:
        """Those that there are may go: hopsgpu itself lets them go."""
        self._excused |= self._held

    def beside(self, *parts: str) -> str:
        """What a person is told of them, after what else there is to tell."""
        lost = self._lost
        if lost:
            parts += (
                f"{len(lost)} ended again, see the node's log of {lost[-1]} (a GPU that cannot be"
                " discovered, memory, Python?)",
            )
        return ", ".join(parts)


class _Owner(Protocol):
    why: str


@dataclass(frozen=True)
class WhyAlone:
    """A gang's watcher of whose words why it waits is kept alone, and warnings go on.

    Args:
        watcher: gets the warnings.
        owner: its `why` becomes why it waits.
    """

    watcher: Watcher
    owner: _Owner

    def state(self, state: GangState, hosts: Sequence[str], why: str = "") -> None:
        self.owner.why = why

    def mark(self, point: str) -> None:
        return

    def arrived(self, times: Sequence[float]) -> None:
        return

    def warn(self, text: str) -> None:
        self.watcher.warn(text)
