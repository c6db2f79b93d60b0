"""Conversion of record batches to arrays, and of arrays to batches of exactly the size wanted."""

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


@dataclass(frozen=True)
class ShuffledBlock(Block):
    """The rows of windows, which are put in order when a batch of them is made.

    Attributes:
        order: their order, by the numbers of the rows.
        wide: names of the arrays whose rows are not in order yet; those of the others are.
        is_own: whether a batch's rows of the wide arrays, which are copies, may be changed.
    """

    order: Array
    wide: Collection[str]
    is_own: bool

    def part(self, first: int, last: int) -> dict[str, Array]:
        some, batch = self.order[first:last], {}
        for name, array in self.arrays.items():
            if name in self.wide:
                batch[name] = array.take(some, axis=0)
                if not self.is_own:
                    batch[name].flags.writeable = False
            else:
                batch[name] = array[first:last]
        return batch


def convert_chunk(
    chunk: Chunk, columns: Sequence[Column], most: int, checked: set[Hashable]
) -> Iterator[Block]:
    """Yield a record batch's columns as arrays, without a copy if NumPy has the same layout.

    There are several blocks if the arrays take more than `most` bytes: lists without a shape take
    an array for each row.

    Args:
        chunk: the record batch.
        columns: columns of the arrays.
        most: the most bytes of a block.
        checked: what was checked of cached record batches, which is added to.
    """
    for column in columns:
        done = chunk.name, column.name, column.shape
        if column.check is not None and done not in checked:
            column.check(chunk.batch.column(column.name))
            if chunk.name is not None:
                checked.add(done)

    def size_of(batch: Any) -> int:
        return sum(_memory(column, batch.column(column.name)) for column in columns)

    parts = list(split_batch(chunk.batch, size_of, most))
    for number, (batch, size) in enumerate(parts, start=1):
        arrays = {column.name: column.convert(batch.column(column.name)) for column in columns}
        release = chunk.release if number == len(parts) else _keep
        yield Block(_sealed(arrays), batch.num_rows, size, release)


def _memory(column: Column, array: Any) -> int:
    if column.is_view:
        return math.prod(column.shape) * column.dtype.itemsize * len(array)
    is_one_array = column.shape and column.kind is not ColumnKind.RAGGED
    return memory_of(array, each=0) if is_one_array else memory_of(array)


def _keep() -> None:
    """Do nothing: the `release` of a block that has nothing to release."""


# Columns with at most so many bytes a row are shuffled a window at a time: the column fits into a
# CPU cache, and calls for each part of it would take longer.
_NARROW_BYTES = 16
# Batches of at most so many bytes are taken out of the window by the reader. That takes some
# microseconds, about as long as to read rows that another core has just written, and leaves the
# thread that reads ahead less to do.
_LATE_BYTES = MIB // 4
# Small windows are handed over together, up to so many bytes: each call of NumPy for one of them
# lets go of the GIL, and then waits until the reader lets go of it.
_GROUP_BYTES = 8 * MIB
# Of a row's number in the order.
_NUMBER_BYTES = 8
# The most bytes of a block of several batches that the reader does not take out of a window: they
# are still in a CPU cache when they are read.
_STEP_BYTES = MIB
# A strip's rows: whole blocks and parts of them.
Rows = list[Block]


def share_values(blocks: Iterable[Block], row_bytes: int) -> Iterator[Block]:
    """Yield the blocks; where rows are much larger than estimated, equal strings are one object.

    A file stores a string that repeats once, so the estimate counts it once. A window of so many
    rows must not have each of them in memory.

    Args:
        blocks: the blocks of a piece.
        row_bytes: estimated bytes of a row.
    """
    known: dict[Any, Any] = {}
    for block in blocks:
        if block.size <= 2 * row_bytes * block.rows:
            yield block
        else:
            arrays = {name: _shared(array, known) for name, array in block.arrays.items()}
            size = min(block.size, row_bytes * block.rows)
            yield Block(_sealed(arrays), block.rows, size, block.release)
        del block  # it goes with the list


def _shared(array: Array, known: dict[Any, Any]) -> Array:
    import numpy as np

    if array.dtype != object:
        return array
    values = (
        _shared(value, known) if isinstance(value, np.ndarray) else known.setdefault(value, value)
        for value in array
    )
    # Not with np.array, which makes one array of arrays that are equally long.
    return np.fromiter(values, object, len(array))


def split_into_strips(blocks: Iterable[Block], rows: int) -> Iterator[Rows]:
    """Yield the rows in strips of `rows` rows, of which the last one may be smaller."""
    held: Rows = []
    missing = rows
    for block in blocks:
        first = 0
        while block.rows - first > missing:
            held.append(_part(block, first, first + missing, _keep))
            first, missing = first + missing, rows
            yield held
            held = []
        held.append(_part(block, first, block.rows, block.release))
        missing -= block.rows - first
        del block  # it goes with the list
        if not missing:
            yield held
            held, missing = [], rows
    if held:
        yield held


