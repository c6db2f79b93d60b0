"""Which ranks must have saved a step for it to be complete, also when the number of ranks changes.

A run's attempts may have different numbers of ranks: each is a world of its own size. Which ranks
save is known only from what they announce, before their first save. A rank may be killed before
that, or begin late; what the others have saved by then must not count as complete. So the ranks
that must have saved a step, its savers, are, for a step of any attempt:

1. the ranks that announced themselves in this attempt or in any other of the same world size, and
2. those carried over from the world before the first attempt of this size. If all ranks of that
   world saved, all ranks of this one must save; otherwise, those of its savers that exist here. A
   world of one rank does not show whether all ranks save or only rank 0: what the last larger world
   has shown counts; without one, rank 0 is carried over.

So each step is judged by the savers of its own world: a shrunk world does not wait for ranks that
no longer exist, and the steps of a smaller world stay complete in a larger one. A function in which
some but not all ranks save must choose the same ranks in worlds of every size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class Saver:
    """A rank that saves in an attempt.

    Attributes:
        attempt: number of the attempt.
        rank: rank in the attempt's world.
        world_size: number of ranks in the attempt; 0 if it is unknown.
    """

    attempt: int
    rank: int
    world_size: int = 0

    @property
    def name(self) -> str:
        """Return the name of the file that announces it."""
        return f"{self.rank}.{self.attempt}.{self.world_size}"


def announced_savers(names: Collection[str]) -> frozenset[Saver]:
    """Return the savers that files of these names announce; other names are ignored."""
    matches = [found for found in map(_NAME.fullmatch, names) if found is not None]
    return frozenset(Saver(int(m[2]), int(m[1]), int(m[3])) for m in matches)


class Savers:
    """The ranks that must have saved a step, by the attempt that saved it.

    Args:
        known: the known savers, of all attempts.
    """

    def __init__(self, known: Collection[Saver]) -> None:
        self._sizes = {attempt: size for attempt, size, _ in _attempts(known)}
        self._by_size: dict[int, frozenset[int]] = {}
        # The world size of the last attempt.
        self._last: int | None = None
        # Whether all ranks of the last world with several ranks saved.
        self._all_save = False
        for _, size, ranks in _attempts(known):
            before = self._by_size[size] if size in self._by_size else self.carried_over(size)
            self._by_size[size] = before | ranks
            self._last = size
            if size > 1:
                self._all_save = self._by_size[size].issuperset(range(size))

    def of(self, attempt: int) -> frozenset[int]:
        """Return the ranks that must have saved a step of an attempt; none if nobody saves."""
        return self._by_size.get(self._sizes.get(attempt, -1), frozenset())

    def carried_over(self, world_size: int | None) -> frozenset[int]:
        """Return the ranks that must save in a next world, as the last one shows.

        Args:
            world_size: number of ranks in the next world; None for as many as in the last one.
        """
        if self._last is None:
            return frozenset()
        ranks = self._by_size[self._last]
        if world_size in (None, self._last):
            return ranks
        assert world_size is not None
        if self._all_save and (self._last == 1 or ranks.issuperset(range(self._last))):
            return frozenset(range(world_size))
        return frozenset(rank for rank in ranks if rank < world_size)


def _attempts(known: Collection[Saver]) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Yield each attempt's number, world size and known savers, in order."""
    for attempt in sorted({saver.attempt for saver in known}):
        there = [saver for saver in known if saver.attempt == attempt]
        size = max(saver.world_size for saver in there)
        yield attempt, size, frozenset(saver.rank for saver in there)
