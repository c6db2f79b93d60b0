"""What a rank has in memory is bounded by what rows take there, and not by what files have."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.data import reader, shuffle, stream
from hopsgpu.data.batches import Block
from hopsgpu.data.cache import Cache
from hopsgpu.data.columns import select_columns
from hopsgpu.data.rank_data import RankData
from hopsgpu.data.shard import Shard
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.sizes import fixed_bytes, memory_of
from hopsgpu.data.source import read_source
from hopsgpu.data.stream import ShardStream
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS

ROWS = 3_000
CHUNK, WINDOW = 200_000, 800_000
LONG = [letter * 5_000 for letter in "abc"]


def texts(rows: int) -> list[str | None]:
    """Long strings of which there are three, with stretches of short ones."""
    return [
        None if n % 7 == 0 else LONG[n % 3][: 5_000 if n % 1000 < 800 else 3] for n in range(rows)
    ]


def dictionary_encoded(rows: int) -> pa.Table:
    return pa.table({"id": np.arange(rows), "c": texts(rows)})


def of_categories(rows: int) -> pa.Table:
    """As pandas writes them: the file says that Arrow is to have a dictionary."""
    return pa.table({"id": np.arange(rows), "c": pa.array(texts(rows)).dictionary_encode()})


def of_many_columns(rows: int) -> pa.Table:
    """None of whose strings is long."""
    words = [LONG[n % 3][:1_000] for n in range(rows)]
    columns = {f"c{number}": words for number in range(8)}
    return pa.table({"id": np.arange(rows), "c": words, **columns})


def short_strings(rows: int) -> pa.Table:
    """Each takes far more as an object of Python than in a file."""
    return pa.table({"id": np.arange(rows), "c": pa.array(["a", "b"] * (rows // 2))})


def lists_of_strings(rows: int) -> pa.Table:
    lists = [[] if n % 11 == 0 else [LONG[n % 3]] * (n % 3) for n in range(rows)]
    return pa.table({"id": np.arange(rows), "c": pa.array(lists, pa.list_(pa.string()))})


def compressible_lists(rows: int) -> pa.Table:
    """As Spark writes arrays; some rows have far more elements than others."""
    lists = [[1.5] * (2_000 if n % 1000 < 300 else 10) for n in range(rows)]
    return pa.table({"id": np.arange(rows), "c": pa.array(lists, pa.list_(pa.float64()))})


def compressible_numbers(rows: int) -> pa.Table:
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * 600)), 600)
    return pa.table({"id": np.arange(rows), "c": zeros})


TABLES = [
    dictionary_encoded,
    of_categories,
    of_many_columns,
    short_strings,
    lists_of_strings,
    compressible_lists,
    compressible_numbers,
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(reader, "_STEP_BYTES", CHUNK)
    monkeypatch.setattr(stream, "_BLOCK_BYTES", CHUNK)
    monkeypatch.setattr(shuffle, "_WINDOW_BYTES", WINDOW)


@pytest.fixture(params=TABLES, ids=lambda make: make.__name__)
def table(request: pytest.FixtureRequest) -> pa.Table:
    make: Callable[[int], pa.Table] = request.param
    return make(20 * ROWS if make is short_strings else ROWS)


def shard_of(table: pa.Table, directory: Path, **options: Any) -> Shard:
    directory.mkdir(exist_ok=True)
    half = table.num_rows // 2
    for number, part in enumerate((table[:half], table[half:])):
        parquet.write_table(part, directory / f"{number}.parquet", **options)
    return plan_shards(read_source(LakePath(f"file://{directory}")), 1)[0]


def in_memory(block: Block) -> int:
    """Bytes of a block's arrays, with the objects in them, each as often as it is there."""

    def of(array: np.ndarray[Any, Any]) -> int:
        if array.dtype != object:
            return array.nbytes
        return array.nbytes + sum(
            of(v) if isinstance(v, np.ndarray) else sys.getsizeof(v) for v in array
        )

    return sum(map(of, block.arrays.values()))


@pytest.fixture
def made(table: pa.Table, tmp_path: Path) -> Iterator[ShardStream]:
    shard = shard_of(table, tmp_path / "lake", row_group_size=700)
    (tmp_path / "kept").mkdir()
    with ShardStream(
        shard, Cache(tmp_path / "kept", 2**40), table.column_names, shard.arrow_schema
    ) as one:
        yield one


