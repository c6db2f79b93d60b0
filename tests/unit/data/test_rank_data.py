"""A rank's batches: exact, in a known order, kept on the local disk, and ended with their loop."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.data import rank_data, reader, stream
from hopsgpu.data import shuffle as order
from hopsgpu.data.prefetch import PrefetchIterator
from hopsgpu.data.rank_data import RankData
from hopsgpu.data.row_groups import Fetcher
from hopsgpu.data.shard import Shard
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import read_source
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.unit.data.worlds import only_rank

ROWS = 3_010
# More than what any test here caches: the default depends on how full this machine's disk is.
BUDGET = 2**26

SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "x": pa.list_(pa.float32(), 4),
        "word": pa.string(),
        "ragged": pa.list_(pa.int64()),
    }
)


def table(first: int, rows: int) -> pa.Table:
    numbers = np.arange(first, first + rows)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 4).astype("f4")), 4)
    words = [f"row {n}" for n in numbers]
    ragged = [list(range(n % 3)) for n in numbers]
    return pa.table({"id": numbers, "x": lists, "word": words, "ragged": ragged}, SCHEMA)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> LakePath:
    directory = tmp_path_factory.mktemp("lake")
    (directory / "below").mkdir()
    for number, first in enumerate(range(0, ROWS, 1000)):
        part = table(first, min(1000, ROWS - first))
        target = directory / ("below" if number == 1 else "") / f"{number}.parquet"
        parquet.write_table(part, target, row_group_size=300)
    (directory / "_SUCCESS").touch()
    (directory / ".0.parquet.crc").touch()
    return LakePath(f"file://{directory}")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, windows and record batches of the size of the tests' data."""
    monkeypatch.setattr(order, "_PIECE_BYTES", 10_000)
    monkeypatch.setattr(reader, "_CHUNK_BYTES", 2_000)
    monkeypatch.setattr(order, "_WINDOW_BYTES", 20_000)


@pytest.fixture
def shards(lake: LakePath) -> tuple[Shard, ...]:
    return plan_shards(read_source(lake), 3, remainder="keep")


@pytest.fixture
def data(shards: tuple[Shard, ...], tmp_path: Path, small: None) -> Iterator[RankData]:
    with RankData(shards[0], tmp_path / "kept", BUDGET) as rank:
        yield rank


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = {thread for thread in threading.enumerate() if thread.name.startswith("hopsgpu-data")}
    for thread in left - before:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), thread


def ids(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in batch["id"]]


def test_footers_say_what_there_is(lake: LakePath) -> None:
    source = read_source(lake)
    assert [file.name for file in source.files] == [
        "0.parquet",
        "2.parquet",
        "3.parquet",
        "below/1.parquet",
    ]
    assert source.num_rows == ROWS
    assert source.files[0].groups == (300, 300, 300, 100)
    one = read_source(lake / "0.parquet")
    assert [(file.name, file.groups) for file in one.files] == [("", (300, 300, 300, 100))]


def test_sources_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    root = LakePath(f"file://{tmp_path}")
    with pytest.raises(StoreError, match="absent"):
        read_source(root / "absent")
    with pytest.raises(ConfigError, match="no Parquet file"):
        read_source(root)
    parquet.write_table(table(0, 0), tmp_path / "0.parquet")
    with pytest.raises(ConfigError, match="but no rows"):
        read_source(root)
    parquet.write_table(table(0, 0).drop_columns("x"), tmp_path / "1.parquet")
    with pytest.raises(ConfigError, match=r"1\.parquet .*\(x: fixed_size"):
        read_source(root)
    (tmp_path / "1.parquet").write_text("no Parquet")
    with pytest.raises(ConfigError, match=r"1\.parquet "):
        read_source(root)
    (tmp_path / "1.parquet").unlink()
    (tmp_path / "year=2024").mkdir()
    with pytest.raises(ConfigError, match=r"partitioned \(year=2024\)"):
        read_source(root)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [1, 7, 64, 1000, 5000])
def test_every_row_comes_once_in_batches_of_that_size(
    shards: tuple[Shard, ...], tmp_path: Path, small: None, shuffle: bool, size: int
) -> None:
    found: list[int] = []
    for number, shard in enumerate(shards):
        with RankData(shard, tmp_path / str(number), BUDGET) as rank:
            for _ in ("from the lake", "from the disk"):
                batches = list(rank.batches(size, shuffle=shuffle))
                lengths = [len(batch["id"]) for batch in batches]
                assert sum(lengths) == rank.num_rows
                assert set(lengths[:-1]) <= {size}
                for batch in batches:
                    assert (batch["x"] == batch["id"][:, None]).all()
                    assert batch["word"].tolist() == [f"row {n}" for n in batch["id"]]
                    assert [len(one) for one in batch["ragged"]] == [n % 3 for n in batch["id"]]
                    assert not any(array.flags.writeable for array in batch.values())
            found += ids(batches)
    assert sorted(found) == list(range(ROWS))


