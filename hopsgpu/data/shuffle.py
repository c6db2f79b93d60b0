"""The order in which a rank reads its shard: in pieces, shuffled by seed and epoch.

The order follows from the shard's plan, and not from the data: so the driver knows which rows a
rank has read after some batches.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hopsgpu.data.shard import Slice
from hopsgpu.data.sizes import fixed_bytes
from hopsgpu.units import MIB

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

T = TypeVar("T")

# It changes when seed and epoch determine another order, where a position means other rows.
ORDER_VERSION = 3
# A piece of this size is full: its slices are cached in one file and read one after another.
_PIECE_BYTES = 64 * MIB
# The number of pieces that a window's rows come from in turn.
MIXED = 4
# The most of a window, whose rows are shuffled together: fewer rows if some may be much larger than
# the estimate from the footers says.
_WINDOW_BYTES = 32 * MIB
_WINDOW_ROWS = 65_536
_WINDOW_ROWS_VARIABLE = 8_192
# A window is shuffled in parts, which have random runs of consecutive rows of the window: so most
# memory is read in order.
_MIX_ROWS = 8_192
RUN_ROWS = 16
# Parts of so many rows in all share an order, each with other runs: to draw an order for each part
# takes as long as to shuffle its rows.
_SHARING_ROWS = 262_144


def split_into_pieces(slices: Iterable[Slice], row_bytes: int) -> tuple[tuple[Slice, ...], ...]:
    """Return the slices bundled in their order, so that small row groups share a cache file.

    Consecutive slices of one row group stay in one piece, so that one pass reads them.
    """
    pieces: list[tuple[Slice, ...]] = []
    piece: list[Slice] = []
    size = 0
    for part in slices:
        if size >= _PIECE_BYTES and part[:2] != piece[-1][:2]:
            pieces.append(tuple(piece))
            piece, size = [], 0
        piece.append(part)
        size += part.rows * row_bytes
    if piece:
        pieces.append(tuple(piece))
    return tuple(pieces)


def shuffle_items(items: Sequence[T], seed: int, epoch: int) -> list[T]:
    """Return the items in an order that seed and epoch determine."""
    order = list(items)
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def interleave(streams: Iterable[Callable[[], Iterator[T]]], width: int) -> Iterator[T]:
    """Yield items of the streams in turn, from `width` streams at a time.

    One stream more is begun before its turn, so that it can fetch ahead. All are closed at the end.
    """
    waiting = iter(streams)
    begun: list[Iterator[T]] = []
    try:
        while True:
            while len(begun) <= width and (begin := next(waiting, None)) is not None:
                begun.append(begin())
            if not begun:
                return
            stream = begun.pop(0)
            for item in stream:
                begun.insert(width - 1, stream)
                yield item
                break
    finally:
        for stream in begun:
            if (close := getattr(stream, "close", None)) is not None:
                close()


class Strip(NamedTuple):
    """Consecutive rows of a piece, which a window takes at a time.

    Attributes:
        piece: number of the piece.
        first: number of the first row in the piece.
        rows: number of rows.
    """

    piece: int
    first: int
    rows: int


def window_rows(schema: Any, row_bytes: int) -> int:
    """Return the number of rows that are shuffled together.

    Args:
        schema: schema of all columns; the order does not depend on which of them are read.
        row_bytes: estimated bytes of a row.
    """
    widths = [fixed_bytes(field.type) for field in schema]
    most = _WINDOW_ROWS if None not in widths else _WINDOW_ROWS_VARIABLE
    return max(MIXED, min(most, _WINDOW_BYTES // max(1, row_bytes)))


def split_piece(piece: int, rows: int, window: int) -> Iterator[Strip]:
    """Yield the strips of a piece, of which the last one may be smaller."""
    each = window // MIXED
    for first in range(0, rows, each):
        yield Strip(piece, first, min(each, rows - first))


def group_into_windows(
    strips: Iterable[T], rows_of: Callable[[T], int], window: int
) -> Iterator[list[T]]:
    """Yield the strips of each window."""
    held: list[T] = []
    rows = 0
    for strip in strips:
        more = rows_of(strip)
        if held and rows + more > window:
            yield held
            held, rows = [], 0
        held.append(strip)
        rows += more
        del strip  # it goes with the list
    if held:
        yield held


class WindowPart(NamedTuple):
    """A part of a window, whose rows are shuffled while they are in a CPU cache.

    Attributes:
        runs: for each strip of the window, the numbers of the part's runs of `RUN_ROWS` rows.
        has_tails: whether the part also has each strip's rows after the last whole run.
        order: order of the rows, which are counted by strip, the runs in their order first.
    """

    runs: tuple[Array, ...]
    has_tails: bool
    order: Array


class WindowShuffler:
    """The parts of an epoch's windows, the same in all versions of NumPy.

    Args:
        seed: seed of the shuffle.
        epoch: number of the epoch.
        window: number of rows that are shuffled together.
    """

    def __init__(self, seed: int, epoch: int, window: int) -> None:
        # One for all windows: to seed one takes as long as to draw a small window.
        self._random = _random(seed, epoch)
        self._sharing = max(1, _SHARING_ROWS // window)
        self._windows = 0
        self._drawn: Array | None = None

    def next(self, sizes: Sequence[int]) -> list[WindowPart]:
        """Return the parts of the next window. Each has equally many random runs of each strip.

        Args:
            sizes: number of rows of each strip of the window.
        """
        if self._windows % self._sharing == 0:
            self._drawn = None
        self._windows += 1
        total = sum(sizes)
        parts = -(-total // _MIX_ROWS)
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
        """Return the order in the parts that share one."""
        if self._drawn is None or len(self._drawn) != rows:
            self._drawn = self._random.permutation(rows)
        return self._drawn


def _random(*seeds: int) -> np.random.RandomState:
    import numpy as np

    # A Generator's permutation may change with a version; that of a RandomState never does. Its own
    # bit generator takes ten times as long to seed.
    return np.random.RandomState(np.random.PCG64(np.random.SeedSequence(seeds)))


def window_order(sizes: Sequence[Sequence[int]], parts: Sequence[Sequence[WindowPart]]) -> Array:
    """Return the order of the rows of consecutive windows, which are counted from the first one on.

    Args:
        sizes: for each window the number of rows of each of its strips.
        parts: for each window all its parts.
    """
    import numpy as np

    order = np.empty(sum(map(sum, sizes)), np.intp)
    within, begin, at = np.arange(RUN_ROWS), 0, 0
    # Of the mix before, whose order most mixes have.
    known, run_of, row_of = order, within, within
    for strips, mixes in zip(sizes, parts, strict=True):
        *begins, begin = itertools.accumulate(strips, initial=begin)
        for mix in mixes:
            end = at + len(mix.order)
            firsts = [one + runs * RUN_ROWS for one, runs in zip(begins, mix.runs, strict=True)]
            if mix.has_tails and any(rows % RUN_ROWS for rows in strips):
                rows = []
                for first, one, size in zip(firsts, begins, strips, strict=True):
                    rows.append((first[:, None] + within).reshape(-1))
                    rows.append(np.arange(one + size // RUN_ROWS * RUN_ROWS, one + size))
                order[at:end] = np.concatenate(rows)[mix.order]
            else:
                if known is not mix.order:
                    known, run_of, row_of = mix.order, mix.order // RUN_ROWS, mix.order % RUN_ROWS
                np.add(np.concatenate(firsts)[run_of], row_of, out=order[at:end])
            at = end
    return order


def first_rows(
    slices: Sequence[Slice], rows: int, row_bytes: int, window: int, order: tuple[int, int] | None
) -> list[Slice]:
    """Return the rows of a shard that an epoch yields first.

    Args:
        slices: the rows of the shard.
        rows: number of rows wanted.
        row_bytes: estimated bytes of a row, as in `Shard`.
        window: number of rows that are shuffled together.
        order: seed and epoch; None for the shard's order.
    """
    if order is None:
        return cut_slices(slices, [0, rows])[0]
    pieces = split_into_pieces(slices, row_bytes)
    sizes = [sum(part.rows for part in piece) for piece in pieces]
    numbers = shuffle_items(range(len(pieces)), *order)
    strips = interleave(
        (functools.partial(split_piece, n, sizes[n], window) for n in numbers), MIXED
    )
    mixes = WindowShuffler(*order, window)
    found: list[Slice] = []
    for held in group_into_windows(strips, lambda strip: strip.rows, window):
        if rows <= 0:
            break
        inside: list[Slice] = []
        for strip in held:
            inside += cut_slices(pieces[strip.piece], [strip.first, strip.first + strip.rows])[0]
        size = sum(part.rows for part in inside)
        lengths = [strip.rows for strip in held]
        mixed = mixes.next(lengths)
        if rows >= size:
            found += inside
        else:
            chosen = window_order([lengths], [mixed])
            found += _picked(inside, chosen[:rows])
        rows -= size
    return found


def _picked(slices: Sequence[Slice], numbers: Array) -> Iterator[Slice]:
    """Yield the rows of these numbers among the slices' rows, consecutive ones as one slice."""
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
    """Return the rows from each end to the next; the ends count the rows of all slices."""
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
