"""Which files are read as one table, and which directories are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.data.shard import Shard
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.shuffle import window_rows
from hopsgpu.data.source import read_source
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake import LakePath
from tests.unit.data.worlds import only_rank


def write(directory: Path, name: str, columns: Any, **options: Any) -> None:
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), directory / name, **options)


def plain(value: Any) -> Any:
    return [plain(one) for one in value] if isinstance(value, (list, np.ndarray)) else value


def required(kind: Any) -> Any:
    return pa.field("item", kind, nullable=False)


ENCODED = pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize(
    ("values", "one", "other"),
    [
        ([[1.0], [], [2.0, 3.0]], pa.list_(pa.float32()), pa.list_(required(pa.float32()))),
        ([[1.0], [], [2.0, 3.0]], pa.list_(pa.float32()), pa.large_list(required(pa.float32()))),
        ([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2), pa.list_(required(pa.float32()), 2)),
        (
            [[[1.0, 2.0]], [], [[3.0, 4.0]]],
            pa.list_(pa.list_(pa.float32(), 2)),
            pa.list_(required(pa.list_(required(pa.float32()), 2))),
        ),
        (["a", None, "ü"], pa.string(), pa.large_string()),
        ([b"a", None, b"\xff"], pa.binary(), pa.large_binary()),
        (["a", None, "ü"], pa.string(), ENCODED),
        ([["a", None], [], ["ü", "a"]], pa.list_(pa.string()), pa.list_(pa.large_string())),
        ([["a", None], [], ["ü", "a"]], pa.list_(pa.string()), pa.large_list(ENCODED)),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_files_of_several_writers_are_one_table(
    tmp_path: Path, values: list[Any], one: Any, other: Any, last: bool
) -> None:
    lake = tmp_path / "lake"
    number = pa.array(range(30))
    for name, kind in (("0", one), ("1", other)):
        rows = pa.array(values * 10, kind)
        options = {"row_group_size": 7, "use_compliant_nested_type": name == "0"}
        write(lake, name if last else f"{1 - int(name)}", {"c": rows, "n": number}, **options)
    with only_rank(lake, tmp_path / "kept") as rank:
        for shuffle in (False, True):
            for _ in ("from the lake", "from the disk"):
                found = [
                    (int(n), plain(c))
                    for batch in rank.batches(4, shuffle=shuffle)
                    for n, c in zip(batch["n"], batch["c"], strict=True)
                ]
                assert len(found) == 60
                assert all(c == values[n % 3] for n, c in found)
        assert sorted(rank.to_arrow()["n"].to_pylist()) == sorted([*range(30)] * 2)


def test_structs_and_maps_of_several_writers_are_one_table(tmp_path: Path) -> None:
    """No rank has batches of these; they are no reason to refuse the other columns."""
    text, large = pa.string(), pa.large_string()
    values = {"s": [{"a": "x", "b": ["y"]}], "m": [[("k", "v")]]}
    of_one = {"s": pa.struct({"a": text, "b": pa.list_(text)}), "m": pa.map_(text, text)}
    of_other = {
        "s": pa.struct([required(large).with_name("a"), pa.field("b", pa.list_(large))]),
        "m": pa.map_(large, required(large)),
    }
    for name, kinds in (("0", of_one), ("1", of_other)):
        columns = {key: pa.array(values[key], kind) for key, kind in kinds.items()}
        write(tmp_path, name, {**columns, "n": [int(name)]})
    with only_rank(tmp_path) as rank:
        assert sorted(int(n) for batch in rank.batches(1, ["n"]) for n in batch["n"]) == [0, 1]
        found = rank.to_arrow()
        assert [found[name].to_pylist() for name in values] == [2 * v for v in values.values()]


def test_reading_of_the_footers_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hopsgpu.data")
    write(tmp_path, "0", {"a": pa.array([1, 2, 3])})
    read_source(LakePath(f"file://{tmp_path}"))
    (message,) = caplog.messages
    assert f"file://{tmp_path} " in message and " 3 rows in 1 " in message


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "0", {"a": [1], "b": [2.0]})
    write(tmp_path, "1", {"b": [2.0], "a": [1]})
    with pytest.raises(ConfigError, match="0 and 1 .*order"):
        read_source(LakePath(f"file://{tmp_path}"))


@pytest.mark.parametrize("shape", [None, (3, 2)])
def test_tensors_of_pyarrow(tmp_path: Path, shape: Any) -> None:
    values = np.arange(60, dtype="f4").reshape(10, 2, 3)
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    write(tmp_path / "lake", "0.parquet", {"x": array}, row_group_size=4)
    shapes = {"x": shape} if shape else None
    with only_rank(tmp_path / "lake", tmp_path / "kept") as rank:
        for _ in ("from the lake", "from the disk"):
            found = np.concatenate([batch["x"] for batch in rank.batches(3, shapes=shapes)])
            assert found.shape == (10, *(shape or (2, 3)))
            by_row = found.reshape(10, 6)
            assert (by_row[by_row[:, 0].argsort()] == values.reshape(10, 6)).all()


def test_columns_of_one_name_can_be_left_out(tmp_path: Path) -> None:
    two = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["a", "a", "b"])
    write(tmp_path / "lake", "0", two)
    with only_rank(tmp_path / "lake", tmp_path / "kept") as rank:
        for asked in (rank.to_arrow, lambda: rank.batches(1)):
            with pytest.raises(ConfigError, match=": a, a, b"):
                asked()
        assert rank.to_arrow(["b"]).to_pydict() == {"b": [3]}


MARKS = {
    "_delta_log/00000000000000000000.json": "Delta Lake",
    ".hoodie/hoodie.properties": "Hudi",
    "metadata/v1.metadata.json": "Iceberg",
    "metadata/v1.metadata.json.gz": "Iceberg",
    "_spark_metadata/0": "a streaming query of Spark",
    "snapshot/snapshot-1": "Paimon",
    "base_0000002/000000_0": "transactional Hive",
    "delta_0000001_0000001/000000_0": "transactional Hive",
    "delta_0000001_0000001_0000/000000_0": "transactional Hive",
    "delete_delta_0000003_0000003_0000/bucket_00000": "transactional Hive",
    "base_0000005_v0000017/000000_0": "transactional Hive",
}


def touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(
    "named",
    ["", "table", "table/data", "table/data/below", "table/data/0.parquet", "link", "link/below"],
)
def test_no_part_of_a_table_with_a_transaction_log_is_read_in_place(
    tmp_path: Path, mark: str, named: str
) -> None:
    """The table's directory, the directories above and below, its files, and links to them."""
    write(tmp_path / "lake", "table/data/0.parquet", {"a": [1]})
    write(tmp_path / "lake", "table/data/below/1.parquet", {"a": [1]})
    (tmp_path / "lake/link").symlink_to(tmp_path / "lake/table/data")
    touch(tmp_path / "lake/table" / mark)
    with pytest.raises(ConfigError, match="transaction log") as raised:
        read_source(LakePath(f"file://{tmp_path}/lake/{named}".rstrip("/")))
    assert f"({MARKS[mark]}, file://{tmp_path}/lake/table/" in str(raised.value)


