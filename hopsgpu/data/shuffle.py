"""The order in which a rank reads its shard: in pieces, shuffled by seed and epoch.

The order depends only on the plan of the shard, not on the data. The driver can therefore compute
which rows a rank has read after some batches. The units, from the largest to the smallest:

- piece: slices of a shard (`shard.Slice`) that one pass reads and one cache file holds. A shuffled
  epoch has the pieces in random order.
- window: rows that are shuffled together in memory, from `MIXED_PIECES` pieces at a time.
- strip: consecutive rows of a piece; one of the strips that form a window (`Strip`).
- part of a window: rows of the window that fit into a CPU cache (`WindowPart`). A part consists of
  runs of `RUN_ROWS` consecutive rows of each strip.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hopsgpu.data.shard import Slice
from hopsgpu.data.sizes import fixed_bytes, leaf_types
from hopsgpu.units import MIB

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

T = TypeVar("T")

# Increase this number whenever seed and epoch determine another order: positions of checkpoints
# then mean other rows.
ORDER_VERSION = 4
# A piece of this size is full.
_PIECE_BYTES = 64 * MIB
# Number of pieces from which a window takes strips in turn.
MIXED_PIECES = 4
# Limits of a window: fewer rows if some rows may be much larger than the footers' estimate.
_WINDOW_BYTES = 32 * MIB
_WINDOW_ROWS = 65_536
_WINDOW_ROWS_VARIABLE = 8_192
# Number of rows of a part of a window.
_PART_ROWS = 8_192
# A part takes runs of consecutive rows, so that most memory is read in order.
RUN_ROWS = 16
# Consecutive parts with this many rows in all share an order, each with other runs: drawing an
# order for each part takes as long as shuffling its rows.
_SHARING_ROWS = 262_144


def split_into_pieces(slices: Iterable[Slice], row_bytes: int) -> tuple[tuple[Slice, ...], ...]:
    """Return the slices in pieces, in their order.

    Consecutive slices of one row group stay in one piece, so that one pass reads them.
    """
    pieces: list[tuple[Slice, ...]] = []
    piece: list[Slice] = []
    size = 0
    for rows in slices:
        if size >= _PIECE_BYTES and rows[:2] != piece[-1][:2]:
            pieces.append(tuple(piece))
            piece, size = [], 0
        piece.append(rows)
        size += rows.rows * row_bytes
    if piece:
        pieces.append(tuple(piece))
    return tuple(pieces)


def shuffle_items(items: Sequence[T], seed: int, epoch: int) -> list[T]:
    order = list(items)
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def interleave(streams: Iterable[Callable[[], Iterator[T]]], width: int) -> Iterator[T]:
    """Yield items of the streams in turn, from `width` streams at a time; close them at the end.

    The next stream is opened before its turn, so that it can fetch ahead.
    """
    unopened = iter(streams)
    opened: list[Iterator[T]] = []
    try:
        while True:
            while len(opened) <= width and (open_stream := next(unopened, None)) is not None:
                opened.append(open_stream())
            if not opened:
                return
            stream = opened.pop(0)
            for item in stream:
                opened.insert(width - 1, stream)
                yield item
                break
    finally:
        for stream in opened:
            if (close := getattr(stream, "close", None)) is not None:
                close()


class Strip(NamedTuple):
    """Consecutive rows of a piece from row `first` on, which go into one window."""

    piece: int
    first: int
    rows: int


def window_rows(schema: Any, row_bytes: int, has_even_lists: bool) -> int:
    """Return the number of rows of a window.

    Args:
        schema: schema of all columns: the order must not depend on which of them are read.
        row_bytes: estimated bytes of a row.
        has_even_lists: whether the lists of each column have one length.
    """
    is_even = all(_has_even_rows(field.type, has_even_lists) for field in schema)
    limit = _WINDOW_ROWS if is_even else _WINDOW_ROWS_VARIABLE
    return max(MIXED_PIECES, min(limit, _WINDOW_BYTES // max(1, row_bytes)))


def _has_even_rows(kind: Any, has_even_lists: bool) -> bool:
    """Return whether all values of an Arrow type have one size."""
    if fixed_bytes(kind) is not None:
        return True
    return has_even_lists and None not in map(fixed_bytes, leaf_types(kind))


def split_piece(piece: int, rows: int, window: int) -> Iterator[Strip]:
    """Yield the strips of a piece; the last one may be smaller."""
    strip_rows = window // MIXED_PIECES
    for first in range(0, rows, strip_rows):
        yield Strip(piece, first, min(strip_rows, rows - first))


def group_into_windows(
    strips: Iterable[T], rows_of: Callable[[T], int], window: int
) -> Iterator[list[T]]:
    group: list[T] = []
    rows = 0
    for strip in strips:
        strip_rows = rows_of(strip)
        if group and rows + strip_rows > window:
            yield group
            group, rows = [], 0
        group.append(strip)
        rows += strip_rows
        del strip  # only the yielded list refers to the strip
    if group:
        yield group


class WindowPart(NamedTuple):
    """A part of a window, whose rows are shuffled while they are in a CPU cache.

    Attributes:
        runs: for each strip of the window, the numbers of the part's runs of `RUN_ROWS` rows.
        has_tails: whether the part also has each strip's rows after the last whole run.
        order: order of the part's rows. They are numbered strip by strip, first the runs, then the
            tail.
    """

    runs: tuple[Array, ...]
    has_tails: bool
    order: Array


class WindowShuffler:
    """Draws the parts of an epoch's windows of `window` rows, the same in all versions of NumPy."""

    def __init__(self, seed: int, epoch: int, window: int) -> None:
        # One generator for all windows: seeding takes as long as drawing a small window.
        self._random = _random(seed, epoch)
        self._sharing = max(1, _SHARING_ROWS // window)
        self._window_count = 0
        self._shared_order: Array | None = None

    def next(self, sizes: Sequence[int]) -> list[WindowPart]:
        """Return the parts of the next window, each with equally many random runs of each strip.

        Args:
            sizes: number of rows of each strip.
        """
        if self._window_count % self._sharing == 0:
            self._shared_order = None
        self._window_count += 1
        total = sum(sizes)
        parts = -(-total // _PART_ROWS)
        numbers = tuple([self._random.permutation(size // RUN_ROWS) for size in sizes])
        if parts == 1:
            return [WindowPart(numbers, True, self._order(total))]
        shares = [
            tuple(n[len(n) * part // parts : len(n) * (part + 1) // parts] for n in numbers)
            for part in range(parts)
        ]
        rows = [sum(len(n) * RUN_ROWS for n in runs) for runs in shares]
        rows[-1] += sum(size % RUN_ROWS for size in sizes)
        order = self._order(max(rows))
        return [
            WindowPart(
                runs, part == parts - 1, order if count == len(order) else order[order < count]
            )
            for part, (runs, count) in enumerate(zip(shares, rows, strict=True))
        ]

    def _order(self, rows: int) -> Array:
        if self._shared_order is None or len(self._shared_order) != rows:
            self._shared_order = self._random.permutation(rows)
        return self._shared_order


def _random(*seeds: int) -> np.random.RandomState:
    import numpy as np

    # The permutation of a `Generator` may change with NumPy's version; that of `RandomState` never
    # does. PCG64, because the bit generator of `RandomState` takes ten times as long to seed.
    return np.random.RandomState(np.random.PCG64(np.random.SeedSequence(seeds)))


def window_order(sizes: Sequence[Sequence[int]], parts: Sequence[Sequence[WindowPart]]) -> Array:
    """Return the order of the rows of consecutive windows, as row numbers from the first window on.

    Args:
        sizes: the number of rows of each strip of each window.
        parts: all parts of each window.
    """
    import numpy as np

    order = np.empty(sum(map(sum, sizes)), np.intp)
    within, begin, at = np.arange(RUN_ROWS), 0, 0
    # Reuse the quotients of the previous part: most parts share its order.
    previous, run_of, row_of = order, within, within
    for strips, window_parts in zip(sizes, parts, strict=True):
        *begins, begin = itertools.accumulate(strips, initial=begin)
        for part in window_parts:
            end = at + len(part.order)
            firsts = [
                first + runs * RUN_ROWS for first, runs in zip(begins, part.runs, strict=True)
            ]
            if part.has_tails and any(rows % RUN_ROWS for rows in strips):
                rows = []
                for run_firsts, first, size in zip(firsts, begins, strips, strict=True):
                    rows.append((run_firsts[:, None] + within).reshape(-1))
                    rows.append(np.arange(first + size // RUN_ROWS * RUN_ROWS, first + size))
                order[at:end] = np.concatenate(rows)[part.order]
            else:
                if previous is not part.order:
                    previous = part.order
                    run_of, row_of = previous // RUN_ROWS, previous % RUN_ROWS
                np.add(np.concatenate(firsts)[run_of], row_of, out=order[at:end])
            at = end
    return order


def first_rows(
    slices: Sequence[Slice], rows: int, row_bytes: int, window: int, order: tuple[int, int] | None
) -> list[Slice]:
    """Return the first rows that an epoch yields of a shard with these slices.

    Args:
        rows: number of rows to return.
        row_bytes: as in `Shard`.
        window: number of rows of a window.
        order: seed and epoch; None for the shard's order.
    """
    if order is None:
        return cut_slices(slices, [0, rows])[0]
    pieces = split_into_pieces(slices, row_bytes)
    sizes = [sum(part.rows for part in piece) for piece in pieces]
    numbers = shuffle_items(range(len(pieces)), *order)
    strips = interleave(
        (functools.partial(split_piece, n, sizes[n], window) for n in numbers), MIXED_PIECES
    )
    shuffler = WindowShuffler(*order, window)
    result: list[Slice] = []
    for window_strips in group_into_windows(strips, lambda strip: strip.rows, window):
        if rows <= 0:
            break
        in_window: list[Slice] = []
        for strip in window_strips:
            in_window += cut_slices(pieces[strip.piece], [strip.first, strip.first + strip.rows])[0]
        lengths = [strip.rows for strip in window_strips]
        parts = shuffler.next(lengths)
        if rows >= sum(lengths):
            result += in_window
        else:
            result += _pick_rows(in_window, window_order([lengths], [parts])[:rows])
        rows -= sum(lengths)
    return result


def _pick_rows(slices: Sequence[Slice], numbers: Array) -> Iterator[Slice]:
    """Yield the rows with these numbers among the slices' rows; consecutive rows as one slice."""
    import numpy as np

    numbers = np.sort(numbers)
    begins = np.array([0, *itertools.accumulate(part.rows for part in slices)])
    owners = np.searchsorted(begins, numbers, "right") - 1
    heads = (np.diff(numbers, prepend=-2) != 1) | (np.diff(owners, prepend=-1) != 0)
    at = np.flatnonzero(heads)
    rows = np.diff(at, append=len(numbers))
    firsts = numbers[at] - begins[owners[at]]
    for owner, first, count in zip(
        owners[at].tolist(), firsts.tolist(), rows.tolist(), strict=True
    ):
        part = slices[owner]
        yield part._replace(first=part.first + first, rows=count)


def cut_slices(slices: Sequence[Slice], ends: Sequence[int]) -> list[list[Slice]]:
    """Return the rows from each end to the next; an end is a number of rows of all slices."""
    begins = [0, *itertools.accumulate(part.rows for part in slices)]
    shares = []
    for begin, end in itertools.pairwise(ends):
        first = bisect.bisect_right(begins, begin) - 1
        last = bisect.bisect_left(begins, end)
        share = []
        for number in range(first, last):
            part, at = slices[number], begins[number]
            skipped = max(begin - at, 0)
            share.append(
                part._replace(first=part.first + skipped, rows=min(part.rows, end - at) - skipped)
            )
        shares.append([part for part in share if part.rows])
    return shares
