"""Blocks of shuffled windows: what they keep in memory, and for how long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hopsgpu.data.batches import (
    Block,
    ShuffledBlock,
    block_bytes,
    rebatch,
    should_order_in_reader,
    shuffle_windows,
)
from hopsgpu.data.columns import select_columns
from hopsgpu.data.shuffle import WindowShuffler
from hopsgpu.units import MIB

WIDTH = 32


def strip(first: int, rows: int, released: list[int]) -> list[Block]:
    values = np.repeat(np.arange(first, first + rows, dtype="f4"), WIDTH).reshape(rows, WIDTH)
    block = Block({"x": values}, rows, values.nbytes, lambda: released.append(first))
    return [block]


def made(rows: Sequence[int], released: list[int], *, is_in_reader: bool, size: int = 8) -> Any:
    """The blocks of windows of two strips each."""
    firsts = np.cumsum([0, *rows]).tolist()
    held = (
        [strip(firsts[n], rows[n], released), strip(firsts[n + 1], rows[n + 1], released)]
        for n in range(0, len(rows), 2)
    )
    shuffler = WindowShuffler(0, 0, 8_192)
    return shuffle_windows(held, shuffler.next, size, is_in_reader, is_writeable=False)


def rows_of(blocks: Iterable[Block]) -> list[int]:
    def one_pass() -> Generator[Block | None, None, None]:
        yield from blocks
        yield None

    batches = rebatch(one_pass(), 8, drop_remainder=False)
    return [int(value) for batch in batches for value in batch["x"][:, 0]]


@pytest.mark.parametrize("is_in_reader", [True, False])
def test_each_row_comes_once_in_the_same_order_whoever_puts_them_in_order(
    is_in_reader: bool,
) -> None:
    released: list[int] = []
    found = rows_of(made([100, 70, 33, 500], released, is_in_reader=is_in_reader))
    assert sorted(found) == list(range(703))
    assert found == rows_of(made([100, 70, 33, 500], [], is_in_reader=not is_in_reader))
    assert sorted(released) == [0, 100, 170, 203]


def test_windows_do_not_keep_the_arrays_that_they_were_made_of() -> None:
    arrays: list[weakref.ref[Any]] = []

    def noted(rows: int) -> list[list[Block]]:
        strips = [strip(0, rows, []), strip(rows, rows, [])]
        arrays.extend(weakref.ref(part.arrays["x"]) for held in strips for part in held)
        return strips

    ready = list(
        shuffle_windows(
            map(noted, [100, 200]), WindowShuffler(0, 0, 400).next, 8, True, is_writeable=False
        )
    )
    gc.collect()
    assert [type(block) for block in ready] == [ShuffledBlock]
    assert [array() for array in arrays] == [None] * 4


def test_a_block_is_released_before_the_loop_is_busy_with_a_batch_that_ends_it() -> None:
    released: list[int] = []

    def blocks() -> Generator[Block | None, None, None]:
        for number in range(2):
            values = np.zeros((5, WIDTH), "f4")
            yield Block(
                {"x": values}, 5, values.nbytes, lambda number=number: released.append(number)
            )  # type: ignore[misc]
        yield None

    batches = rebatch(blocks(), 4, drop_remainder=False)
    assert [len(next(batches)["x"]), list(released)] == [4, []]
    assert [len(next(batches)["x"]), list(released)] == [4, [0]]
    assert [len(next(batches)["x"]), list(released)] == [2, [0, 1]]


@pytest.mark.parametrize(
    ("kind", "shape", "size", "late", "most"),
    [
        (pa.list_(pa.float32(), 32), None, 1024, True, 65_536 * (128 + 8)),
        (pa.list_(pa.float32()), (32,), 1024, True, 65_536 * (128 + 8)),
        (pa.list_(pa.float32(), 32), None, 4096, False, MIB),
        (pa.list_(pa.float32(), 4096), None, 512, False, 8 * MIB),
        (pa.list_(pa.float32()), None, 8, False, MIB),
        (pa.string(), None, 8, False, MIB),
        (pa.int64(), None, 8, True, 8 * MIB),
    ],
    ids=["lists", "lists with a shape", "large batches", "long", "ragged", "strings", "numbers"],
)
def test_the_bytes_that_are_read_ahead_are_those_of_the_columns_that_are_read(
    kind: Any, shape: Any, size: int, late: bool, most: int
) -> None:
    columns = select_columns(
        pa.schema([("x", kind), ("other", pa.string())]), ["x"], {"x": shape} if shape else {}
    )
    assert should_order_in_reader(columns, size) is late
    assert block_bytes(columns, size, 65_536, row_bytes=1_000) == most