@pytest.mark.parametrize(
    ("mark", "named", "code"),
    [
        ("_delta_log/0.json", "", 'format("delta").load("URL")'),
        (
            "_delta_log/0.json",
            "day=2024-01-01/hour=__HIVE_DEFAULT_PARTITION__",
            'format("delta").load("URL").where("`day` = \'2024-01-01\' AND `hour` IS NULL")',
        ),
        (
            "_spark_metadata/0",
            "who=it%27s",
            'spark.read.parquet("URL").where("`who` = \'it\\\\\'s\'")',
        ),
        (".hoodie/hoodie.properties", "eu", 'load("URL").where("<rows of eu>")'),
        ("metadata/v2.metadata.json", "data", 'format("iceberg").load("URL")'),
        (
            "metadata/v2.metadata.json",
            "data/ts_day=2024-01-01",
            'load("URL").where("<rows of ts_day=2024-01-01>")',
        ),
        ("base_0000002/000000_0", "base_0000002", "INSERT OVERWRITE DIRECTORY '<directory>'"),
    ],
)
def test_the_refusal_has_the_code_that_reads_the_table(
    tmp_path: Path, mark: str, named: str, code: str
) -> None:
    root = f"file://{tmp_path}/table"
    write(tmp_path / "table" / named, "0.parquet", {"a": [1]})
    touch(tmp_path / "table" / mark)
    with pytest.raises(ConfigError) as raised:
        read_source(LakePath(f"{root}/{named}".rstrip("/")))
    assert code.replace("URL", root) in str(raised.value)


def test_a_partition_without_its_table_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "eu/0.parquet", {"a": [1]})
    touch(tmp_path / "eu/.hoodie_partition_metadata")
    with pytest.raises(ConfigError, match=r'format\("hudi"\)\.load'):
        read_source(LakePath(f"file://{tmp_path}/eu"))


def test_a_partitioned_transactional_table_is_not_advised_to_spark(tmp_path: Path) -> None:
    """Spark would read all of its `base_N` and `delta_N_M` directories."""
    write(tmp_path, "day=1/hour=2/base_0000002/000000_0", {"a": [1]})
    with pytest.raises(ConfigError, match=r"\(transactional Hive, .*INSERT OVERWRITE"):
        read_source(LakePath(f"file://{tmp_path}"))


@pytest.mark.parametrize("name", ["base_1", "delta_3_4", "delete_delta_5_5_0"])
def test_names_without_padding_are_marks_in_the_data(tmp_path: Path, name: str) -> None:
    write(tmp_path, f"table/{name}/0", {"a": [1]})
    for named in ("table", f"table/{name}", f"table/{name}/0"):
        with pytest.raises(ConfigError, match=r"\(transactional Hive, "):
            read_source(LakePath(f"file://{tmp_path}/{named}"))