def test_blocks_have_few_bytes_in_memory(made: ShardStream, table: pa.Table) -> None:
    columns = select_columns(made._schema, None, {})
    for _ in ("from the lake", "from the disk"):
        blocks = list(made.blocks(columns))
        assert sum(block.rows for block in blocks) == table.num_rows
        assert max(map(in_memory, blocks)) <= CHUNK
        assert all(in_memory(block) <= block.size for block in blocks)


def held_in_memory(strips: Sequence[Sequence[Block]]) -> int:
    """Bytes of a window, with each object in it once."""
    seen: set[int] = set()

    def of(array: np.ndarray[Any, Any]) -> int:
        size = array.nbytes
        for value in array if array.dtype == object else ():
            if isinstance(value, np.ndarray):
                size += of(value)
            elif id(value) not in seen:
                seen.add(id(value))
                size += sys.getsizeof(value)
        return size

    return sum(of(array) for rows in strips for part in rows for array in part.arrays.values())


def test_windows_have_few_bytes_in_memory(
    made: ShardStream, table: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though their number of rows follows from the footers alone."""
    sizes: list[int] = []

    def noted(held: Iterable[Sequence[Sequence[Block]]], *others: Any) -> Iterator[Block]:
        for strips in held:
            sizes.append(held_in_memory(strips))
            yield Block({}, sum(part.rows for rows in strips for part in rows), 0, lambda: None)

    monkeypatch.setattr(stream, "shuffle_windows", noted)
    for _ in ("from the lake", "from the disk"):
        blocks = list(made.shuffled_blocks(select_columns(made._schema, None, {}), 1, 0, 64))
        assert sum(block.rows for block in blocks) == table.num_rows
    # Lists that are longer in some rows than on average may be in one window.
    assert max(sizes) <= WINDOW * (4 if "list<" in str(made._schema) else 1.5)


def test_no_step_of_decoding_is_larger(
    made: ShardStream, monkeypatch: pytest.MonkeyPatch, table: pa.Table
) -> None:
    limit_size, steps = reader._limit_size, []

    def noted(batch: Any, schema: Any) -> Iterator[Any]:
        steps.append(batch.nbytes)
        return limit_size(batch, schema)

    monkeypatch.setattr(reader, "_limit_size", noted)
    assert sum(chunk.batch.num_rows for chunk in made.chunks()) == table.num_rows
    # Rows with more elements than others are decoded before it is known.
    assert max(steps) <= CHUNK * (6 if "list<" in str(made._schema) else 1.2)


def test_the_order_does_not_depend_on_what_is_kept(table: pa.Table, tmp_path: Path) -> None:
    shard = shard_of(table, tmp_path / "lake", row_group_size=700)
    orders = []
    for budget in (0, 1_000_000, 2**40):
        with RankData(shard, tmp_path / str(budget), budget) as rank:
            batches = rank.batches(64, shuffle=True, seed=3, epochs=2)
            orders.append([int(n) for batch in batches for n in batch["id"]])
            batches = rank.batches(64, shuffle=True, seed=3, epochs=2)
            orders.append([int(n) for batch in batches for n in batch["id"]])
    assert sorted(orders[0][: table.num_rows]) == list(range(table.num_rows))
    assert all(order == orders[0] for order in orders)


def test_values_come_as_they_are(table: pa.Table, tmp_path: Path) -> None:
    shard = shard_of(table, tmp_path / "lake", row_group_size=700)
    with RankData(shard, tmp_path / "kept", 2**40) as rank:
        read = rank.to_arrow().sort_by("id")["c"]
    assert read.equals(table["c"].cast(read.type))


PEAK = """
import sys
from pathlib import Path
from hopsgpu.data.rank_data import RankData
from hopsgpu.data.shard import Shard

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

with RankData(Shard.load(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2])) as data:
    rows = 0
    for _ in data.batches(512, columns=["small"]):
        pass
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    for shuffle in (False, True):
        for batch in data.batches(512, ["x"], shuffle=shuffle, epochs=2):
            rows += len(batch["x"])
            batch["x"].sum() if batch["x"].dtype != object else None
    assert rows == 4 * data.num_rows
    print(status("VmHWM") - before)
