"""How slices become record batches: each row group read once, and no batch needlessly small."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.data import reader as reading
from hopsgpu.data import row_groups, shuffle
from hopsgpu.data.reader import CONCURRENT_FETCHES, LakeReader
from hopsgpu.data.row_groups import Fetcher, RowGroup
from hopsgpu.data.shard import Shard, Slice
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import read_source
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath
from hopsgpu.units import MIB

ROWS = 60_000


def shard_of(directory: Path, table: pa.Table, group: int) -> Shard:
    directory.mkdir(exist_ok=True)
    parquet.write_table(table, directory / "0.parquet", row_group_size=group)
    return plan_shards(read_source(LakePath(f"file://{directory}")), 1)[0]


def numbered(rows: int = ROWS) -> pa.Table:
    return pa.table({"id": pa.array(np.arange(rows))})


def reader_of(shard: Shard) -> LakeReader:
    return LakeReader(shard, shard.arrow_schema, 16 * MIB)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Slice]:
    """The slices for which a row group is fetched."""
    fetch, asked = Fetcher.fetch, []

    def noted(self: Fetcher, part: Slice) -> RowGroup:
        asked.append(part)
        return fetch(self, part)

    monkeypatch.setattr(Fetcher, "fetch", noted)
    return asked


def test_slices_of_a_row_group_are_read_in_one_pass(tmp_path: Path, fetched: list[Slice]) -> None:
    shard = shard_of(tmp_path / "lake", numbered(), 20_000)
    # Within a batch, over the end of one, next to each other, and from a second row group.
    parts = [(0, 5, 10), (0, 8_000, 9_000), (0, 17_000, 1), (0, 19_999, 1), (2, 0, 3), (1, 7, 2)]
    slices = [Slice(0, group, first, rows) for group, first, rows in parts]
    with reader_of(shard) as reader:
        (batch,) = reader.chunks(slices, CONCURRENT_FETCHES)
    wanted = [g * 20_000 + row for g, first, rows in parts for row in range(first, first + rows)]
    assert batch.column("id").to_pylist() == wanted
    assert sorted(part.group for part in fetched) == [0, 1, 2]  # by several threads


def test_rows_that_come_again_are_read_again(tmp_path: Path, fetched: list[Slice]) -> None:
    shard = shard_of(tmp_path / "lake", numbered(100), 100)
    slices = [Slice(0, 0, 0, 60), Slice(0, 0, 40, 60), Slice(0, 0, 0, 1)]
    with reader_of(shard) as reader:
        (batch,) = reader.chunks(slices, CONCURRENT_FETCHES)
    assert batch.column("id").to_pylist() == [*range(60), *range(40, 100), 0]
    assert len(fetched) == 3


@pytest.mark.parametrize("group", [100, 8_192, 20_000, 60_000])
def test_lists_as_spark_writes_them_come_in_large_record_batches(
    tmp_path: Path, group: int
) -> None:
    """A record batch costs the same whatever its size: of 8,192 rows a later epoch is slow."""
    values = np.arange(ROWS * 32, dtype=np.float32)
    lists = pa.ListArray.from_arrays(np.arange(ROWS + 1, dtype=np.int32) * 32, pa.array(values))
    shard = shard_of(tmp_path / "lake", pa.table({"x": lists}), group)
    with reader_of(shard) as reader:
        batches = list(reader.chunks(sorted(shard.slices), CONCURRENT_FETCHES))
    sizes = [batch.num_rows for batch in batches]
    assert sum(sizes) == ROWS and max(sizes) * 128 <= reading._CHUNK_BYTES
    assert len(sizes) <= 2 or group == 20_000  # of which three do not fit
    joined = pa.Table.from_batches(batches).column("x").combine_chunks()
    assert np.array_equal(joined.flatten().to_numpy(), values)


def test_a_few_rows_do_not_keep_what_they_were_decoded_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each of thirty steps of 256 KiB some rows are joined."""
    monkeypatch.setattr(reading, "_CHUNK_BYTES", MIB // 4)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(ROWS * 32, "f4")), 32)
    shard = shard_of(tmp_path / "lake", pa.table({"x": lists}), ROWS)
    combine, held = reading._combine, []

    def noted(batches: list[Any]) -> Any:
        held.append(sum(batch.get_total_buffer_size() for batch in batches))
        return combine(batches)

    monkeypatch.setattr(reading, "_combine", noted)
    slices = [Slice(0, 0, first, 10) for first in range(0, ROWS, 2_000)]
    with reader_of(shard) as reader:
        (batch,) = reader.chunks(slices, CONCURRENT_FETCHES)
    assert batch.num_rows == 300
    assert held[0] < 100_000


@pytest.mark.parametrize(("slices", "mixed", "most"), [(3, 1, 4), (1, 1, 4), (3, 4, 9)])
def test_so_many_row_groups_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slices: int, mixed: int, most: int
) -> None:
    # The file is small, and is to be read as a large one.
    for module in (reading, row_groups):
        monkeypatch.setattr(module, "SMALL_FILE_BYTES", 0)
    shard = shard_of(tmp_path / "lake", numbered(36_000), 1_000)
    held: weakref.WeakSet[Any] = weakref.WeakSet()
    fetch = Fetcher.fetch

    def noted(self: Fetcher, part: Slice) -> RowGroup:
        found = fetch(self, part)
        held.add(found)
        return found

    monkeypatch.setattr(Fetcher, "fetch", noted)
    monkeypatch.setattr(RowGroup, "__hash__", object.__hash__)
    monkeypatch.setattr(reading, "_MAX_ROWS", 500)
    pieces = [shard.slices[n : n + slices] for n in range(0, 36, slices)]
    peak = rows = 0
    with reader_of(shard) as reader:
        ahead = CONCURRENT_FETCHES if mixed == 1 else 1
        begun = (functools.partial(reader.chunks, piece, ahead) for piece in pieces)
        for batch in shuffle.interleave(begun, mixed):
            rows += batch.num_rows
            # What was asked for is there.
            reader._threads.submit(lambda: None).result()
            reader._threads.submit(lambda: None).result()
            peak = max(peak, len(held))
    assert rows == 36_000
    assert 2 <= peak <= most


