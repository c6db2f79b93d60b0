"""Conversion of record batches to arrays, and of arrays to batches of exactly the size wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.data.cache import Chunk
from hopsgpu.data.columns import Column, Kind
from hopsgpu.data.sizes import memory_of, split_batch

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Block:
    """Rows as arrays, in memory or in mapped pages.

    Attributes:
        arrays: the arrays, by column.
        rows: number of rows of each array.
        size: bytes of the rows in memory.
        release: to be called when the rows have been used.
    """

    arrays: dict[str, Array]
    rows: int
    size: int
    release: Callable[[], None]

    def part(self, first: int, last: int) -> dict[str, Array]:
        """Return the rows from `first` up to, but not including, `last`."""
        return {name: array[first:last] for name, array in self.arrays.items()}


def converted(chunk: Chunk, columns: Sequence[Column], most: int) -> Iterator[Block]:
    """Yield a record batch's columns as arrays, without a copy if NumPy has the same layout.

    There are several blocks if the arrays take more than `most` bytes: lists without a shape take
    an array for each row.
    """

    def size_of(batch: Any) -> int:
        return sum(_memory(column, batch.column(column.name)) for column in columns)

    parts = list(split_batch(chunk.batch, size_of, most))
    for number, (batch, size) in enumerate(parts, start=1):
        arrays = {column.name: column.convert(batch.column(column.name)) for column in columns}
        release = chunk.release if number == len(parts) else _keep
        yield Block(_sealed(arrays), batch.num_rows, size, release)


def _memory(column: Column, array: Any) -> int:
    is_one_array = column.shape and column.kind is not Kind.RAGGED
    return memory_of(array, each=0) if is_one_array else memory_of(array)


def _keep() -> None:
    """Do nothing: the `release` of a block that has nothing to release."""


def windows(blocks: Iterable[Block], most: int, seed: Sequence[int]) -> Iterator[Block]:
    """Yield windows: the rows of several blocks, of `most` bytes at most, in a random order.

    A block that is larger is a window of its own.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    held: list[Block] = []
    for block in blocks:
        if held and sum(one.size for one in held) + block.size > most:
            yield _window(held, random)
        held.append(block)
        del block  # it goes with the list
    if held:
        yield _window(held, random)


def _window(blocks: list[Block], random: np.random.Generator) -> Block:
    """Return the blocks' rows in a random order; empty the list, which frees their memory."""
    import numpy as np

    rows = sum(block.rows for block in blocks)
    order = random.permutation(rows)
    # A whole column at once is faster than batch by batch, because a column fits into a CPU cache.
    arrays = {
        name: np.concatenate([block.arrays[name] for block in blocks]).take(order, axis=0)
        for name in blocks[0].arrays
    }
    size = sum(block.size for block in blocks)
    while blocks:
        blocks.pop().release()
    return Block(_sealed(arrays), rows, size, _keep)


def rebatch(
    blocks: Iterable[Block | None], size: int, drop_remainder: bool
) -> Iterator[dict[str, Array]]:
    """Yield batches of `size` rows.

    A batch within one block is a view of it. All batches are read-only.

    Args:
        blocks: the blocks, with None after the last one of an epoch, whose last batch may be
            smaller.
        size: number of rows of a batch.
        drop_remainder: whether to leave out the batches that are smaller.
    """
    held: list[tuple[Block, int]] = []  # each with its first row that is in no batch yet
    missing = size
    for block in blocks:
        if block is None:
            if held and not drop_remainder:
                yield _joined(_rest(held))
            _release(held)
            held, missing = [], size
            continue
        first = 0
        if held and block.rows >= missing:
            yield _joined([*_rest(held), block.part(0, missing)])
            _release(held)
            held, first, missing = [], missing, size
        if not held:
            whole = first + (block.rows - first) // size * size
            for at in range(first, whole, size):
                yield block.part(at, at + size)
            first = whole
        if first < block.rows:
            held.append((block, first))
            missing -= block.rows - first
        else:
            block.release()


def _rest(held: Sequence[tuple[Block, int]]) -> list[dict[str, Array]]:
    return [block.part(first, block.rows) for block, first in held]


def _release(held: Sequence[tuple[Block, int]]) -> None:
    for block, _ in held:
        block.release()


def _joined(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    import numpy as np

    return _sealed({name: np.concatenate([p[name] for p in parts]) for name in parts[0]})


def _sealed(batch: dict[str, Array]) -> dict[str, Array]:
    # Mapped arrays cannot be written, so none can, for consistency; their views are read-only too.
    for array in batch.values():
        array.flags.writeable = False
    return batch
