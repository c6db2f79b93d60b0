"""A shard's rows as blocks of arrays: from the local disk, or from the lake and then cached."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hopsgpu.data.batches import (
    Block,
    Rows,
    are_late,
    convert_chunk,
    share_values,
    shuffle_windows,
    split_into_strips,
)
from hopsgpu.data.cache import Cache, CacheWriter, Chunk, memory_chunk
from hopsgpu.data.columns import Column
from hopsgpu.data.reader import FETCHES, LakeReader
from hopsgpu.data.shard import Shard
from hopsgpu.data.shuffle import (
    MIXED,
    WindowShuffler,
    group_into_windows,
    interleave,
    shuffle_items,
    split_into_pieces,
    window_rows,
)
from hopsgpu.units import MIB

# The most bytes of arrays that are made from a record batch at a time.
_BLOCK_BYTES = 8 * MIB
# The largest row group that is fetched as a whole; a shuffle has several in memory at a time.
_FETCHED_BYTES = 16 * MIB


class ShardStream:
    """Some columns of a shard, for use in the thread and the process that created it.

    A context manager: its exit ends the threads that read the lake and write the cache.

    Args:
        shard: the rows.
        cache: caches them on the local disk; None for rows that are read only once.
        columns: names of the columns.
        schema: the shard's Arrow schema.
    """

    def __init__(
        self, shard: Shard, cache: Cache | None, columns: Sequence[str], schema: Any
    ) -> None:
        import pyarrow as pa

        self._shard = shard
        self._cache = cache
        self._pieces = split_into_pieces(shard.slices, shard.row_bytes)
        # In the order of the files, so that the same columns are cached once.
        self._schema = pa.schema([field for field in schema if field.name in columns])
        # With the rows, since processes that each read a part of a shard have the same cache.
        named = json.dumps([self._schema.names, shard.slices]).encode()
        self._key = hashlib.sha256(named).hexdigest()[:16]
        self._open = contextlib.ExitStack()
        self._scribe = self._open.enter_context(CacheWriter())

    def __enter__(self) -> ShardStream:
        return self

    def __exit__(self, *problem: object) -> None:
        self._open.close()

    @functools.cached_property
    def _lake(self) -> LakeReader:
        # Created on first use: if everything is on the local disk, no reader is needed.
        reader = LakeReader(self._shard, self._schema, _FETCHED_BYTES)
        return self._open.enter_context(reader)

    def is_cached(self) -> bool:
        """Return whether all rows are on the local disk."""
        cache = self._cache
        if cache is None:
            return False
        keys = [self._key_of(number) for number in range(len(self._pieces))]
        for key in keys:
            self._scribe.wait_for(key)
        return all(map(cache.holds, keys))

    def chunks(self, *, touched: bool = True) -> Iterator[Chunk]:
        """Return all record batches, in the shard's order.

        Args:
            touched: whether the pages of cached ones are in memory, as for `Cache.read`.
        """
        pieces = (
            functools.partial(self._piece, n, FETCHES, touched=touched)
            for n in range(len(self._pieces))
        )
        return interleave(pieces, 1)

    def blocks(self, columns: Sequence[Column], *, touched: bool = True) -> Iterator[Block]:
        """Return all rows, in the shard's order; `touched` as for `chunks`."""
        return self._converted(self.chunks(touched=touched), columns)

    def shuffled_blocks(
        self, columns: Sequence[Column], seed: int, epoch: int, size: int, *, is_own: bool = False
    ) -> Iterator[Block]:
        """Return all rows, in an order that seed and epoch determine.

        The order is that of `shuffle.first_rows`. The blocks are for batches of `size` rows, as
        `shuffle_windows` says. If `is_own`, arrays may be changed where they are writeable.
        """
        window = window_rows(self._shard.arrow_schema, self._shard.row_bytes)
        numbers = shuffle_items(range(len(self._pieces)), seed, epoch)
        strips = interleave(
            (functools.partial(self._strips, n, columns, window // MIXED) for n in numbers), MIXED
        )
        held = group_into_windows(strips, lambda strip: sum(part.rows for part in strip), window)
        mixes = WindowShuffler(seed, epoch, window)
        return shuffle_windows(held, mixes.next, size, are_late(columns, size), is_own)

    def _strips(self, number: int, columns: Sequence[Column], rows: int) -> Iterator[Rows]:
        # Mixed pieces are fetched concurrently, so each of them fetches one row group less ahead.
        blocks = self._converted(self._piece(number, 1), columns)
        return split_into_strips(share_values(blocks, self._shard.row_bytes), rows)

    def _converted(self, chunks: Iterable[Chunk], columns: Sequence[Column]) -> Iterator[Block]:
        checked = set() if self._cache is None else self._cache.checked
        for chunk in chunks:
            yield from convert_chunk(chunk, columns, _BLOCK_BYTES, checked)
            del chunk  # free it before the next one is made

    def _key_of(self, number: int) -> str:
        return f"{self._key}/{number}"

    def _piece(self, number: int, ahead: int, *, touched: bool = True) -> Iterator[Chunk]:
        pieces = self._pieces[number]
        if self._cache is None:
            return map(memory_chunk, self._lake.chunks(pieces, ahead))
        key = self._key_of(number)
        self._scribe.wait_for(key)
        kept = self._cache.read(key, touched=touched)
        if kept is not None:
            return kept
        return self._fetched(key, self._cache, self._lake.chunks(pieces, ahead))

    def _fetched(self, key: str, cache: Cache, batches: Iterator[Any]) -> Iterator[Chunk]:
        with cache.keeping(key, self._schema, self._scribe) as keep:
            for batch in batches:
                keep(batch)
                yield memory_chunk(batch)
