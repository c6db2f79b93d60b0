"""A shard's rows as blocks of arrays: from the local disk, or from the lake and then cached."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hopsgpu.data.batches import Block, converted, windows
from hopsgpu.data.cache import Cache, CacheWriter, Chunk, in_memory
from hopsgpu.data.columns import Column
from hopsgpu.data.reader import FETCHES, LakeReader
from hopsgpu.data.shard import Shard
from hopsgpu.data.shuffle import interleaved, pieces_of, shuffled
from hopsgpu.units import MIB

# The size of a window of rows that are shuffled together, and the number of pieces of the shard
# that its rows come from in turn.
_WINDOW_BYTES = 32 * MIB
_MIXED = 4
# The most bytes of arrays that are made from a record batch at a time.
_BLOCK_BYTES = 8 * MIB
# The largest row group that is fetched as a whole; a shuffle has several in memory at a time.
_FETCHED_BYTES = 16 * MIB


class Stream:
    """Some columns of a shard, for use in the thread and the process that created it.

    A context manager: its exit ends the threads that read the lake and write the cache.

    Args:
        shard: the rows.
        cache: caches them on the local disk.
        columns: names of the columns.
        schema: the shard's Arrow schema.
    """

    def __init__(self, shard: Shard, cache: Cache, columns: Sequence[str], schema: Any) -> None:
        import pyarrow as pa

        self._shard = shard
        self._cache = cache
        self._pieces = pieces_of(shard.slices, shard.row_bytes)
        # In the order of the files, so that the same columns are cached once.
        self._schema = pa.schema([field for field in schema if field.name in columns])
        named = json.dumps(self._schema.names).encode()
        self._key = hashlib.sha256(named).hexdigest()[:16]
        self._open = contextlib.ExitStack()
        self._scribe = self._open.enter_context(CacheWriter())

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *problem: object) -> None:
        self._open.close()

    @functools.cached_property
    def _lake(self) -> LakeReader:
        # Created on first use: if everything is on the local disk, no reader is needed.
        reader = LakeReader(self._shard, self._schema, _FETCHED_BYTES)
        return self._open.enter_context(reader)

    def chunks(self) -> Iterator[Chunk]:
        """Return all record batches, in the shard's order."""
        return self._in_order(range(len(self._pieces)), 1)

    def blocks(self, columns: Sequence[Column]) -> Iterator[Block]:
        """Return all rows, in the shard's order."""
        return self._converted(self.chunks(), columns)

    def shuffled(self, columns: Sequence[Column], seed: int, epoch: int) -> Iterator[Block]:
        """Return all rows, in an order that seed and epoch determine."""
        chunks = self._in_order(shuffled(range(len(self._pieces)), seed, epoch), _MIXED)
        return windows(self._converted(chunks, columns), _WINDOW_BYTES, (seed, epoch))

    def _converted(self, chunks: Iterable[Chunk], columns: Sequence[Column]) -> Iterator[Block]:
        for chunk in chunks:
            yield from converted(chunk, columns, _BLOCK_BYTES)
            del chunk  # free it before the next one is made

    def _in_order(self, numbers: Sequence[int], mixed: int) -> Iterator[Chunk]:
        # Mixed pieces are fetched concurrently, so each of them fetches one row group less ahead.
        ahead = FETCHES if mixed == 1 else 1
        return interleaved((functools.partial(self._piece, n, ahead) for n in numbers), mixed)

    def _piece(self, number: int, ahead: int) -> Iterator[Chunk]:
        key = f"{self._key}/{number}"
        self._scribe.wait_for(key)
        kept = self._cache.read(key)
        if kept is not None:
            return kept
        return self._fetched(key, self._lake.chunks(self._pieces[number], ahead))

    def _fetched(self, key: str, batches: Iterator[Any]) -> Iterator[Chunk]:
        with self._cache.keeping(key, self._schema, self._scribe) as keep:
            for batch in batches:
                keep(batch)
                yield in_memory(batch)