def test_files_that_iceberg_wrote_are_refused_wherever_they_are(tmp_path: Path) -> None:
    """A table's `write.data.path` may be far from its metadata."""
    rows = pa.table({"a": [1]})
    table = rows.replace_schema_metadata({"iceberg.schema": "{}"})
    parquet.write_table(table, tmp_path / "0.parquet")
    with pytest.raises(ConfigError, match=r"\(Iceberg, .*0\.parquet"):
        read_source(LakePath(f"file://{tmp_path}"))


@pytest.mark.parametrize(
    "beside",
    [
        "metadata/readme.txt",
        "v1.metadata.json",
        "snapshot/latest.txt",
        "metadata",
        "base_models",
        "delta_of_a/x",
        "base_1.txt",
        "base_1/0.parquet",
        "delta_3_4/0.parquet",
    ],
)
def test_names_that_only_resemble_marks_are_no_marks(tmp_path: Path, beside: str) -> None:
    write(tmp_path, "data/0.parquet", {"a": [1]})
    touch(tmp_path / beside)
    assert read_source(LakePath(f"file://{tmp_path}/data")).num_rows == 1


def test_files_that_spark_skips_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, "0.parquet", {"a": [1, 2]})
    write(tmp_path, "0.parquet._COPYING_", {"a": [1, 2]})
    (tmp_path / "1.parquet._COPYING_").write_bytes(b"PAR1half")
    (tmp_path / "2.parquet").touch()
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".0.parquet.crc").write_bytes(b"crc")
    source = read_source(LakePath(f"file://{tmp_path}"))
    assert [file.name for file in source.files] == ["0.parquet"]
    with pytest.raises(ConfigError, match="still being copied"):
        read_source(LakePath(f"file://{tmp_path}/1.parquet._COPYING_"))
    with pytest.raises(ConfigError, match="is empty"):
        read_source(LakePath(f"file://{tmp_path}/2.parquet"))
    (tmp_path / "0.parquet").unlink()
    with pytest.raises(ConfigError, match="no Parquet file"):
        read_source(LakePath(f"file://{tmp_path}"))


@pytest.mark.parametrize("name", ["a#b.parquet", "a;b/0.parquet", "below/a?.parquet"])
def test_invalid_file_names_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, {"a": [1]})
    with pytest.raises(ConfigError, match="contains '.*rename"):
        read_source(LakePath(f"file://{tmp_path}"))


def test_files_of_equal_paths_and_other_groups_are_not_alike(tmp_path: Path) -> None:
    """Layouts are remembered by the text of the schema, which has groups and annotations."""
    values = [[{"a": 1}]]
    write(tmp_path, "0", {"x": pa.array(values, pa.list_(pa.struct({"a": pa.int64()})))})
    write(tmp_path, "1", {"y": pa.array(values, pa.list_(pa.struct({"a": pa.int64()})))})
    with pytest.raises(ConfigError, match="0 and 1 have different columns"):
        read_source(LakePath(f"file://{tmp_path}"))


@pytest.mark.parametrize("columns", [1, 1_500])
def test_footers_of_any_length_are_read(tmp_path: Path, columns: int) -> None:
    """A long footer takes a second request, and that of the next file one."""
    table = {f"column{number:04}": pa.array([1, 2, 3]) for number in range(columns)}
    for name in "abc":
        write(tmp_path, name, table, row_group_size=1)
    found = read_source(LakePath(f"file://{tmp_path}"))
    assert [file.groups for file in found.files] == [(1, 1, 1)] * 3
    assert found.row_bytes == 8 * columns
    sizes = [(tmp_path / name).stat().st_size for name in "abc"]
    assert [file.size for file in found.files] == sizes
    assert columns == 1 or min(sizes) > 64 * 1024


@pytest.mark.parametrize(
    ("kind", "lengths", "is_even"),
    [
        (pa.list_(pa.float32()), [4, 4, 4, 4], True),
        (pa.list_(pa.float32()), [4, 4, 4, 5], False),
        (pa.list_(pa.float32()), [2, 2, 4, 4], False),  # in each row group there is one length
        (pa.list_(pa.float32()), [4, 4, None, 4], False),
        (pa.list_(pa.list_(pa.float32(), 2)), [3, 3, 3, 3], True),
        (pa.list_(pa.string()), [4, 4, 4, 4], False),
        (pa.int64(), None, False),
    ],
)
def test_lists_of_one_length_are_shuffled_as_fixed_ones(
    tmp_path: Path, kind: Any, lengths: list[int] | None, is_even: bool
) -> None:
    """Spark's type has no length, but the footers have the number of values of each row group."""
    if lengths is None:
        rows = pa.array([1, 2, 3, 4])
    else:
        value: Any = "x" if "string" in str(kind) else 1.0
        value = [value, value] if "fixed" in str(kind) else value
        rows = pa.array([None if n is None else [value] * n for n in lengths], kind)
    write(tmp_path, "0", {"x": rows}, row_group_size=2)
    found = read_source(LakePath(f"file://{tmp_path}"))
    assert found.has_even_lists is is_even
    (shard,) = plan_shards(found, 1)
    assert Shard.load(shard.dump()).has_even_lists is is_even
    window = window_rows(shard.arrow_schema, 8, shard.has_even_lists)
    assert window == (65_536 if is_even or lengths is None else 8_192)
