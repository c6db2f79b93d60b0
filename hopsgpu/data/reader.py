"""A reader of a shard's rows on the lake, in record batches of bounded size."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hopsgpu.data.calendars import to_gregorian
from hopsgpu.data.lake_file import open_lake_file
from hopsgpu.data.parquet import dictionary_columns, parquet_file, text_columns
from hopsgpu.data.row_groups import Fetcher, RowGroup
from hopsgpu.data.shard import Shard, Slice
from hopsgpu.data.sizes import fixed_bytes, leaf_types, memory_of, split_batch, stored_columns
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath, store_errors
from hopsgpu.units import MIB

# The most bytes of a record batch.
_CHUNK_BYTES = 8 * MIB
# The most bytes that are decoded at a time if many rows have a string that the file stores once.
_STEP_BYTES = 32 * MIB
# The read buffer of each column of a large row group.
_BUFFER_BYTES = MIB
_MOST_ROWS = 65_536
# Fewer, since lists and strings may be longer in some rows than the average that the footer gives.
_MOST_ROWS_VARIABLE = 8_192
# If the values of a row group take no more than this in all, more of its rows are decoded at a
# time, whichever rows its lists are in.
_MOST_IN_LISTS = 2 * _CHUNK_BYTES
# Row groups that are fetched at a time: one connection to a DataNode is slower than the decoder.
FETCHES = 2


def chunk_rows(schema: Any, row_bytes: int) -> int:
    """Return the number of rows to decode at a time.

    It is a power of two, so that batches of such sizes fit in.

    Args:
        schema: schema of the columns that are read.
        row_bytes: estimated bytes of a row with all columns.
    """
    widths = [fixed_bytes(field.type) for field in schema]
    known = [width for width in widths if width is not None]
    if len(known) == len(widths):
        return _power_of_two(_MOST_ROWS, sum(known))
    return _power_of_two(_MOST_ROWS_VARIABLE, row_bytes)


def _power_of_two(most: int, row_bytes: int) -> int:
    rows = max(1, min(most, _CHUNK_BYTES // max(1, row_bytes)))
    return 1 << (rows.bit_length() - 1)


def value_widths(schema: Any, names: Sequence[str]) -> dict[int, int] | None:
    """Return the bytes of each value of the columns that Parquet stores, by column number.

    Args:
        schema: schema of the file.
        names: names of the fields to read.

    Returns:
        The bytes by column number; None if values differ in size, as strings and binary do.
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

    A context manager: its exit ends the reader's own threads, which fetch row groups.

    Args:
        shard: the shard that has the slices.
        schema: schema of the columns that are read.
        most: the most bytes of a row group that is fetched as a whole; for a larger one, a buffer
            for each column is in memory.
    """

    def __init__(self, shard: Shard, schema: Any, most: int) -> None:
        self._schema = schema
        self._stored = shard.arrow_schema
        self._rows = chunk_rows(schema, shard.row_bytes)
        self._widths = value_widths(shard.arrow_schema, schema.names)
        self._texts = text_columns(shard.arrow_schema, schema.names)
        self._longest = _STEP_BYTES // (self._rows * max(1, len(self._texts)))
        self._fetcher = Fetcher(shard, schema.names, most)
        self._threads = ThreadPoolExecutor(FETCHES, "hopsgpu-data-fetch")

    def __enter__(self) -> LakeReader:
        return self

    def __exit__(self, *problem: object) -> None:
        self._fetcher.stop()
        self._threads.shutdown(cancel_futures=True)

    def chunks(self, parts: Sequence[Slice], ahead: int) -> Iterator[Any]:
        """Return the record batches of slices, in order; start to fetch the first slice at once.

        Args:
            parts: the slices; those of one row group follow each other, in the group's order.
            ahead: number of row groups in memory beside the one that is decoded.

        Raises:
            StoreError: from the iterator: the lake refused, or the file has changed since the
                shards were planned.
        """
        runs = list(_runs(parts))
        return _joined(self._batches(runs, deque([self._fetching(runs[0])]), ahead))

    def _fetching(self, run: Sequence[Slice]) -> Future[RowGroup]:
        return self._threads.submit(self._fetcher.fetch, run[0])

    def _batches(
        self, runs: Sequence[Sequence[Slice]], fetching: deque[Future[RowGroup]], ahead: int
    ) -> Iterator[Any]:
        unfetched = iter(runs[1:])
        for run in runs:
            fetched = fetching.popleft().result()
            fetching.extend(map(self._fetching, itertools.islice(unfetched, ahead - len(fetching))))
            yield from self._decoded(run, fetched)

    def _decoded(self, run: Sequence[Slice], fetched: RowGroup) -> Iterator[Any]:
        import pyarrow as pa

        group = run[0].group

        with contextlib.ExitStack() as stack:
            if fetched.content is not None:
                handle, buffer = pa.PythonFile(fetched.content, mode="r"), 0
            else:
                handle, buffer = stack.enter_context(open_lake_file(fetched.lake))[0], _BUFFER_BYTES
            file = functools.partial(parquet_file, handle, fetched.footer, buffer)
            with store_errors("read", fetched.lake.url):
                encoded = dictionary_columns(file, group, self._texts, self._longest)
                rows = self._rows_of(fetched.footer.row_group(group))
                batches = file(encoded).iter_batches(rows, [group], self._schema.names)
            batches = to_gregorian(batches, fetched.footer, self._stored, fetched.lake.url)
            for batch in _within(batches, run, fetched.lake):
                yield from _bounded(batch, self._schema)

    def _rows_of(self, group: Any) -> int:
        """Return the number of rows of a row group to decode at a time."""
        if self._widths is None or not group.num_rows:
            return self._rows
        size = sum(
            int(group.column(number).num_values) * width for number, width in self._widths.items()
        )
        if size > _MOST_IN_LISTS:
            return self._rows
        return max(self._rows, _power_of_two(_MOST_ROWS, size // group.num_rows))


def _runs(parts: Iterable[Slice]) -> Iterator[list[Slice]]:
    """Yield, for each pass over a row group, the slices that the pass reads."""
    run: list[Slice] = []
    for part in parts:
        if run and (part[:2] != run[-1][:2] or part.first < run[-1].first + run[-1].rows):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _within(batches: Iterator[Any], run: Sequence[Slice], lake: LakePath) -> Iterator[Any]:
    """Yield the rows of the slices from a row group's record batches."""
    pending = deque(run)
    begin = 0
    while pending:
        with store_errors("read", lake.url):
            batch = next(batches, None)
        if batch is None:
            wanted = run[-1].first + run[-1].rows
            raise StoreError(
                f"{lake.url}: row group {run[0].group} has {begin} rows, expected {wanted}"
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


def _bounded(batch: Any, schema: Any) -> Iterator[Any]:
    """Yield the rows as batches that have the schema and are small in memory."""
    import pyarrow as pa

    for part, _ in split_batch(batch, _size, _CHUNK_BYTES):
        columns = (part.column(field.name) for field in schema)
        wanted = zip(columns, schema.types, strict=True)
        plain = [one if one.type == kind else one.cast(kind) for one, kind in wanted]
        yield pa.record_batch(plain, schema=schema)


def _size(batch: Any) -> int:
    return sum(memory_of(column, each=0) for column in batch.columns)


def _joined(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows as larger record batches.

    In later epochs, a small batch costs as much time as a large one.
    """
    held: list[Any] = []
    rows = size = 0
    for batch in batches:
        one = _alone(batch)
        del batch
        number, more = one.num_rows, _size(one)
        if held and not _fits(rows + number, size + more):
            joined, held, rows, size = _one(held), [], 0, 0
            yield joined
            del joined
        held.append(one)
        del one
        rows, size = rows + number, size + more
        # The next batch is probably as large; if it will not fit, do not wait for it.
        if not _fits(rows + number, size + more):
            joined, held, rows, size = _one(held), [], 0, 0
            yield joined
            del joined
    if held:
        yield _one(held)


def _alone(batch: Any) -> Any:
    """Return a record batch that holds at most twice its own size in memory.

    A slice keeps the memory of the whole batch that it is a part of.
    """
    import pyarrow as pa

    if batch.get_total_buffer_size() <= 2 * batch.nbytes:
        return batch
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def _fits(rows: int, size: int) -> bool:
    return rows <= _MOST_ROWS and size <= _CHUNK_BYTES


def _one(batches: Sequence[Any]) -> Any:
    import pyarrow as pa

    if len(batches) == 1:
        return batches[0]
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined
