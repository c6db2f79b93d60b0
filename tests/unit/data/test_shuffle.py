"""The order of a window's rows: each once, the same wherever and whenever it is drawn."""

from __future__ import annotations

import pytest

from hopsgpu.data.shuffle import WindowShuffler, window_order


def order(mixes: WindowShuffler, sizes: list[int]) -> list[int]:
    return [int(row) for row in window_order([sizes], [mixes.next(sizes)])]


SIZES = [[1], [15, 16, 17], [2_048] * 4, [16_384] * 4, [5_000, 3, 9_999]]


@pytest.mark.parametrize("window", [16, 8_192, 65_536])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_row_of_a_window_comes_once(sizes: list[int], window: int) -> None:
    assert sorted(order(WindowShuffler(1, 2, window), sizes)) == list(range(sum(sizes)))


def test_windows_have_the_same_orders_whenever_they_are_drawn_and_whatever_others_are() -> None:
    several = [[300, 300, 300, 100] if number % 3 else [300, 300] for number in range(140)]
    first, second = WindowShuffler(7, 0, 1_000), WindowShuffler(7, 0, 1_000)
    drawn = [order(first, sizes) for sizes in several]
    WindowShuffler(8, 0, 1_000).next([300])
    assert [order(second, sizes) for sizes in several] == drawn


def test_the_order_of_several_windows_is_that_of_each() -> None:
    several, single = WindowShuffler(3, 1, 8_192), WindowShuffler(3, 1, 8_192)
    rows = 0
    expected = []
    for sizes in SIZES:
        expected += [rows + row for row in order(single, sizes)]
        rows += sum(sizes)
    found = window_order(SIZES, [several.next(sizes) for sizes in SIZES])
    assert found.tolist() == expected


def test_windows_seeds_and_epochs_have_orders_of_their_own() -> None:
    sizes = [2_048] * 4
    drawn = [WindowShuffler(seed, epoch, 8_192) for seed in (0, 1) for epoch in (0, 1)]
    orders = [tuple(order(mixes, sizes)) for mixes in drawn for _ in range(10)]
    assert len(set(orders)) == len(orders)


def test_rows_of_a_run_are_spread_over_the_window() -> None:
    """Windows that share an order of rows have their runs at other places in it."""
    sizes = [2_048] * 4
    mixes = WindowShuffler(0, 0, 8_192)
    places = []
    for _ in range(8):
        found = order(mixes, sizes)
        at = {row: place for place, row in enumerate(found)}
        places.append([at[row] // 1_024 for row in range(16)])
        # Of the first 16 rows of the window, few are in one batch of 1024.
        assert max(places[-1].count(batch) for batch in range(8)) <= 8
    assert len({tuple(place) for place in places}) == 8


def test_the_order_is_the_one_that_was_ever_drawn() -> None:
    """Positions that checkpoints have rely on it: where it must change, so must ORDER_VERSION."""
    assert order(WindowShuffler(5, 1, 64), [20, 20])[:12] == [
        37,
        6,
        18,
        39,
        27,
        5,
        16,
        12,
        28,
        19,
        14,
        35,
    ]