"""


def vectors(rows: int) -> pa.Array:
    values = np.random.default_rng(0).random(rows * 256, dtype="f4")
    return pa.FixedSizeListArray.from_arrays(pa.array(values), 256)


def repeated(rows: int) -> pa.Array:
    words = pa.array([letter * 20_000 for letter in "abcdefgh"])
    return pa.DictionaryArray.from_arrays(np.arange(rows, dtype="i4") % 8, words)


@pytest.mark.parametrize(
    ("make", "rows", "groups"),
    [
        pytest.param(vectors, 20_000, 20, marks=pytest.mark.soak, id="row groups of 20 MB"),
        pytest.param(vectors, 200_000, 2, id="of 200 MB"),
        pytest.param(repeated, 20_000, 1, marks=pytest.mark.soak, id="400 MB of eight strings"),
    ],
)
def test_the_peak_is_bounded_whatever_the_size_of_the_shard(
    make: Callable[[int], pa.Array], rows: int, groups: int, tmp_path: Path
) -> None:
    """Of 400 MB, mapped pages included."""
    (tmp_path / "lake").mkdir()
    part = pa.table({"x": make(rows), "small": pa.array(np.zeros(rows, "i1"))})
    options: dict[str, Any] = {"compression": "none", "use_dictionary": make is repeated}
    with parquet.ParquetWriter(tmp_path / "lake" / "0.parquet", part.schema, **options) as writer:
        for _ in range(groups):
            writer.write_table(part, row_group_size=rows)
    shard = plan_shards(read_source(LakePath(f"file://{tmp_path}/lake")), 1)[0]
    (tmp_path / "shard").write_bytes(shard.dump())
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "shard", tmp_path / "kept"],
        check=True, timeout=HANG_SECONDS, stdout=subprocess.PIPE,
        env={**os.environ, "MIMALLOC_PURGE_DELAY": "0"},
    )  # fmt: skip
    assert int(ran.stdout) < 320 * 2**20, int(ran.stdout) / 2**20


MOMENTS = [
    datetime.datetime(1, 1, 1),
    datetime.datetime(1500, 1, 2, 3, 4, 5, 678_901),
    datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999),
    datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999),
    None,
]


def test_moments_that_nanoseconds_have_not_come_as_they_are(tmp_path: Path) -> None:
    """As Spark writes timestamps, as INT96."""
    moments = pa.array(MOMENTS, pa.timestamp("us"))
    lists = pa.array([[moment] for moment in MOMENTS], pa.list_(pa.timestamp("us")))
    table = pa.table({"t": moments, "l": lists})
    shard = shard_of(table, tmp_path / "lake", use_deprecated_int96_timestamps=True)
    stored = parquet.read_metadata(tmp_path / "lake" / "0.parquet").row_group(0)
    assert {stored.column(number).physical_type for number in range(2)} == {"INT96"}
    with RankData(shard, tmp_path / "kept", 2**40) as rank:
        for _ in ("from the lake", "from the disk"):
            (batch,) = rank.batches(9)
            assert batch["t"].dtype == np.dtype("M8[us]")
            assert sorted(map(str, batch["t"])) == sorted(map(str, moments.to_numpy(False)))
            assert [str(row[0]) for row in batch["l"]] == [str(one) for one in batch["t"]]


def test_a_column_may_have_a_dot_in_its_name(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2], "a.b": [3, 4], "c.d": ["x", "y"]})
    shard = shard_of(table, tmp_path / "lake")
    with RankData(shard, tmp_path / "kept", 2**40) as rank:
        for names in (["a"], ["a.b"], ["c.d"], ["c.d", "a"], None):
            (batch,) = rank.batches(2, names)
            chosen = table.select(names or table.column_names)
            assert {name: sorted(v.tolist()) for name, v in batch.items()} == chosen.to_pydict()


def test_what_is_said_of_a_row_is_what_it_takes(tmp_path: Path) -> None:
    table = pa.table(
        {
            "n": pa.array(np.zeros(ROWS)),
            "b": pa.array([True] * ROWS),
            "f": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(ROWS * 7, "i2")), 7),
            "l": pa.array([[1.0, 2.0]] * ROWS, pa.list_(pa.float32())),
        }
    )
    shard = shard_of(table, tmp_path / "lake")
    taken = [sum(memory_of(chunk) for chunk in column.chunks) for column in table.columns]
    assert shard.row_bytes == sum(taken) // ROWS
    assert [fixed_bytes(kind) for kind in table.schema.types] == [8, 1, 14, None]
