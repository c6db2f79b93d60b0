"""What executors are waited for by: why they do not come, in words."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from hopsgpu.errors import Cancelled
from hopsgpu.gang import GangState, backoff_seconds, end_again
from hopsgpu.spark.request import Patience, Request, Watcher


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


class Coming:
    """The executors of a search that were asked for and have not come."""

    def __init__(self) -> None:
        self._came: set[str] = set()
        self._ended = EndedAgain()
        self._given_back = 0
        self._asks_at = float("-inf")
        self._first: Patience | None = None

    def patience(self, request: Request) -> Patience:
        """How long those may take that are asked for now.

        Args:
            request: theirs; it has a timeout where none is here, which goes on from the first time.
        """
        if request.timeout is None:
            return Patience(request)
        self._first = self._first or Patience(request)
        return self._first

    def check(self) -> None:
        """Whether it may go on waiting.

        Raises:
            GangTimeout: none has come for too long.
        """
        if self._first is not None:
            with contextlib.suppress(Cancelled):  # nobody wants more than are asked for
                self._first.check()

    def tell(self, why: str) -> None:
        """Has it told, once none has come for too long, what they waited for."""
        if self._first is not None:
            self._first.tell((), why)

    def came(self, container: str) -> None:
        """One has come, of a container with this id: those that ended before it are forgotten."""
        self._came.add(container)
        self._ended.forget()
        self._given_back = 0
        self._asks_at = float("-inf")
        self._first = None

    def excuse(self) -> None:
        """Those that there are may go: hopsgpu itself lets them go."""
        self._ended.excuse()

    def look(self, held: Collection[str], leaving: Collection[str], asked: int) -> tuple[int, str]:
        """How many YARN has not granted, and where those are that have not come.

        Args:
            held: ids of the containers that YARN shows now.
            leaving: of those that were let go.
            asked: executors that are here or were asked for.
        """
        self._ended.look(held, self._came)
        missing = max(asked - len(set(held).difference(leaving)), 0)
        where = f"YARN has not granted {missing}" if missing else "granted and starting"
        return missing, self._ended.beside(where)

    def give_back(self, waiting: int, now: float, chance: float) -> str:
        """Why executors are given back now for others to go first; "" where they are not.

        They end again and again. What ended so far is forgotten then.

        Args:
            waiting: executors that have not come.
            now: the clock's reading.
            chance: as of `backoff_seconds`.
        """
        if not end_again(self._ended.count, waiting):
            return ""
        self._given_back += 1
        self._asks_at = now + backoff_seconds(self._given_back, chance)
        told = self._ended.beside()
        self._ended.forget()
        return f"{told}; given back (time {self._given_back}), it asks again soon"

    def may_ask(self, now: float) -> bool:
        """Whether others have gone first for long enough."""
        return now >= self._asks_at


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
