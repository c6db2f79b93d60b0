"""Conversion of record batches to arrays, and of arrays to batches of a given size.

`shuffle` defines the units: pieces, windows, strips and parts of windows.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.data.cache import Chunk
from hopsgpu.data.columns import Column, ColumnKind
from hopsgpu.data.shuffle import RUN_ROWS, WindowPart, window_order
from hopsgpu.data.sizes import memory_of, split_batch
from hopsgpu.units import MIB

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Block:
    """Rows as an array for each column, in memory or in mapped pages.

    Attributes:
        size: bytes of the rows in memory.
        release: releases the memory after the rows have been used.
    """

    arrays: dict[str, Array]
    rows: int
    size: int
    release: Callable[[], None]

    def part(self, first: int, last: int) -> dict[str, Array]:
        """Return the rows from `first` up to, but not including, `last`."""
        return {name: array[first:last] for name, array in self.arrays.items()}


@dataclass(frozen=True)
class ShuffledBlock(Block):
    """The rows of windows, which the reader puts in order when it makes a batch.

    Attributes:
        order: the order, as row numbers.
        unordered: names of the arrays whose rows are not in order yet.
        is_writeable: whether a batch may write its copies of rows of unordered arrays.
    """

    order: Array
    unordered: Collection[str]
    is_writeable: bool

    def part(self, first: int, last: int) -> dict[str, Array]:
        order, batch = self.order[first:last], {}
        for name, array in self.arrays.items():
            if name in self.unordered:
                batch[name] = array.take(order, axis=0)
                if not self.is_writeable:
                    batch[name].flags.writeable = False
            else:
                batch[name] = array[first:last]
        return batch


def convert_chunk(
    chunk: Chunk, columns: Sequence[Column], max_bytes: int, checked: set[Hashable]
) -> Iterator[Block]:
    """Yield a record batch's columns as arrays, without a copy if NumPy has the same layout.

    Args:
        max_bytes: the most bytes of a block. The arrays may take more than the record batch: a list
            without a shape becomes an array for each row.
        checked: checks that cached record batches have passed; this function adds to them.
    """
    for column in columns:
        check = chunk.name, column.name, column.shape
        if column.check is not None and check not in checked:
            column.check(chunk.batch.column(column.name))
            if chunk.name is not None:
                checked.add(check)

    def size_of(batch: Any) -> int:
        return sum(_memory_of(column, batch.column(column.name)) for column in columns)

    parts = list(split_batch(chunk.batch, size_of, max_bytes))
    for number, (batch, size) in enumerate(parts, start=1):
        arrays = {column.name: column.convert(batch.column(column.name)) for column in columns}
        release = chunk.release if number == len(parts) else _release_nothing
        yield Block(_make_read_only(arrays), batch.num_rows, size, release)


def _memory_of(column: Column, array: Any) -> int:
    if column.is_view:
        return math.prod(column.shape) * column.dtype.itemsize * len(array)
    is_one_array = column.shape and column.kind is not ColumnKind.RAGGED
    return memory_of(array, array_bytes=0) if is_one_array else memory_of(array)


def _release_nothing() -> None:
    """Do nothing: the `release` of a block without memory of its own."""


# Columns of at most this many bytes a row are shuffled a window at a time: the column fits into a
# CPU cache, and a call for each part would take longer.
_MAX_NARROW_BYTES = 16
# The reader puts batches of at most this many bytes in order. That takes some microseconds, about
# as long as to read rows that another core has just written. The read-ahead thread has less to do.
_MAX_READER_BYTES = MIB // 4
# Small windows are handed over together, up to this many bytes: each call of NumPy releases the
# GIL, and then waits until the reader releases it.
_GROUP_BYTES = 8 * MIB
# The bytes of a row number in an order.
_NUMBER_BYTES = 8
# The most bytes of a block of several ordered batches: they are still in a CPU cache when they are
# read.
_STEP_BYTES = MIB
# A strip's rows: whole blocks and parts of blocks.
StripBlocks = list[Block]


def share_values(blocks: Iterable[Block], row_bytes: int) -> Iterator[Block]:
    """Yield the blocks; if rows are much larger than estimated, equal strings become one object.

    A file stores a repeated string once, so `row_bytes`, the estimated bytes of a row, counts it
    once. A window, whose number of rows follows from the estimate, must not have a copy for each
    row in memory.
    """
    objects: dict[Any, Any] = {}
    for block in blocks:
        if block.size <= 2 * row_bytes * block.rows:
            yield block
        else:
            arrays = {name: _share(array, objects) for name, array in block.arrays.items()}
            size = min(block.size, row_bytes * block.rows)
            yield Block(_make_read_only(arrays), block.rows, size, block.release)
        del block  # only the strip refers to the block


def _share(array: Array, objects: dict[Any, Any]) -> Array:
    import numpy as np

    if array.dtype != object:
        return array
    values = (
        _share(value, objects)
        if isinstance(value, np.ndarray)
        else objects.setdefault(value, value)
        for value in array
    )
    # Not np.array, which makes one array of equally long arrays.
    return np.fromiter(values, object, len(array))


def split_into_strips(blocks: Iterable[Block], rows: int) -> Iterator[StripBlocks]:
    """Yield the rows in strips of `rows` rows; the last strip may be smaller."""
    strip: StripBlocks = []
    missing = rows
    for block in blocks:
        first = 0
        while block.rows - first > missing:
            strip.append(_part(block, first, first + missing, _release_nothing))
            first, missing = first + missing, rows
            yield strip
            strip = []
        strip.append(_part(block, first, block.rows, block.release))
        missing -= block.rows - first
        del block  # only the strip refers to the block
        if not missing:
            yield strip
            strip, missing = [], rows
    if strip:
        yield strip


def _part(block: Block, first: int, last: int, release: Callable[[], None]) -> Block:
    size = block.size * (last - first) // block.rows
    return Block(block.part(first, last), last - first, size, release)


def shuffle_windows(
    windows: Iterable[Sequence[StripBlocks]],
    draw_parts: Callable[[Sequence[int]], Sequence[WindowPart]],
    size: int,
    is_in_reader: bool,
    is_writeable: bool,
) -> Iterator[Block]:
    """Yield the rows of each window in a random order, in blocks.

    Args:
        windows: the strips of each window.
        draw_parts: returns the parts of the next window, from its strips' numbers of rows.
        size: number of rows of a batch.
        is_in_reader: whether the reader puts the rows in order (`should_order_in_reader`). A block
            then has whole windows, else whole batches, except at the end of a part of a window.
        is_writeable: whether a batch may write arrays that it does not share with other batches.
    """
    part_memory, window_memory = _PartMemory(), _WindowMemory()
    for group in _group_windows(windows, _GROUP_BYTES if is_in_reader else 0):
        sizes = [[sum(block.rows for block in strip) for strip in strips] for strips in group]
        parts = [draw_parts(window_sizes) for window_sizes in sizes]
        total = sum(block.size for block in _blocks_of(group))
        row_bytes = max(1, total // sum(map(sum, sizes)))
        if is_in_reader:
            order = window_order(sizes, parts)
            yield _join_unordered(group, order, row_bytes, window_memory, is_writeable)
        else:
            step = size * max(1, _STEP_BYTES // (row_bytes * size))
            for strips, rows_of_strips, window_parts in zip(group, sizes, parts, strict=True):
                for arrays, rows in _order_in_parts(
                    strips, rows_of_strips, window_parts, step, part_memory
                ):
                    arrays = arrays if is_writeable else _make_read_only(arrays)
                    yield Block(arrays, rows, row_bytes * rows, _release_nothing)
                    del arrays
            del strips
        for block in _blocks_of(group):
            block.release()
        del block, group  # free the group before the next one is made


def should_order_in_reader(columns: Iterable[Column], size: int) -> bool:
    """Return whether the reader, not the read-ahead thread, orders batches of `size` rows."""
    row_bytes = _array_bytes(columns)
    return row_bytes is not None and row_bytes * size <= _MAX_READER_BYTES


def block_bytes(columns: Sequence[Column], size: int, window: int, row_bytes: int) -> int:
    """Return the most bytes of a block of `shuffle_windows`.

    Args:
        columns: columns of a batch of `size` rows.
        window: number of rows of a window.
        row_bytes: estimated bytes of a row with all columns.
    """
    array_bytes = _array_bytes(columns)
    if array_bytes is not None and should_order_in_reader(columns, size):
        return max(_GROUP_BYTES, window * (array_bytes + _NUMBER_BYTES))
    return max(_STEP_BYTES, size * (row_bytes if array_bytes is None else array_bytes))


def _array_bytes(columns: Iterable[Column]) -> int | None:
    """Return the bytes of a row as arrays; None for objects, whose sizes differ."""
    row_bytes = 0
    for column in columns:
        if column.kind is ColumnKind.RAGGED or column.dtype == object:
            return None
        row_bytes += math.prod(column.shape) * column.dtype.itemsize
    return row_bytes


def _group_windows(
    windows: Iterable[Sequence[StripBlocks]], max_bytes: int
) -> Iterator[list[Sequence[StripBlocks]]]:
    """Yield the windows in groups of at most `max_bytes`, or of one window."""
    group: list[Sequence[StripBlocks]] = []
    size = 0
    for strips in windows:
        window_bytes = sum(block.size for strip in strips for block in strip)
        if group and size + window_bytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(strips)
        del strips  # only the group refers to the window
        size += window_bytes
        # The next window is probably as large. If it will not fit, do not wait for it.
        if size + window_bytes > max_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _blocks_of(group: Sequence[Sequence[StripBlocks]]) -> Iterator[Block]:
    return (block for strips in group for strip in strips for block in strip)


def _join_unordered(
    group: Sequence[Sequence[StripBlocks]],
    order: Array,
    row_bytes: int,
    memory: _WindowMemory,
    is_writeable: bool,
) -> Block:
    names = group[0][0][0].arrays
    columns = {name: [block.arrays[name] for block in _blocks_of(group)] for name in names}
    unordered = {name: arrays for name, arrays in columns.items() if not _is_narrow(arrays[0])}
    joined = memory.join(unordered)
    arrays = {
        name: joined[name][: len(order)] if name in unordered else _take(columns[name], order)
        for name in columns
    }
    rows, release = len(order), functools.partial(memory.free, joined)
    if not unordered:
        return Block(arrays, rows, row_bytes * rows, release)
    size = (row_bytes + _NUMBER_BYTES) * rows
    # A set of names: the dict's keys would keep the arrays alive.
    return ShuffledBlock(arrays, rows, size, release, order, frozenset(unordered), is_writeable)


def _order_in_parts(
    strips: Sequence[StripBlocks],
    sizes: Sequence[int],
    parts: Sequence[WindowPart],
    step: int,
    memory: _PartMemory,
) -> Iterator[tuple[dict[str, Array], int]]:
    """Yield a window's rows in order, `step` at a time except at a part's end, and their number."""
    columns = {name: [_join_strip(name, strip) for strip in strips] for name in strips[0][0].arrays}
    narrow: dict[str, Array] = {}
    if names := [name for name, arrays in columns.items() if _is_narrow(arrays[0])]:
        order = window_order([sizes], [parts])
        narrow = {name: _take(columns[name], order) for name in names}
    at = 0
    for part in parts:
        rows_of_part = {
            name: memory.copy_rows(name, arrays, part)
            for name, arrays in columns.items()
            if name not in narrow
        }
        for first in range(0, len(part.order), step):
            order = part.order[first : first + step]
            end = at + len(order)
            yield (
                {
                    name: narrow[name][at:end]
                    if name in narrow
                    else rows_of_part[name].take(order, axis=0)
                    for name in columns
                },
                len(order),
            )
            at = end


def _is_narrow(array: Array) -> bool:
    return bool(array.nbytes <= _MAX_NARROW_BYTES * len(array))


def _take(arrays: Sequence[Array], order: Array) -> Array:
    import numpy as np

    rows: Array = np.concatenate(arrays).take(order, axis=0)
    rows.flags.writeable = False
    return rows


class _WindowMemory:
    """Memory for the rows of windows, which later windows reuse.

    The kernel clears new pages, which takes longer than to copy the rows.
    """

    def __init__(self) -> None:
        # A deque: the reader, in another thread, frees the memory.
        self._free: deque[dict[str, Array]] = deque()

    def join(self, columns: Mapping[str, Sequence[Array]]) -> dict[str, Array]:
        """Return arrays that begin with the rows of each column's arrays; `free` them later."""
        import numpy as np

        joined = self._free.popleft() if self._free else {}
        for name, parts in columns.items():
            rows = sum(map(len, parts))
            if name not in joined or len(joined[name]) < rows:
                joined[name] = np.empty((rows, *parts[0].shape[1:]), parts[0].dtype)
            np.concatenate(parts, out=joined[name][:rows])
        return joined

    def free(self, joined: dict[str, Array]) -> None:
        self._free.append(joined)


