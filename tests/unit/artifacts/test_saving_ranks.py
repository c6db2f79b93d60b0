"""Which ranks must have saved a step, after ranks of several worlds announced themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hopsgpu.artifacts.saving_ranks import SavingRank, SavingRanks, parse_announcements

World = tuple[int, Sequence[int]]


def savers(*worlds: World) -> SavingRanks:
    """`worlds` has each attempt's world size and the ranks that announced themselves."""
    return SavingRanks(
        [
            SavingRank(attempt, rank, size)
            for attempt, (size, ranks) in enumerate(worlds)
            for rank in ranks
        ]
    )


def test_names_of_the_files_are_read_back() -> None:
    both = {SavingRank(0, 3, 4), SavingRank(12, 0, 1)}
    assert parse_announcements([saver.name for saver in both]) == both
    assert parse_announcements(["3", "x.1.2", "1.2", ".1.2.3.draft"]) == frozenset()


def test_ranks_of_other_attempts_of_the_same_size_must_save_too() -> None:
    found = savers((2, [0, 1]), (2, [0]), (2, [1]))
    assert [found.of(attempt) for attempt in range(4)] == [{0, 1}] * 3 + [set()]
    # Nobody announced it before the last attempt.
    assert savers((2, [0]), (2, [0, 1])).of(0) == {0, 1}


@pytest.mark.parametrize(
    ("before", "after", "must"),
    [
        # All ranks save.
        ((4, range(4)), 3, range(3)),
        ((3, range(3)), 5, range(5)),
        # Rank 0 saves for all.
        ((4, [0]), 3, [0]),
        ((2, [0]), 6, [0]),
        # One rank of each node of two.
        ((4, [0, 2]), 2, [0]),
        ((4, [0, 2]), 6, [0, 2]),
        # One rank alone does not show which it is.
        ((1, [0]), 3, [0]),
    ],
)
def test_savers_are_carried_over_to_a_world_of_another_size(
    before: World, after: int, must: Sequence[int]
) -> None:
    assert savers(before).carried_over(after) == set(must)
    # Also where only some of them came as far as to announce it.
    assert savers(before, (after, [0])).of(1) == set(must)
    assert savers(before, (after, [0])).of(0) == set(before[1])
    assert savers(before, (after, [0]), (after, [0])).of(2) == set(must)


def test_savers_are_carried_over_worlds_that_failed_early() -> None:
    assert savers((4, range(4)), (3, [1]), (2, [0])).of(2) == {0, 1}


def test_a_size_that_was_there_before_keeps_its_savers() -> None:
    found = savers((4, [0, 1]), (2, [0, 1]), (4, [0]))
    assert found.of(0) == found.of(2) == {0, 1}
