"""Which ranks must have saved a step for it to be complete, also when the number of ranks changes.

Each attempt of a run is a world of its own size. Ranks announce that they save before their first
save; nothing else shows which ranks save. A rank may be killed before it announces itself, or start
late: meanwhile the saves of other ranks must not count as complete. Therefore these ranks must have
saved a step of an attempt:

1. the ranks that announced themselves in an attempt of the same world size, and
2. the ranks carried over from the world before the first attempt of this size.

If all ranks of the earlier world saved, all ranks of this world must save. Otherwise, the saving
ranks of the earlier world must save, as far as they exist here. A world of one rank does not show
whether all ranks save or only rank 0. The last larger world decides; if there is none, rank 0 is
carried over.

So a shrunk world does not wait for ranks that no longer exist, and the steps of a smaller world
stay complete in a larger world. A function in which some but not all ranks save must choose the
same ranks in worlds of every size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class SavingRank:
    """A rank that saves in an attempt.

    Attributes:
        world_size: number of ranks in the attempt; 0 if it is unknown.
    """

    attempt: int
    rank: int
    world_size: int = 0

    @property
    def name(self) -> str:
        """The name of the file that announces the rank."""
        return f"{self.rank}.{self.attempt}.{self.world_size}"


def parse_announcements(names: Collection[str]) -> frozenset[SavingRank]:
    """Return the ranks that files of these names announce; other names are ignored."""
    matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
    return frozenset(SavingRank(int(m[2]), int(m[1]), int(m[3])) for m in matches)


class SavingRanks:
    """The ranks that must have saved a step, by the attempt that saved it."""

    def __init__(self, announced: Collection[SavingRank]) -> None:
        self._sizes = {attempt: size for attempt, size, _ in _attempts(announced)}
        self._by_size: dict[int, frozenset[int]] = {}
        self._last_size: int | None = None
        # Whether all ranks of the last world with several ranks saved.
        self._is_saved_by_all = False
        for _, size, ranks in _attempts(announced):
            before = self._by_size[size] if size in self._by_size else self.carried_over(size)
            self._by_size[size] = before | ranks
            self._last_size = size
            if size > 1:
                self._is_saved_by_all = self._by_size[size].issuperset(range(size))

    def of(self, attempt: int) -> frozenset[int]:
        """Return the ranks that must have saved a step of an attempt; none if nobody saves."""
        return self._by_size.get(self._sizes.get(attempt, -1), frozenset())

    def carried_over(self, world_size: int | None) -> frozenset[int]:
        """Return the ranks that must save in the next world; None: it is as large as the last."""
        last_size = self._last_size
        if last_size is None:
            return frozenset()
        ranks = self._by_size[last_size]
        if world_size is None or world_size == last_size:
            return ranks
        if self._is_saved_by_all and (last_size == 1 or ranks.issuperset(range(last_size))):
            return frozenset(range(world_size))
        return frozenset(rank for rank in ranks if rank < world_size)


def _attempts(announced: Collection[SavingRank]) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Yield each attempt's number, world size and known saving ranks, in order."""
    for attempt in sorted({saver.attempt for saver in announced}):
        savers = [saver for saver in announced if saver.attempt == attempt]
        size = max(saver.world_size for saver in savers)
        yield attempt, size, frozenset(saver.rank for saver in savers)
