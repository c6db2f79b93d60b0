"""What `data=` takes, what of it travels to each rank, and how ranks share a disk."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.data.argument import Data, Datasets, datasets_of, url_of
from hopsgpu.data.rank_shards import RankShards, open_datasets, split_budget
from hopsgpu.data.shard import Shard, ShardFile, Slice
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import ParquetSource, SourceFile, columns_of, read_source
from hopsgpu.errors import Cancelled, ConfigError, StoreError
from hopsgpu.launcher import data_staging
from hopsgpu.storage.lake import LakePath

FILES = "hdfs://nn:8020"


class Frame:
    """Stands for a DataFrame."""


def given(data: Any) -> Datasets:
    found = datasets_of(data, lambda value: isinstance(value, Frame))
    assert found is not None
    return found


def test_no_data() -> None:
    assert datasets_of(None, lambda _: False) is None


def test_frame_is_written_below_the_run() -> None:
    datasets = given(Frame())
    assert datasets.is_single and datasets.label("data") == "data"
    assert [name for name, _ in datasets.frames] == ["data"] and not [*datasets.paths]
    assert datasets.places("hdfs://nn:8020/runs/r", FILES) == {
        "data": "hdfs://nn:8020/runs/r/data/data"
    }


def test_a_dict_mixes_frames_and_paths_in_its_order() -> None:
    datasets = given({"train": Data(Frame(), "keep", 3), "test": PurePosixPath("/lake/test")})
    assert not datasets.is_single and datasets.label("test") == "data.test"
    assert list(datasets.places("hdfs://nn:8020/runs/r", FILES).items()) == [
        ("train", "hdfs://nn:8020/runs/r/data/train"),
        ("test", "hdfs://nn:8020/lake/test"),
    ]
    assert (datasets.named["train"].remainder, datasets.named["train"].seed) == ("keep", 3)
    assert (datasets.named["test"].remainder, datasets.named["test"].seed) == ("drop", 0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (3, "data=3"),
        (b"/x", "data=b'/x'"),
        ("", "data=''"),
        ({}, "data={}"),
        ({"a": [1]}, r"data\['a'\]=\[1\]"),
        ({"../a": "/x"}, "a name in data='../a'"),
        ({1: "/x"}, "a name in data=1"),
        (Data(Data("/x")), "a Spark DataFrame"),
    ],
)
def test_other_data_is_refused(data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        given(data)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"remainder": "half"}, "remainder='half'"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": True}, "seed=True"),
    ],
)
def test_data_is_checked_where_it_is_made(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Data("/x", **arguments)


@pytest.mark.parametrize(
    ("path", "files", "url"),
    [
        ("/lake/x", FILES, "hdfs://nn:8020/lake/x"),
        ("/lake/x/", f"{FILES}/", "hdfs://nn:8020/lake/x"),
        ("hdfs:///lake/x", FILES, "hdfs://nn:8020/lake/x"),
        ("hdfs://other/lake/x", FILES, "hdfs://other/lake/x"),
        ("hdfs:/lake/x", FILES, "hdfs://nn:8020/lake/x"),
        ("file:///x", FILES, "file:///x"),
        ("file:/x", FILES, "file:///x"),
        ("file:/x", None, "file:///x"),
        ("/x", None, "file:///x"),
        ("/x", "file:///", "file:///x"),
    ],
)
def test_paths_are_on_the_default_file_system(path: str, files: str | None, url: str) -> None:
    assert url_of(path, files) == url


@pytest.mark.parametrize("path", ["lake/x", "oss://bucket/x", "s3a:/x", "hdfs:x", "/x#y"])
def test_data_that_cannot_be_read_in_place_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="DataFrame"):
        url_of(path, FILES)


@pytest.mark.parametrize("path", ["hdfs:/x/y", "hdfs:///x/y"])
@pytest.mark.parametrize("files", [None, "file:///", "viewfs://cluster"])
def test_a_url_that_names_no_file_system_is_of_the_default_one_alone(
    path: str, files: str | None
) -> None:
    with pytest.raises(ConfigError, match="hdfs://<name>/x/y"):
        url_of(path, files)


def source(*rows: int, groups: int = 1) -> ParquetSource:
    files = tuple(
        SourceFile(f"part-{n:05}.parquet", 1000, (r,) * groups) for n, r in enumerate(rows)
    )
    return ParquetSource(
        "hdfs://nn/x", files, 8, pa.schema({"n": pa.int64()}).serialize().to_pybytes()
    )


def rows_of(serialized: bytes, name: str = "data") -> int:
    return RankShards.load(serialized).shards[name].num_rows


def test_each_rank_is_dealt_its_shard_of_all_data() -> None:
    datasets = given({"train": Data("/x", "keep"), "test": "/y"})
    serialized = data_staging.serialized_shards(
        datasets, {"train": source(5, 6), "test": source(7)}, 2
    )
    assert sorted(rows_of(d, "train") for d in serialized) == [5, 6]
    assert [rows_of(d, "test") for d in serialized] == [3, 3]
    assert not RankShards.load(serialized[0]).is_single
    assert RankShards.load(
        data_staging.serialized_shards(given("/x"), {"data": source(5)}, 1)[0]
    ).is_single


def test_fewer_rows_than_ranks_names_the_data() -> None:
    with pytest.raises(ConfigError, match=r"data\.test \(hdfs://nn/x\): 2 .* 3 "):
        data_staging.serialized_shards(given({"test": "/y"}), {"test": source(2)}, 3)


def test_a_plan_of_many_row_groups_is_small_and_of_too_many_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = source(*[100] * 5_000, groups=2)
    serialized = data_staging.serialized_shards(given("/x"), {"data": many}, 4)
    assert sum(map(rows_of, serialized)) == 1_000_000
    # JSON is tens of bytes for each row group and each file.
    assert sum(map(len, serialized)) < 20 * 10_000
    monkeypatch.setattr(data_staging, "MAX_SHARD_BYTES", 1000)
    with pytest.raises(ConfigError, match="10000 row groups"):
        data_staging.serialized_shards(given("/x"), {"data": many}, 4)


def test_serialized_shards_are_complete_or_refused() -> None:
    shard = Shard("file:///x", (ShardFile("a", 9),), (Slice(0, 1, 2, 3),), 8, b"schema")
    serialized = RankShards({"a": shard, "b": shard}, is_single=False)
    assert RankShards.load(serialized.dump()) == serialized
    for damaged in (b"", b"x", serialized.dump()[:-9]):
        with pytest.raises(StoreError, match="another version"):
            RankShards.load(damaged)


def test_data_shares_the_disk_by_its_size() -> None:
    assert split_budget(100, [30, 10]) == [75, 25]
    assert split_budget(100, [0]) == [0]


def test_the_ranks_of_a_node_share_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def budget(directory: Path, ranks: int) -> int:
        asked.append(ranks)
        return 1000

    monkeypatch.setattr("hopsgpu.data.rank_shards.default_budget", budget)
    parquet.write_table(pa.table({"n": range(6)}), tmp_path / "n.parquet")
    (shard,) = plan_shards(read_source(LakePath(f"file://{tmp_path}/n.parquet")), 1)
    alone = open_datasets(RankShards({"data": shard}, is_single=True), tmp_path / "kept", 3).view
    assert not isinstance(alone, dict) and alone.to_arrow()["n"].to_pylist() == [*range(6)]
    named = open_datasets(
        RankShards({"a": shard, "b": shard}, is_single=False), tmp_path / "kept", 3
    ).view
    assert isinstance(named, dict) and list(named) == ["a", "b"] and asked == [3, 3]


def test_reading_of_footers_is_shown_and_can_be_cancelled(tmp_path: Path) -> None:
    for number in range(3):
        parquet.write_table(pa.table({"n": [number]}), tmp_path / f"{number}.parquet")
    seen = []
    found = read_source(
        LakePath(f"file://{tmp_path}"), lambda done, files: seen.append((done, files))
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert found.num_bytes == sum(p.stat().st_size for p in tmp_path.iterdir())
    assert columns_of(found) == {"n": "int64"}

    def give_up(done: int, files: int) -> None:
        raise Cancelled("enough")

    with pytest.raises(Cancelled, match="enough"):
        read_source(LakePath(f"file://{tmp_path}"), give_up)