def _part(block: Block, first: int, last: int, release: Callable[[], None]) -> Block:
    size = block.size * (last - first) // block.rows
    return Block(block.part(first, last), last - first, size, release)


def shuffle_windows(
    held: Iterable[Sequence[Rows]],
    mixes: Callable[[Sequence[int]], Sequence[WindowPart]],
    size: int,
    is_late: bool,
    is_own: bool,
) -> Iterator[Block]:
    """Yield the rows of each window in a random order, in blocks.

    Args:
        held: the strips of each window.
        mixes: returns the parts of the next window, by its strips' numbers of rows.
        size: number of rows of a batch.
        is_late: whether the reader puts the rows in order, as `are_late` says; a block has whole
            windows then, else whole batches, except at the end of a part of a window.
        is_own: whether arrays that no other batch reads may be changed.
    """
    mixer, pool = _Mixer(), _ArrayPool()
    for group in _groups(held, _GROUP_BYTES if is_late else 0):
        sizes = [[sum(part.rows for part in rows) for rows in strips] for strips in group]
        parts = [mixes(of_window) for of_window in sizes]
        rows, memory = sum(map(sum, sizes)), sum(part.size for part in _flat(group))
        each = max(1, memory // rows)
        if is_late:
            yield _late(group, window_order(sizes, parts), each, pool, is_own)
        else:
            step = size * max(1, _STEP_BYTES // (each * size))
            for strips, of_window, its_parts in zip(group, sizes, parts, strict=True):
                yield from _in_parts(strips, of_window, its_parts, step, each, mixer, is_own)
            del strips
        _release_all(group)
        del group  # free it before the next one is made


def are_late(columns: Iterable[Column], size: int) -> bool:
    """Return whether the reader takes batches of `size` rows out of the windows."""
    each = _array_bytes(columns)
    return each is not None and each * size <= _LATE_BYTES


def block_bytes(columns: Sequence[Column], size: int, window: int, row_bytes: int) -> int:
    """Return the most bytes of a block of `shuffle_windows`.

    Args:
        columns: columns of a batch.
        size: number of rows of a batch.
        window: number of rows of a window.
        row_bytes: estimated bytes of a row with all columns.
    """
    each = _array_bytes(columns)
    if each is not None and are_late(columns, size):
        return max(_GROUP_BYTES, window * (each + _NUMBER_BYTES))
    return max(_STEP_BYTES, size * (row_bytes if each is None else each))


def _array_bytes(columns: Iterable[Column]) -> int | None:
    """Return the bytes of a row as arrays, or None if there are objects, whose sizes differ."""
    each = 0
    for column in columns:
        if column.kind is ColumnKind.RAGGED or column.dtype == object:
            return None
        each += math.prod(column.shape) * column.dtype.itemsize
    return each


def _groups(held: Iterable[Sequence[Rows]], most: int) -> Iterator[list[Sequence[Rows]]]:
    """Yield each window, together with those that follow it if all have at most `most` bytes."""
    group: list[Sequence[Rows]] = []
    size = 0
    for strips in held:
        more = sum(part.size for rows in strips for part in rows)
        if group and size + more > most:
            yield group
            group, size = [], 0
        group.append(strips)
        del strips  # it goes with the list
        size += more
        # The next window is probably as large; if it will not fit, do not wait for it.
        if size + more > most:
            yield group
            group, size = [], 0
    if group:
        yield group


def _flat(group: Sequence[Sequence[Rows]]) -> Iterator[Block]:
    return (part for strips in group for rows in strips for part in rows)


def _release_all(group: Sequence[Sequence[Rows]]) -> None:
    for part in _flat(group):
        part.release()


def _late(
    group: Sequence[Sequence[Rows]], order: Array, each: int, pool: _ArrayPool, is_own: bool
) -> Block:
    """Return the rows of windows, which the reader puts in order."""
    columns = {name: [part.arrays[name] for part in _flat(group)] for name in group[0][0][0].arrays}
    wide = {name: arrays for name, arrays in columns.items() if not _is_narrow(arrays[0])}
    memory = pool.joined(wide)
    arrays = {
        name: memory[name][: len(order)] if name in wide else _taken(columns[name], order)
        for name in columns
    }
    rows, done = len(order), functools.partial(pool.free, memory)
    if not wide:
        return Block(arrays, rows, each * rows, done)
    # Not the dict's keys, which would keep its arrays.
    size = (each + _NUMBER_BYTES) * rows
    return ShuffledBlock(arrays, rows, size, done, order, frozenset(wide), is_own)


def _in_parts(
    strips: Sequence[Rows],
    sizes: Sequence[int],
    parts: Sequence[WindowPart],
    step: int,
    each: int,
    mixer: _Mixer,
    is_own: bool,
) -> Iterator[Block]:
    """Yield the rows of a window in order, in blocks of `step` rows, except at a part's end."""
    columns = {name: [_strip(name, rows) for rows in strips] for name in strips[0][0].arrays}
    narrow: dict[str, Array] = {}
    if names := [name for name, arrays in columns.items() if _is_narrow(arrays[0])]:
        order = window_order([sizes], [parts])
        narrow = {name: _taken(columns[name], order) for name in names}
    at = 0
    for mix in parts:
        mixed = {n: mixer.mixed(n, arrays, mix) for n, arrays in columns.items() if n not in narrow}
        for first in range(0, len(mix.order), step):
            some = mix.order[first : first + step]
            arrays = {
                name: narrow[name][at : at + len(some)]
                if name in narrow
                else mixed[name].take(some, axis=0)
                for name in columns
            }
            at += len(some)
            arrays = arrays if is_own else _sealed(arrays)
            yield Block(arrays, len(some), each * len(some), _keep)
            del arrays


def _is_narrow(array: Array) -> bool:
    return bool(array.nbytes <= _NARROW_BYTES * len(array))


def _taken(arrays: Sequence[Array], order: Array) -> Array:
    """Return the rows of all arrays in an order, read-only."""
    import numpy as np

    taken: Array = np.concatenate(arrays).take(order, axis=0)
    taken.flags.writeable = False
    return taken


class _ArrayPool:
    """Memory for the rows of windows, which later windows use again.

    The kernel clears new pages first, which takes longer than to copy rows there.
    """

    def __init__(self) -> None:
        # The reader, in another thread, gives back what it has used.
        self._free: deque[dict[str, Array]] = deque()

    def joined(self, columns: Mapping[str, Sequence[Array]]) -> dict[str, Array]:
        """Return arrays that begin with the rows of all arrays of each column.

        They are the caller's until it gives them to `free`.
        """
        import numpy as np

        joined = self._free.popleft() if self._free else {}
        for name, parts in columns.items():
            rows = sum(map(len, parts))
            if name not in joined or len(joined[name]) < rows:
                joined[name] = np.empty((rows, *parts[0].shape[1:]), parts[0].dtype)
            np.concatenate(parts, out=joined[name][:rows])
        return joined

    def free(self, joined: dict[str, Array]) -> None:
        """Take back the memory of windows."""
        self._free.append(joined)


def _strip(name: str, rows: Rows) -> Array:
    import numpy as np

    arrays = [part.arrays[name] for part in rows]
    return np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


class _Mixer:
    """Memory for the parts of a window, which each part uses again.

    The kernel clears new pages first, which takes longer.
    """

    def __init__(self) -> None:
        self._mixed: dict[str, Array] = {}

    def mixed(self, name: str, strips: Sequence[Array], mix: WindowPart) -> Array:
        """Return a column's rows of a part of a window, in memory that the next part overwrites."""
        import numpy as np

        rows, kind = len(mix.order), strips[0].dtype
        mixed = self._mixed.get(name)
        if mixed is None or len(mixed) < rows:
            mixed = self._mixed[name] = np.empty((rows, *strips[0].shape[1:]), kind)
        at = 0
        for strip, runs in zip(strips, mix.runs, strict=True):
            whole, end = len(strip) // RUN_ROWS, at + len(runs) * RUN_ROWS
            shape = (-1, RUN_ROWS, *strip.shape[1:])
            target = mixed[at:end].reshape(shape)
            # The numbers are in range, and "clip" needs no copy to undo a failure.
            strip[: whole * RUN_ROWS].reshape(shape).take(runs, axis=0, out=target, mode="clip")
            at = end
            if mix.has_tails:
                tail = strip[whole * RUN_ROWS :]
                mixed[at : at + len(tail)] = tail
                at += len(tail)
        return mixed[:rows]


def rebatch(
    blocks: Generator[Block | None, None, None], size: int, drop_remainder: bool
) -> Generator[dict[str, Array], None, None]:
    """Yield batches of `size` rows.

    A batch within one block is a view of the block; of a `ShuffledBlock`, wide arrays are copied.
    All batches are read-only, except those of writeable blocks.

    Args:
        blocks: the blocks, with None after the last one of an epoch, whose last batch may be
            smaller; they are closed at the end.
        size: number of rows of a batch.
        drop_remainder: whether to leave out the batches that are smaller.
    """
    held: list[tuple[Block, int]] = []  # each with its first row that is in no batch yet
    missing = size
    with contextlib.closing(blocks):
        for block in blocks:
            if block is None:
                batch = _joined(_rest(held)) if held and not drop_remainder else None
                # Before the reader is busy with the batch: a block may be large.
                _release(held)
                held, missing = [], size
                if batch is not None:
                    yield batch
                    del batch
                continue
            first = 0
            if held and block.rows >= missing:
                batch = _joined([*_rest(held), block.part(0, missing)])
                _release(held)
                held, first, missing = [], missing, size
                yield batch
                del batch
            if not held:
                whole = first + (block.rows - first) // size * size
                starts = range(first, whole, size)
                if isinstance(block, ShuffledBlock):
                    yield from (block.part(at, at + size) for at in starts)
                else:
                    for at in starts:
                        # Not with `part`: to call it takes as long as to make a batch of a column.
                        batch, end = {}, at + size
                        for name in block.arrays:
                            batch[name] = block.arrays[name][at:end]
                        yield batch
                        del batch  # the reader has it now, and may be done with it
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
