"""What executors are waited for by: why they do not come, in words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from hopsgpu.backends.lease_request import Patience, Request, Watcher
from hopsgpu.core.gang import GangState, backoff_seconds, end_again


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
        """Take in which there are.

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

    def excuse(self, held: Collection[str] = ()) -> None:
        """Those that there are may go: hopsgpu itself lets them go.

        Args:
            held: ids of those that YARN shows now, besides those that it showed last.
        """
        self._excused |= self._held.union(held)

    def beside(self, *parts: str) -> str:
        """Return what a person is told of them, after what else there is to tell."""
        lost = self._lost
        if lost:
            parts += (
                f"{len(lost)} ended again, see the node's log of {lost[-1]} (a GPU that cannot be"
                " discovered, memory, Python?)",
            )
        return ", ".join(parts)


class _PatienceOf(Patience):
    """Tells, besides what else there is, of the executors that ended."""

    def __init__(self, request: Request, since: float | None, beside: Callable[[str], str]) -> None:
        super().__init__(request, since)
        self._beside = beside

    def tell(self, hosts: Sequence[str], why: str) -> None:
        super().tell(hosts, self._beside(why))


class Coming:
    """The executors of a search that were asked for and have not come."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._ended = EndedAgain()
        self._before = ""
        self._given_back = 0
        self._asks_at = float("-inf")
        self._since: float | None = None
        self._patience: Patience | None = None

    def patience(self, request: Request, now: float) -> Patience:
        """Return how long those may take that are asked for now.

        Args:
            request: theirs; it has a timeout where the search has no executor. That begins with
                the first asking, however often it is asked, and ends once one has come.
            now: the clock's reading.
        """
        if request.timeout is not None and self._since is None:
            self._since = now
        self._patience = _PatienceOf(request, self._since, self.beside)
        return self._patience

    def check(self) -> None:
        """Check whether it may go on waiting.

        Raises:
            GangTimeout: none has come for too long.
        """
        if self._patience is not None:
            self._patience.check_time()

    def tell(self, why: str) -> None:
        """Tell what those wait for that were asked for."""
        if self._patience is not None:
            self._patience.tell((), why)

    def saw(self, container: str) -> None:
        """The executor in a container, by its id, has shown itself, whatever it is good for."""
        self._seen.add(container)

    def came(self) -> None:
        """One can have trials: those that ended before it are forgotten."""
        self._ended.forget()
        self._before = ""
        self._given_back = 0
        self._asks_at = float("-inf")
        self._since = None
        if self._patience is not None:
            self._patience.wait_for_ever()

    def excuse(self, held: Collection[str] = ()) -> None:
        """As of `EndedAgain`."""
        self._ended.excuse(held)

    def look(self, held: Collection[str], leaving: Collection[str], asked: int) -> tuple[int, str]:
        """Return how many YARN has not granted, and where those are that have not come.

        Args:
            held: ids of the containers that YARN shows now.
            leaving: of those that were let go.
            asked: executors that are here or were asked for.
        """
        self._ended.look(held, self._seen)
        missing = max(asked - len(set(held).difference(leaving)), 0)
        where = f"YARN has not granted {missing}" if missing else "granted and starting"
        return missing, where

    def beside(self, why: str) -> str:
        """Return what a person is told of those that ended, after what else there is to tell."""
        told = self._ended.beside(why)
        return told if self._ended.count or not self._before else f"{why}; before, {self._before}"

    def give_back(self, waiting: int, now: float, chance: float) -> str:
        """Return why executors are given back now for others to go first; "" where they are not.

        They end again and again. What ended so far counts no longer then.

        Args:
            waiting: executors that have not come.
            now: the clock's reading.
            chance: as of `backoff_seconds`.
        """
        if not waiting or not end_again(self._ended.count, waiting):
            return ""
        self._given_back += 1
        self._asks_at = now + backoff_seconds(self._given_back, chance)
        self._before = self._ended.beside()
        self._ended.forget()
        return f"given back (time {self._given_back}), it asks again soon"

    def may_ask(self, now: float) -> bool:
        """Return whether others have gone first for long enough."""
        return now >= self._asks_at


class _Owner(Protocol):
    def waits(self, why: str) -> None: ...


@dataclass(frozen=True)
class WhyAlone:
    """A gang's watcher who tells why it waits alone, and warnings.

    Args:
        watcher: gets the warnings.
        owner: is told why it waits.
    """

    watcher: Watcher
    owner: _Owner

    def state(self, state: GangState, hosts: Sequence[str], why: str = "") -> None:
        self.owner.waits(why)

    def mark(self, point: str) -> None:
        return

    def arrived(self, times: Sequence[float]) -> None:
        return

    def warn(self, text: str) -> None:
        self.watcher.warn(text)
