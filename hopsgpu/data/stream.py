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
    StripBlocks,
    convert_chunk,
    share_values,
    should_order_in_reader,
    shuffle_windows,
    split_into_strips,
)
from hopsgpu.data.cache import Cache, CacheWriter, Chunk, memory_chunk
from hopsgpu.data.columns import Column
from hopsgpu.data.reader import CONCURRENT_FETCHES, LakeReader
from hopsgpu.data.shard import Shard
from hopsgpu.data.shuffle import (
    MIXED_PIECES,
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
# The largest row group that is fetched as a whole; a shuffle has several of them in memory.
_FETCHED_BYTES = 16 * MIB


class ShardStream:
    """Some columns of a shard, for use in the thread and the process that created it.

    A context manager: its exit ends the threads that read the lake and write the cache.

    Args:
        cache: caches the rows on the local disk; None for rows that are read only once.
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
        # The key has the slices, because processes that read parts of a shard share the cache.
        content = json.dumps([self._schema.names, shard.slices]).encode()
        self._key = hashlib.sha256(content).hexdigest()[:16]
        self._exit_stack = contextlib.ExitStack()
        self._cache_writer = self._exit_stack.enter_context(CacheWriter())

    def __enter__(self) -> ShardStream:
        return self

    def __exit__(self, *problem: object) -> None:
        self._exit_stack.close()

    @functools.cached_property
    def _lake(self) -> LakeReader:
        # Lazily: if all rows are on the local disk, no reader is needed.
        reader = LakeReader(self._shard, self._schema, _FETCHED_BYTES)
        return self._exit_stack.enter_context(reader)

    def is_cached(self) -> bool:
        cache = self._cache
        if cache is None:
            return False
        keys = [self._key_of(number) for number in range(len(self._pieces))]
        for key in keys:
            self._cache_writer.wait_for(key)
        return all(map(cache.is_cached, keys))

    def chunks(self, *, should_touch: bool = True) -> Iterator[Chunk]:
        """Return all record batches, in the shard's order; `should_touch` as for `Cache.read`."""
        pieces = (
            functools.partial(self._read_piece, n, CONCURRENT_FETCHES, should_touch=should_touch)
            for n in range(len(self._pieces))
        )
        return interleave(pieces, 1)

    def blocks(self, columns: Sequence[Column], *, should_touch: bool = True) -> Iterator[Block]:
        """Return all rows, in the shard's order; `should_touch` as for `chunks`."""
        return self._convert(self.chunks(should_touch=should_touch), columns)

    def shuffled_blocks(
        self,
        columns: Sequence[Column],
        seed: int,
        epoch: int,
        size: int,
        *,
        is_writeable: bool = False,
    ) -> Iterator[Block]:
        """Return all rows, in an order that seed and epoch determine.

        The order is that of `shuffle.first_rows`. The blocks are for batches of `size` rows; see
        `shuffle_windows`, also for `is_writeable`.
        """
        shard = self._shard
        window = window_rows(shard.arrow_schema, shard.row_bytes, shard.has_even_lists)
        numbers = shuffle_items(range(len(self._pieces)), seed, epoch)
        strip_rows = window // MIXED_PIECES
        streams = (functools.partial(self._read_strips, n, columns, strip_rows) for n in numbers)
        strips = interleave(streams, MIXED_PIECES)
        windows = group_into_windows(strips, lambda strip: sum(b.rows for b in strip), window)
        draw_parts = WindowShuffler(seed, epoch, window).next
        in_reader = should_order_in_reader(columns, size)
        return shuffle_windows(windows, draw_parts, size, in_reader, is_writeable)

    def _read_strips(
        self, number: int, columns: Sequence[Column], rows: int
    ) -> Iterator[StripBlocks]:
        # Mixed pieces are fetched concurrently, so each fetches only one row group ahead.
        blocks = self._convert(self._read_piece(number, 1), columns)
        return split_into_strips(share_values(blocks, self._shard.row_bytes), rows)

    def _convert(self, chunks: Iterable[Chunk], columns: Sequence[Column]) -> Iterator[Block]:
        checked = set() if self._cache is None else self._cache.checked
        for chunk in chunks:
            yield from convert_chunk(chunk, columns, _BLOCK_BYTES, checked)
            del chunk  # free the chunk before the next one is made

    def _key_of(self, number: int) -> str:
        return f"{self._key}/{number}"

    def _read_piece(self, number: int, ahead: int, *, should_touch: bool = True) -> Iterator[Chunk]:
        piece = self._pieces[number]
        if self._cache is None:
            return map(memory_chunk, self._lake.chunks(piece, ahead))
        key = self._key_of(number)
        self._cache_writer.wait_for(key)
        cached = self._cache.read(key, should_touch=should_touch)
        if cached is not None:
            return cached
        return self._fetch(key, self._cache, self._lake.chunks(piece, ahead))

    def _fetch(self, key: str, cache: Cache, batches: Iterator[Any]) -> Iterator[Chunk]:
        with cache.write_batches(key, self._schema, self._cache_writer) as keep:
            for batch in batches:
                keep(batch)
                yield memory_chunk(batch)
