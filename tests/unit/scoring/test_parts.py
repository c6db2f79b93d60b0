"""How a table is divided: whole row groups, in order, each in one part."""

from __future__ import annotations

import itertools

import pytest

from hopsgpu.data.shard import Slice
from hopsgpu.scoring.parts import parts_of, place_of, plan_bounds, smallest_batch
from hopsgpu.units import MIB
from tests.unit.scoring.sources import source


@pytest.mark.parametrize("executors", [1, 2, 8, 1000])
@pytest.mark.parametrize(
    "files", [((10,),), ((0, 5, 0), (0,), (7, 1)), tuple((100,) * 10 for _ in range(20))]
)
def test_every_row_is_in_one_part_and_in_order(
    executors: int, files: tuple[tuple[int, ...], ...]
) -> None:
    table = source(*files)
    parts = parts_of(table, plan_bounds(table, executors))
    rows = [
        (one.file, one.group, one.first + n)
        for part in parts
        for one in part.slices
        for n in range(one.rows)
    ]
    assert rows == [
        (f, g, n)
        for f, file in enumerate(files)
        for g, rows in enumerate(file)
        for n in range(rows)
    ]
    assert [part.number for part in parts] == list(range(len(parts)))
    assert all(part.rows == sum(one.rows for one in part.slices) > 0 for part in parts)
    firsts = itertools.accumulate((part.rows for part in parts), initial=0)
    assert [part.first for part in parts] == list(firsts)[:-1]


def test_parts_are_small_enough_for_all_executors_and_for_memory() -> None:
    table = source(*((100,) * 10 for _ in range(32)))
    assert 16 <= len(plan_bounds(table, 2)) - 1 <= 20
    assert 60 <= len(plan_bounds(table, 8)) - 1 <= 80
    large = source((1,) * 100, row_bytes=10 * MIB)
    assert len(plan_bounds(large, 1)) - 1 == 17, "six rows of 10 MiB each"


def test_a_row_group_is_divided_only_if_executors_would_have_nothing_to_do() -> None:
    assert plan_bounds(source((1000,)), 4) == (0, 250, 500, 750, 1000)
    assert plan_bounds(source((10, 1000, 10)), 2) == (0, 10, 510, 1010, 1020)
    assert plan_bounds(source((100, 100), (100, 100)), 4) == (0, 100, 200, 300, 400)
    one, other = parts_of(source((0, 9)), plan_bounds(source((0, 9)), 2))
    assert (one.slices, other.slices) == ((Slice(0, 1, 0, 4),), (Slice(0, 1, 4, 5),))


def test_the_place_of_rows_is_told_by_file_and_row_group() -> None:
    table = source((10, 10, 10), (5,))
    one, other = parts_of(table, (0, 20, 35))
    first = "rows 0 to 19 of hdfs://lake/table (part-0.parquet, row groups 0 to 1)"
    assert place_of(table, one) == first
    second = "part-0.parquet, row group 2; part-1.parquet, row group 0"
    assert place_of(table, other) == f"rows 20 to 34 of hdfs://lake/table ({second})"
    piece, _ = parts_of(source((5, 9)), (0, 8, 14))
    assert "row groups 0 to 1)" in place_of(source((5, 9)), piece)
    _, piece = parts_of(source((9,)), (0, 4, 9))
    said = "rows 4 to 8 of hdfs://lake/table (part-0.parquet, row group 0, its rows 4 to 8)"
    assert place_of(source((9,)), piece) == said


@pytest.mark.parametrize(
    ("bounds", "size", "smallest"),
    [((0, 100), 64, 36), ((0, 128, 192), 64, 64), ((0, 65, 75), 64, 1), ((0, 10), 64, 10)],
)
def test_the_smallest_batch_is_some_parts_last(
    bounds: tuple[int, ...], size: int, smallest: int
) -> None:
    assert smallest_batch(bounds, size) == smallest