def _join_strip(name: str, strip: StripBlocks) -> Array:
    import numpy as np

    arrays = [block.arrays[name] for block in strip]
    return np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


class _PartMemory:
    """Memory for the rows of a part of a window, which each part reuses, as in `_WindowMemory`."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def copy_rows(self, name: str, strips: Sequence[Array], part: WindowPart) -> Array:
        """Return a column's rows of a part of a window, in memory that the next part overwrites."""
        import numpy as np

        rows, kind = len(part.order), strips[0].dtype
        target = self._arrays.get(name)
        if target is None or len(target) < rows:
            target = self._arrays[name] = np.empty((rows, *strips[0].shape[1:]), kind)
        at = 0
        for strip, runs in zip(strips, part.runs, strict=True):
            tail_first, end = len(strip) // RUN_ROWS * RUN_ROWS, at + len(runs) * RUN_ROWS
            shape = (-1, RUN_ROWS, *strip.shape[1:])
            out = target[at:end].reshape(shape)
            # The numbers are in range, and "clip" needs no copy to undo a failure.
            strip[:tail_first].reshape(shape).take(runs, axis=0, out=out, mode="clip")
            at = end
            if part.has_tails:
                tail = strip[tail_first:]
                target[at : at + len(tail)] = tail
                at += len(tail)
        return target[:rows]


