"""A reader of a shard's rows on the lake, in record batches of bounded size."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hopsgpu.data.calendars import to_gregorian
from hopsgpu.data.parquet import dictionary_columns, parquet_file, text_columns
from hopsgpu.data.row_groups import SMALL_FILE_BYTES, Fetcher, RowGroup
from hopsgpu.data.shard import Shard, ShardFile, Slice
from hopsgpu.data.sizes import fixed_bytes, leaf_types, memory_of, split_batch, stored_columns
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath, store_errors
from hopsgpu.units import MIB

# The most bytes of a record batch.
_CHUNK_BYTES = 8 * MIB
# The most bytes that are decoded at a time if many rows share a string that the file stores once.
_STEP_BYTES = 32 * MIB
# The read buffer of each column of a large row group.
_BUFFER_BYTES = MIB
_MAX_ROWS = 65_536
# Fewer rows, because lists and strings may be longer in some rows than the footer's average.
_MAX_ROWS_VARIABLE = 8_192
# If all values of a row group take at most this, more of its rows are decoded at a time: no
# distribution of list elements over the rows can then exceed it.
_MAX_GROUP_BYTES = 2 * _CHUNK_BYTES
# Number of row groups that are fetched at a time: one connection to a DataNode is slower than the
# decoder.
CONCURRENT_FETCHES = 2
# Small files that are fetched by one call of a thread: at most so many bytes, and so many files.
_BUNDLE_BYTES = MIB
_BUNDLE_FILES = 32
# Number of bundles that are fetched at a time: a small file takes a lake's time to answer, not the
# time of its bytes.
_CONCURRENT_BUNDLES = 8

# The slices that one scan of a row group reads, in order.
Scan = list[Slice]


def chunk_rows(schema: Any, row_bytes: int) -> int:
    """Return the number of rows to decode at a time: a power of two, as batch sizes often are.

    Args:
        schema: schema of the columns that are read.
        row_bytes: estimated bytes of a row with all columns.
    """
    widths = [fixed_bytes(field.type) for field in schema]
    fixed = [width for width in widths if width is not None]
    if len(fixed) == len(widths):
        return _power_of_two(_MAX_ROWS, sum(fixed))
    return _power_of_two(_MAX_ROWS_VARIABLE, row_bytes)


def _power_of_two(max_rows: int, row_bytes: int) -> int:
    rows = max(1, min(max_rows, _CHUNK_BYTES // max(1, row_bytes)))
    return 1 << (rows.bit_length() - 1)


def value_widths(schema: Any, names: Sequence[str]) -> dict[int, int] | None:
    """Return the bytes of a value of each stored column of these fields, by column number.

    Returns:
        None if values differ in size, as strings and binary do.
    """
    widths: dict[int, int] = {}
    for field, numbers in stored_columns(schema):
        if field.name in names:
            for number, kind in zip(numbers, leaf_types(field.type), strict=True):
                width = fixed_bytes(kind)
                if width is None:
                    return None
                widths[number] = width
    return widths


class LakeReader:
    """A reader of slices of a shard, for use in the thread and the process that created it.

    A context manager: its exit ends the threads that fetch row groups.

    Args:
        schema: schema of the columns that are read.
        max_bytes: the most bytes of a row group that is fetched as a whole. Larger row groups are
            read through a buffer for each column.
    """

    def __init__(self, shard: Shard, schema: Any, max_bytes: int) -> None:
        self._schema = schema
        self._stored = shard.arrow_schema
        self._rows = chunk_rows(schema, shard.row_bytes)
        self._widths = value_widths(shard.arrow_schema, schema.names)
        self._texts = text_columns(shard.arrow_schema, schema.names)
        # The most bytes of a column of strings that are decoded at a time.
        self._text_bytes = _STEP_BYTES // max(1, len(self._texts))
        self._fetcher = Fetcher(shard, schema.names, max_bytes)
        self._files = shard.files
        self._threads = ThreadPoolExecutor(CONCURRENT_FETCHES, "hopsgpu-data-fetch")
        self._bundle_threads = ThreadPoolExecutor(_CONCURRENT_BUNDLES, "hopsgpu-data-fetch-small")

    def __enter__(self) -> LakeReader:
        return self

    def __exit__(self, *problem: object) -> None:
        self._fetcher.stop()
        for threads in (self._threads, self._bundle_threads):
            threads.shutdown(cancel_futures=True)

    def chunks(self, parts: Sequence[Slice], ahead: int) -> Iterator[Any]:
        """Return the record batches of slices, in order; fetch the first slice at once.

        Args:
            parts: the slices; slices of one row group are consecutive, in the group's order.
            ahead: number of row groups in memory besides the row group that is decoded. If files
                are small, there may be several bundles, of `_BUNDLE_BYTES` each.

        Raises:
            StoreError: from the iterator: the lake refused, or the file has changed since the
                shards were planned.
        """
        bundles = list(_bundle(_group_into_scans(parts), self._files))
        return _join_batches(self._batches(bundles, deque([self._start_fetch(bundles[0])]), ahead))

    def _start_fetch(self, scans: Sequence[Scan]) -> Future[deque[RowGroup]]:
        threads = self._bundle_threads if self._is_small(scans) else self._threads
        return threads.submit(lambda: deque(self._fetcher.fetch(scan[0]) for scan in scans))

    def _is_small(self, scans: Sequence[Scan]) -> bool:
        return self._files[scans[0][0].file].size <= SMALL_FILE_BYTES

    def _batches(
        self,
        bundles: Sequence[Sequence[Scan]],
        fetching: deque[Future[deque[RowGroup]]],
        ahead: int,
    ) -> Iterator[Any]:
        # Either `ahead` row groups are fetched ahead, or so many bundles, or some of both.
        weights = [ahead if self._is_small(bundle) else _CONCURRENT_BUNDLES for bundle in bundles]
        started, load = 1, weights[0]
        for number, bundle in enumerate(bundles):
            fetched = fetching.popleft().result()
            load -= weights[number]
            while started < len(bundles) and load + weights[started] <= ahead * _CONCURRENT_BUNDLES:
                fetching.append(self._start_fetch(bundles[started]))
                load += weights[started]
                started += 1
            for scan in bundle:
                yield from self._decode(scan, fetched.popleft())

    def _decode(self, scan: Scan, fetched: RowGroup) -> Iterator[Any]:
        group = scan[0].group
        facts = fetched.footer.row_group(group)
        with fetched.open() as handle:
            buffer = 0 if fetched.content is not None else _BUFFER_BYTES
            file = functools.partial(parquet_file, handle, fetched.footer, buffer)
            with store_errors("read", fetched.lake.url):
                encoded = dictionary_columns(
                    file,
                    facts,
                    group,
                    self._texts,
                    self._text_bytes // self._rows,
                    self._text_bytes,
                )
                batches = file(encoded).iter_batches(
                    self._rows_of(facts),
                    [group],
                    self._schema.names,
                    use_threads=not fetched.is_small,
                )
            batches = to_gregorian(batches, fetched.footer, self._stored, fetched.lake.url)
            for batch in _select_rows(batches, scan, fetched.lake):
                yield from _limit_size(batch, self._schema)

    def _rows_of(self, group: Any) -> int:
        if self._widths is None or not group.num_rows:
            return self._rows
        size = sum(
            int(group.column(number).num_values) * width for number, width in self._widths.items()
        )
        if size > _MAX_GROUP_BYTES:
            return self._rows
        return max(self._rows, _power_of_two(_MAX_ROWS, size // group.num_rows))


def _group_into_scans(parts: Iterable[Slice]) -> Iterator[Scan]:
    scan: Scan = []
    for part in parts:
        if scan and (part[:2] != scan[-1][:2] or part.first < scan[-1].first + scan[-1].rows):
            yield scan
            scan = []
        scan.append(part)
    if scan:
        yield scan


def _bundle(scans: Iterable[Scan], files: Sequence[ShardFile]) -> Iterator[list[Scan]]:
    """Yield the scans in order, those of small files together."""
    bundle: list[Scan] = []
    size = 0
    for scan in scans:
        scan_bytes = files[scan[0].file].size
        is_full = size + scan_bytes > _BUNDLE_BYTES or len(bundle) == _BUNDLE_FILES
        if bundle and (scan_bytes > SMALL_FILE_BYTES or is_full):
            yield bundle
            bundle, size = [], 0
        bundle.append(scan)
        size += scan_bytes
        if scan_bytes > SMALL_FILE_BYTES:
            yield bundle
            bundle, size = [], 0
    if bundle:
        yield bundle


def _select_rows(batches: Iterator[Any], scan: Scan, lake: LakePath) -> Iterator[Any]:
    pending = deque(scan)
    begin = 0
    while pending:
        with store_errors("read", lake.url):
            batch = next(batches, None)
        if batch is None:
            wanted = scan[-1].first + scan[-1].rows
            raise StoreError(
                f"{lake.url}: row group {scan[0].group} has {begin} rows, expected {wanted}"
            )
        end = begin + batch.num_rows
        while pending and pending[0].first < end:
            part = pending.popleft()
            first, last = max(part.first, begin), min(part.first + part.rows, end)
            yield batch.slice(first - begin, last - first)
            if part.first + part.rows > end:
                pending.appendleft(part)
                break
        begin = end


def _limit_size(batch: Any, schema: Any) -> Iterator[Any]:
    """Yield the rows as batches of at most `_CHUNK_BYTES` with the schema."""
    import pyarrow as pa

    for part, _ in split_batch(batch, _size, _CHUNK_BYTES):
        if part.schema.equals(schema, check_metadata=True):
            yield part
            continue
        columns = (part.column(field.name) for field in schema)
        wanted = zip(columns, schema.types, strict=True)
        cast = [array if array.type == kind else array.cast(kind) for array, kind in wanted]
        yield pa.record_batch(cast, schema=schema)


def _size(batch: Any) -> int:
    return sum(memory_of(column, array_bytes=0) for column in batch.columns)


def _join_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows as larger batches, which are faster in later epochs."""
    held: list[Any] = []
    rows = size = 0
    for batch in batches:
        compact = _compact(batch)
        del batch
        batch_rows, batch_size = compact.num_rows, _size(compact)
        if held and not _is_within_limits(rows + batch_rows, size + batch_size):
            joined, held, rows, size = _combine(held), [], 0, 0
            yield joined
            del joined
        held.append(compact)
        del compact
        rows, size = rows + batch_rows, size + batch_size
        # The next batch is probably as large. If it will not fit, do not wait for it.
        if not _is_within_limits(rows + batch_rows, size + batch_size):
            joined, held, rows, size = _combine(held), [], 0, 0
            yield joined
            del joined
    if held:
        yield _combine(held)


def _compact(batch: Any) -> Any:
    """Copy a batch that keeps over twice its size in memory, as a slice of a large batch does."""
    import pyarrow as pa

    if batch.get_total_buffer_size() <= 2 * batch.nbytes:
        return batch
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def _is_within_limits(rows: int, size: int) -> bool:
    return rows <= _MAX_ROWS and size <= _CHUNK_BYTES


def _combine(batches: Sequence[Any]) -> Any:
    import pyarrow as pa

    if len(batches) == 1:
        return batches[0]
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined
