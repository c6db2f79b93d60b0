"""The order in which a rank reads its shard: in pieces, shuffled by seed and epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from hopsgpu.data.shard import Slice
from hopsgpu.units import MIB

T = TypeVar("T")

# A piece of this size is full: its slices are cached in one file and read one after another.
_PIECE_BYTES = 32 * MIB


def pieces_of(slices: Iterable[Slice], row_bytes: int) -> tuple[tuple[Slice, ...], ...]:
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


def shuffled(items: Sequence[T], seed: int, epoch: int) -> list[T]:
    """Return the items in an order that seed and epoch determine."""
    order = list(items)
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def interleaved(streams: Iterable[Callable[[], Iterator[T]]], width: int) -> Iterator[T]:
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
