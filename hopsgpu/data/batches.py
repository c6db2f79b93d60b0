"""Record batches to arrays, and arrays to batches of exactly the size that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.data.cache import Chunk
from hopsgpu.data.columns import Column, Kind
from hopsgpu.data.sizes import in_parts, memory_of

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Block:
    """Rows in memory or in mapped pages.

    Attributes:
        arrays: by column.
        rows: of each array.
        size: bytes of the rows in memory.
        release: to be called when the rows have been used.
    """

    arrays: dict[str, Array]
    rows: int
    size: int
    release: Callable[[], None]

    def part(self, first: int, last: int) -> dict[str, Array]:
        """The rows from first to before last."""
        return {name: array[first:last] for name, array in self.arrays.items()}


def converted(chunk: Chunk, columns: Sequence[Column], most: int) -> Iterator[Block]:
    """A record batch's columns, without a copy where NumPy has the same layout.

    In several blocks where they take more than so many bytes: lists without a shape take an array
    for each row.
    """

    def size_of(batch: Any) -> int:
        return sum(_memory(column, batch.column(column.name)) for column in columns)

    parts = list(in_parts(chunk.batch, size_of, most))
    for number, (batch, size) in enumerate(parts, start=1):
        arrays = {column.name: column.convert(batch.column(column.name)) for column in columns}
        release = chunk.release if number == len(parts) else _keep
        yield Block(_sealed(arrays), batch.num_rows, size, release)


def _memory(column: Column, array: Any) -> int:
    is_one_array = column.shape and column.kind is not Kind.RAGGED
    return memory_of(array, each=0) if is_one_array else memory_of(array)


def _keep() -> None:
    """For a block that has nothing to let go of."""


def windows(blocks: Iterable[Block], most: int, seed: Sequence[int]) -> Iterator[Block]:
    """The rows of as many blocks as have at most so many bytes, in a random order.

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
    """The blocks' rows in a random order; the list is empty then, and their memory goes."""
    import numpy as np

    rows = sum(block.rows for block in blocks)
    order = random.permutation(rows)
    # A column as a whole is faster than batch by batch, for a column fits into a cache.
    arrays = {
        name: np.concatenate([block.arrays[name] for block in blocks]).take(order, axis=0)
        for name in blocks[0].arrays
    }
    size = sum(block.size for block in blocks)
    while blocks:
        blocks.pop().release()
    return Block(_sealed(arrays), rows, size, _keep)


def cut(
    blocks: Iterable[Block | None], size: int, drop_remainder: bool
) -> Iterator[dict[str, Array]]:
    """Batches of so many rows.

    A batch within a block is a view of it, and is read-only as all are.

    Args:
        blocks: None after the last of an epoch, whose last batch may be smaller.
        size: rows of a batch.
        drop_remainder: leaves out the batches that are smaller.
    """
    held: list[tuple[Block, int]] = []  # with rows from that one on that are in no batch yet
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
    # What is mapped cannot be written, and no array is to differ in that; views of it do not.
    for array in batch.values():
        array.flags.writeable = False
    return batch