def test_lists_are_decoded_in_one_step_where_a_row_group_has_few_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in small ones where it has so many that some rows might have them all."""
    bounded, steps = reading._limit_size, []

    def noted(batch: Any, schema: Any) -> Iterator[Any]:
        steps.append(batch.num_rows)
        return bounded(batch, schema)

    monkeypatch.setattr(reading, "_limit_size", noted)
    lengths = np.zeros(ROWS, np.int32)
    lengths[:3] = 500_000  # all that there is, 6 MB, is in three rows
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = pa.array(np.arange(offsets[-1], dtype=np.float32))
    table = pa.table({"x": pa.ListArray.from_arrays(pa.array(offsets), values)})
    shard = shard_of(tmp_path / "lake", table, ROWS)
    for most, many in ((reading._MAX_GROUP_BYTES, False), (5 * MIB, True)):
        steps.clear()
        monkeypatch.setattr(reading, "_MAX_GROUP_BYTES", most)
        with reader_of(shard) as reader:
            batches = list(reader.chunks(shard.slices, CONCURRENT_FETCHES))
        assert pa.Table.from_batches(batches) == table
        assert sum(steps) == ROWS and (len(steps) > 2) == many
        # Whatever was decoded at a time.
        assert all(
            batch.num_rows == 1 or batch.nbytes <= 1.1 * reading._CHUNK_BYTES for batch in batches
        )


def small_files(directory: Path, files: int, rows: int = 10, group: int = 10) -> Shard:
    """Files of numbered rows; returns one shard with all of them."""
    directory.mkdir()
    for number in range(files):
        table = numbered(files * rows).slice(number * rows, rows)
        parquet.write_table(table, directory / f"{number:03}.parquet", row_group_size=group)
    return plan_shards(read_source(LakePath(f"file://{directory}")), 1)[0]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs of small files, each time that one is read."""
    urls, read = [], LakePath.range

    def noted(lake: LakePath, start: int, end: int | None) -> bytes:
        urls.append(lake.url)
        return read(lake, start, end)

    monkeypatch.setattr(LakePath, "range", noted)
    return urls