def test_epochs(data: RankData) -> None:
    once = ids(data.batches(100))
    assert ids(data.batches(100, epochs=3)) == once * 3
    lengths = [len(batch["id"]) for batch in data.batches(100, epochs=2, drop_remainder=True)]
    assert lengths == [100] * (2 * (data.num_rows // 100))
    ever = data.batches(100, epochs=None)
    per_epoch = -(-data.num_rows // 100)
    assert ids(itertools.islice(ever, 3 * per_epoch)) == once * 3


def test_the_order_is_decided_by_seed_and_epoch(data: RankData) -> None:
    first = ids(data.batches(64, shuffle=True, seed=1, epochs=2))
    assert ids(data.batches(64, shuffle=True, seed=1, epochs=2)) == first
    rows = data.num_rows
    assert first[:rows] != first[rows:]
    assert ids(data.batches(64, shuffle=True, seed=1, epoch=1)) == first[rows:]
    assert ids(data.batches(64, shuffle=True, seed=2)) != first[:rows]
    assert ids(data.batches(32, shuffle=True, seed=1)) == first[:rows]


def test_the_order_does_not_depend_on_what_is_kept(
    shards: tuple[Shard, ...], tmp_path: Path, small: None, data: RankData
) -> None:
    kept = [ids(data.batches(64, shuffle=True, epochs=2)) for _ in range(2)]
    with RankData(shards[0], tmp_path / "none", budget=0) as other:
        assert [ids(other.batches(64, shuffle=True, epochs=2)) for _ in range(2)] == kept


def test_a_shuffled_batch_has_rows_of_several_row_groups(tmp_path: Path, small: None) -> None:
    parquet.write_table(table(0, 4000), tmp_path / "0.parquet", row_group_size=500)
    with only_rank(tmp_path, tmp_path / "kept", BUDGET) as rank:
        for batch in rank.batches(64, shuffle=True):
            assert len(set(batch["id"] // 500)) > 1 or len(batch["id"]) < 64


def test_the_second_epoch_touches_no_lake(data: RankData, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ids(data.batches(100))

    def unreachable(*_: object) -> None:
        raise StoreError("the lake was asked")

    monkeypatch.setattr(Fetcher, "fetch", unreachable)
    assert ids(data.batches(100)) == first
    assert ids(data.batches(100, columns=["x", "ragged", "id", "word"])) == first
    with pytest.raises(StoreError, match="the lake was asked"):
        ids(data.batches(100, columns=["id"]))


def used(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def test_cached_rows_stay_within_the_budget(
    shards: tuple[Shard, ...], tmp_path: Path, small: None
) -> None:
    with RankData(shards[0], tmp_path / "all", BUDGET) as whole:
        expected = ids(whole.batches(64))
        needed = used(tmp_path / "all")
    for share in (0.0, 0.5):
        budget = int(needed * share)
        with RankData(shards[0], tmp_path / "some", budget) as rank:
            for _ in range(3):
                assert ids(rank.batches(64)) == expected
            assert used(tmp_path / "some") <= budget
            assert bool(used(tmp_path / "some")) == bool(share)


def test_nothing_is_left_on_the_disk(shards: tuple[Shard, ...], tmp_path: Path) -> None:
    with RankData(shards[0], tmp_path / "kept", BUDGET) as rank:
        assert ids(rank.batches(64))
        kept = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
        assert kept
        assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    assert list((tmp_path / "kept").iterdir()) == []


def test_reading_after_the_exit_makes_no_file(
    shards: tuple[Shard, ...], tmp_path: Path, small: None
) -> None:
    rank = RankData(shards[0], tmp_path / "kept", BUDGET)
    batches = rank.batches(16)
    first = next(batches)
    rank.close()
    assert len(ids([first])) + len(ids(batches)) == rank.num_rows
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_loop_that_is_left_ends_the_threads_and_keeps_no_half(
    data: RankData, tmp_path: Path
) -> None:
    expected = ids(data.batches(64, epoch=0, columns=["id", "word"]))
    for _ in data.batches(8):
        break
    with pytest.raises(ZeroDivisionError):
        for _ in data.batches(8, epochs=None):
            raise ZeroDivisionError
    assert [t for t in threading.enumerate() if t.name.startswith("hopsgpu-data")] == []
    assert list((tmp_path / "kept").rglob(".*")) == []
    assert ids(data.batches(64)) == expected


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("hopsgpu-data")]


def test_views_of_the_disk_need_no_thread(data: RankData, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(data.batches(64, ["id", "x"]))
    began = 0
    batches = data.batches(64, ["id", "x"], epochs=2)
    rows = 0
    for batch in batches:
        assert not threads()
        rows += len(batch["id"])
        assert (batch["x"] == batch["id"][:, None]).all()
        assert batch["id"].tolist() == expected[began : began + len(batch["id"])]
        began = (began + len(batch["id"])) % data.num_rows
        assert not any(array.flags.writeable for array in batch.values())
    assert rows == 2 * data.num_rows
    begun: list[PrefetchIterator[Any]] = []

    def begin(*given: Any) -> PrefetchIterator[Any]:
        begun.append(PrefetchIterator(*given))
        return begun[-1]

    monkeypatch.setattr(rank_data, "PrefetchIterator", begin)
    next(data.batches(64, ["id", "x"]))
    assert not begun
    # There is work to be done ahead, which may have been done since.
    next(data.batches(64, ["id", "x"], shuffle=True))
    assert len(begun) == 1
    next(data.batches(64, ["word"]))
    assert len(begun) == 2


def test_a_loop_goes_on_without_a_thread_when_all_is_on_the_disk(data: RankData) -> None:
    batches = data.batches(64, ["id"], epochs=3)
    per_epoch = -(-data.num_rows // 64)
    first = ids(itertools.islice(batches, per_epoch))
    assert ids(itertools.islice(batches, 1)) == first[:64]
    assert not threads()
    assert ids(batches) == [*first, *first][64:]


def test_rows_that_are_gone_from_the_disk_come_from_the_lake(data: RankData) -> None:
    expected = ids(data.batches(16, ["id"]))
    batches = data.batches(16, ["id"])
    first = ids([next(batches)])
    assert not threads()
    data.close()
    assert first + ids(batches) == expected


def test_lists_of_another_length_are_refused_in_every_epoch(tmp_path: Path) -> None:
    lists = pa.array([[1.0, 2.0], [3.0, 4.0], [5.0]], pa.list_(pa.float32()))
    parquet.write_table(pa.table({"c": lists}), tmp_path / "0.parquet")
    with only_rank(tmp_path, tmp_path / "kept", BUDGET) as rank:
        assert sum(len(batch["c"]) for batch in rank.batches(2)) == 3
        for shuffle in (False, True, False):
            with pytest.raises(ConfigError, match="list of 1"):
                list(rank.batches(2, shuffle=shuffle, shapes={"c": (2,)}))


def test_lists_that_fit_one_shape_are_refused_for_another(tmp_path: Path) -> None:
    lists = pa.array([[1.0, 2.0, 3.0, 4.0]] * 6, pa.list_(pa.float32()))
    parquet.write_table(pa.table({"c": lists}), tmp_path / "0.parquet")
    with only_rank(tmp_path, tmp_path / "kept", BUDGET) as rank:
        for shape in ((4,), (2, 2), (4,)):
            found = [batch["c"].shape for batch in rank.batches(3, shapes={"c": shape}, epochs=2)]
            assert found == [(3, *shape)] * 4
        with pytest.raises(ConfigError, match="list of 4"):
            list(rank.batches(3, shapes={"c": (3,)}))


def test_iterators_at_the_same_time(data: RankData) -> None:
    expected = ids(data.batches(64))
    both = zip(data.batches(64, columns=["id"]), data.batches(64, columns=["id"]), strict=True)
    assert all((one["id"] == other["id"]).all() for one, other in both)
    assert ids(data.batches(64, columns=["id"])) == expected


def test_data_that_changes_meanwhile_is_found_out(tmp_path: Path) -> None:
    parquet.write_table(table(0, 500), tmp_path / "0.parquet")
    shard = plan_shards(read_source(LakePath(f"file://{tmp_path}")), 1)[0]
    parquet.write_table(table(0, 900), tmp_path / "0.parquet")
    with (
        RankData(shard, tmp_path / "kept", BUDGET) as rank,
        pytest.raises(StoreError, match=r"0\.parquet has changed"),
    ):
        ids(rank.batches(64))


def test_a_row_group_that_is_large_is_read_in_parts(
    data: RankData, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids(data.batches(64))
    monkeypatch.setattr(stream, "_FETCHED_BYTES", 0)
    assert sorted(ids(data.batches(64, columns=["id"]))) == sorted(expected)


def test_columns_that_parquet_dictionary_encodes(tmp_path: Path) -> None:
    values = pa.array(["a", "b", "a"]).dictionary_encode()
    parquet.write_table(pa.table({"c": values}), tmp_path / "0.parquet")
    with only_rank(tmp_path, tmp_path / "kept", BUDGET) as rank:
        assert rank.schema.field("c").type == pa.string()
        for _ in range(2):
            assert [batch["c"].tolist() for batch in rank.batches(3)] == [["a", "b", "a"]]


def test_as_an_arrow_table(data: RankData) -> None:
    found = data.to_arrow(["word", "id"])
    assert found.column_names == ["word", "id"]
    assert found.column("id").to_pylist() == ids(data.batches(64))
    assert data.to_arrow().schema == data.schema
    wrong: list[Any] = [["y"], [], "xy", ["id", "id"]]
    for columns in wrong:
        with pytest.raises(ConfigError, match="^columns=.*: .*names"):
            data.to_arrow(columns)


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"batch_size": 2.5}, {"batch_size": True}, {"epochs": 0}, {"seed": -1}],
)
def test_arguments_that_cannot_work_are_refused_at_once(data: RankData, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        data.batches(**{"batch_size": 8, **wrong})


def test_ahead_raises_what_making_an_item_raised() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("here")

    ahead = PrefetchIterator(items, 2)
    assert next(ahead) == 1
    with pytest.raises(ZeroDivisionError, match="here"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


class Waits:
    """Counts how often a reader waited."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.waiting = threading.Event()

    def __enter__(self) -> None:
        self.begun += 1
        self.waiting.set()

    def __exit__(self, *problem: object) -> None:
        self.ended += 1


def test_a_wait_counts_only_where_nothing_is_ready() -> None:
    waits, made = Waits(), threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(3):
            yield number
            made.release()
        # Once the reader waits for it.
        assert waits.waiting.wait(HANG_SECONDS)
        yield 3

    ahead = PrefetchIterator(items, 4, waits)
    for _ in range(3):
        assert made.acquire(timeout=HANG_SECONDS)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    assert (waits.begun, waits.ended) == (0, 0)
    assert next(ahead) == 3
    assert (waits.begun, waits.ended) == (1, 1)


@pytest.mark.parametrize("how", ["batches", "torch", "tensorflow"])
def test_the_training_waits_for_the_first_rows(
    shards: tuple[Shard, ...], tmp_path: Path, how: str
) -> None:
    waits = Waits()
    with RankData(shards[0], tmp_path / "kept", BUDGET, waiting=waits) as data:
        batches = getattr(data, how)(100, ["id"])
        assert len(ids(batches)) == data.num_rows
    assert waits.begun == waits.ended >= 1


def test_a_table_is_waited_for(shards: tuple[Shard, ...], tmp_path: Path) -> None:
    waits = Waits()
    with RankData(shards[0], tmp_path / "kept", BUDGET, waiting=waits) as data:
        assert data.to_arrow(["id"]).num_rows == data.num_rows
    assert (waits.begun, waits.ended) == (1, 1)


def test_ahead_is_bounded_and_ends_when_it_is_let_go_of() -> None:
    made: list[int] = []
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            for number in itertools.count():
                made.append(number)
                yield number
        finally:
            ended.set()

    ahead = PrefetchIterator(items, 3)
    assert [next(ahead) for _ in range(2)] == [0, 1]
    del ahead
    assert ended.wait(HANG_SECONDS)
    assert len(made) <= 2 + 3 + 1


def test_columns_with_nothing_in_them_are_kept_as_others(tmp_path: Path) -> None:
    """Of all others' buffers some are empty, and those are in no file."""
    (tmp_path / "lake").mkdir()
    nothing = pa.nulls(5)
    table = pa.table({"t": nothing.cast(pa.string()), "n": nothing, "i": pa.array(range(5))})
    parquet.write_table(table, tmp_path / "lake" / "0.parquet")
    shard = plan_shards(read_source(LakePath(f"file://{tmp_path}/lake")), 1)[0]
    with RankData(shard, tmp_path / "kept", BUDGET) as data:
        for columns in (["t", "n", "i"], ["t"], ["n"]):
            for _ in ("from the lake", "from the disk"):
                assert data.to_arrow(columns) == table.select(columns)
        for batch in data.batches(2, ["t", "i"], shuffle=True, epochs=3):
            assert not any(batch["t"])


def test_columns_that_can_have_no_null_are_kept_as_others(tmp_path: Path) -> None:
    """As Spark writes the column of `range()`."""
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False, metadata={"a": "b"})])
    parquet.write_table(pa.table({"n": range(10)}, schema), tmp_path / "n.parquet")
    with only_rank(tmp_path, tmp_path / "kept", BUDGET) as rank:
        read = [int(n) for batch in rank.batches(4, epochs=2) for n in batch["n"]]
    assert read == [*range(10)] * 2