def rebatch(
    blocks: Generator[Block | None, None, None], size: int, drop_remainder: bool
) -> Generator[dict[str, Array], None, None]:
    """Yield batches of `size` rows.

    A batch within one block is a view of the block, except for unordered arrays. All batches are
    read-only, except those of writeable blocks.

    Args:
        blocks: the blocks, with None after the last block of an epoch, whose last batch may be
            smaller. The generator is closed at the end.
    """
    held: list[tuple[Block, int]] = []  # each with the number of its first row that is in no batch
    missing = size
    with contextlib.closing(blocks):
        for block in blocks:
            if block is None:
                batch = _concatenate(_remaining_rows(held)) if held and not drop_remainder else None
                # Release before the reader works on the batch: a block may be large.
                _release_held(held)
                held, missing = [], size
                if batch is not None:
                    yield batch
                    del batch
                continue
            first = 0
            if held and block.rows >= missing:
                batch = _concatenate([*_remaining_rows(held), block.part(0, missing)])
                _release_held(held)
                held, first, missing = [], missing, size
                yield batch
                del batch
            if not held:
                end_of_batches = first + (block.rows - first) // size * size
                starts = range(first, end_of_batches, size)
                if isinstance(block, ShuffledBlock):
                    yield from (block.part(at, at + size) for at in starts)
                else:
                    for at in starts:
                        # Not `block.part`: a call takes as long as to make a batch of one column.
                        batch, end = {}, at + size
                        for name in block.arrays:
                            batch[name] = block.arrays[name][at:end]
                        yield batch
                        del batch  # do not keep the batch after the reader has used it
                first = end_of_batches
            if first < block.rows:
                held.append((block, first))
                missing -= block.rows - first
            else:
                block.release()


def _remaining_rows(held: Sequence[tuple[Block, int]]) -> list[dict[str, Array]]:
    return [block.part(first, block.rows) for block, first in held]


def _release_held(held: Sequence[tuple[Block, int]]) -> None:
    for block, _ in held:
        block.release()


def _concatenate(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    import numpy as np

    return _make_read_only({name: np.concatenate([p[name] for p in parts]) for name in parts[0]})


def _make_read_only(batch: dict[str, Array]) -> dict[str, Array]:
    # All arrays, because mapped arrays cannot be written.
    for array in batch.values():
        array.flags.writeable = False
    return batch