def test_small_files_are_fetched_in_bundles_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    shard = small_files(tmp_path / "lake", 100)
    opened.clear()
    sizes = []

    def submit(call: Callable[[], deque[RowGroup]]) -> Future[deque[RowGroup]]:
        future = ThreadPoolExecutor.submit(reader._bundle_threads, call)
        sizes.append(len(future.result()))
        return future

    with reader_of(shard) as reader:
        monkeypatch.setattr(reader._bundle_threads, "submit", submit)
        (batch,) = reader.chunks(sorted(shard.slices), CONCURRENT_FETCHES)
    assert batch.column("id").to_pylist() == list(range(1000))
    assert sizes == [32, 32, 32, 4]
    assert len(opened) == len(set(opened)) == 100


def test_a_small_file_with_several_row_groups_is_read_once(
    tmp_path: Path, opened: list[str]
) -> None:
    shard = small_files(tmp_path / "lake", 3, rows=40)
    opened.clear()
    with reader_of(shard) as reader:
        (batch,) = reader.chunks(sorted(shard.slices), CONCURRENT_FETCHES)
    assert batch.column("id").to_pylist() == list(range(120))
    assert len(shard.slices) == 12 and len(opened) == 3


@pytest.mark.parametrize("limit", [0, 900, 2**30])
def test_small_and_large_files_are_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Of a table with both, whichever file is a small one."""
    for module in (reading, row_groups):
        monkeypatch.setattr(module, "SMALL_FILE_BYTES", limit)
    directory = tmp_path / "lake"
    directory.mkdir()
    first = 0
    for number, rows in enumerate([5, 2_000, 7, 8, 3_000, 1]):
        part = numbered(9_000).slice(first, rows)
        parquet.write_table(part, directory / f"{number}.parquet", row_group_size=1_000)
        first += rows
    shard = plan_shards(read_source(LakePath(f"file://{directory}")), 1)[0]
    sizes = [file.size for file in shard.files]
    assert limit != 900 or min(sizes) < limit < max(sizes)
    with reader_of(shard) as reader:
        batches = reader.chunks(sorted(shard.slices), CONCURRENT_FETCHES)
        ids = [value for batch in batches for value in batch.column("id").to_pylist()]
    assert ids == list(range(first))


def test_a_small_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    shard = small_files(tmp_path / "lake", 3)
    replaced = tmp_path / "lake" / "001.parquet"
    parquet.write_table(numbered(11), replaced)
    with (
        reader_of(shard) as reader,
        pytest.raises(StoreError, match=r"001\.parquet has changed since the launch"),
    ):
        list(reader.chunks(sorted(shard.slices), CONCURRENT_FETCHES))


@pytest.mark.parametrize(("length", "rows", "is_encoded"), [(10_000, ROWS, True), (100, 50, False)])
def test_repeated_strings_of_a_small_file_do_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, rows: int, is_encoded: bool
) -> None:
    """A string that the file stores once takes memory for each row: 600 MB, or 5 kB."""
    shard = shard_of(tmp_path / "lake", pa.table({"s": ["x" * length] * rows}), rows)
    assert shard.files[0].size < row_groups.SMALL_FILE_BYTES
    bounded, types = reading._limit_size, set()

    def noted(batch: Any, schema: Any) -> Iterator[Any]:
        types.add(batch.column("s").type)
        return bounded(batch, schema)

    monkeypatch.setattr(reading, "_limit_size", noted)
    with reader_of(shard) as reader:
        first = next(reader.chunks(shard.slices, CONCURRENT_FETCHES))
    assert first.nbytes <= reading._CHUNK_BYTES
    assert [pa.types.is_dictionary(kind) for kind in types] == [is_encoded]
