"""Old dates and timestamps of files whose writers had another calendar; no Spark is needed.

The files are pyarrow's, with the metadata of Spark and Hive, and with the numbers that these write.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.data import calendars
from hopsgpu.data.rank_data import RankData
from hopsgpu.data.shard import Shard
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import read_source
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake import LakePath

VERSION, ZONE = "org.apache.spark.version", "org.apache.spark.timeZone"
LEGACY, LEGACY_INT96 = "org.apache.spark.legacyDateTime", "org.apache.spark.legacyINT96"
SPARK_2 = {VERSION: "2.4.8"}
BEFORE_2_4 = {"org.apache.spark.sql.parquet.row.metadata": "{}"}
LEGACY_UTC = {VERSION: "3.5.1", LEGACY: "", LEGACY_INT96: "", ZONE: "UTC"}
LEGACY_ELSEWHERE = {**LEGACY_UTC, ZONE: "Europe/Paris"}
# `RebaseDateTime.julianGregDiffs` and `julianGregDiffSwitchDay` of Spark 3.5.
DIFFERENCES = [2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8, -9, -10, 0]
SWITCHES = [-719164, -682945, -646420, -609895, -536845, -500320, -463795]
SWITCHES += [-390745, -354220, -317695, -244645, -208120, -171595, -141427]
# 1582-10-04 of the Julian calendar, the day before 1582-10-15; and 1000-01-01 of it.
LAST_JULIAN, OF_1000 = -141_428, -354_280
DAY = 86_400 * 10**6
OLD_DATES = pa.array([LAST_JULIAN, None, OF_1000, LAST_JULIAN + 1], pa.int32()).cast(pa.date32())
DATES = [datetime.date(1582, 10, 4), None, datetime.date(1000, 1, 1), datetime.date(1582, 10, 15)]


def write(directory: Path, name: str, table: Any, metadata: dict[str, str], **options: Any) -> None:
    directory.mkdir(exist_ok=True)
    given, groups = pa.table(table), options.pop("row_group_size", None)
    with parquet.ParquetWriter(
        directory / name, given.schema, store_schema=False, **options
    ) as writer:
        writer.write_table(given, groups)
        writer.add_key_value_metadata(metadata)


def shard_of(directory: Path) -> Shard:
    (shard,) = plan_shards(read_source(LakePath(f"file://{directory}")), 1)
    return Shard.load(shard.dump())


def read(directory: Path, columns: list[str] | None = None) -> dict[str, list[Any]]:
    with RankData(shard_of(directory), directory.parent / "cache") as rows:
        found: dict[str, list[Any]] = rows.to_arrow(columns).to_pydict()
        return found


def utc(micros: Any) -> Any:
    return pa.array(micros, pa.timestamp("us", "UTC"))


def test_days_are_shifted_as_spark_shifts_them() -> None:
    days = np.arange(SWITCHES[0], SWITCHES[-1] + 1000, dtype=np.int32)
    expected = np.array(DIFFERENCES)[np.searchsorted(SWITCHES, days, side="right") - 1]
    assert (calendars._shifts(days) == expected).all()
    # 0004-12-31 before our era, in years that Spark converts one by one: -0003-12-31.
    julian = -719_164 - (366 - 2) - 365 * 3 - 2
    assert calendars._shifts(np.array([julian, julian - 365 * 400])).tolist() == [2, 5]


@pytest.mark.parametrize("metadata", [SPARK_2, BEFORE_2_4, LEGACY_UTC, LEGACY_ELSEWHERE])
def test_old_dates_are_converted(tmp_path: Path, metadata: dict[str, str]) -> None:
    lists = pa.array([[LAST_JULIAN], None, [], [0, None, OF_1000]], pa.list_(pa.int32()))
    table = {"d": OLD_DATES, "l": lists.cast(pa.list_(pa.date32())), "n": pa.array(range(4))}
    write(tmp_path / "lake", "a", table, metadata)
    found = read(tmp_path / "lake")
    assert found["d"] == DATES
    assert found["l"] == [DATES[:1], None, [], [datetime.date(1970, 1, 1), None, DATES[2]]]
    assert found["n"] == [0, 1, 2, 3]
    with RankData(shard_of(tmp_path / "lake"), tmp_path / "cache") as rows:
        (batch,) = rows.batches(4, ["d"])
    assert batch["d"].astype(str).tolist() == ["1582-10-04", "NaT", "1000-01-01", "1582-10-15"]


@pytest.mark.parametrize(
    "metadata", [{}, {VERSION: "3.5.1"}, {VERSION: "4.0.0", "org.apache.spark.timeZone": "UTC"}]
)
def test_dates_of_arrows_calendar_are_left_alone(tmp_path: Path, metadata: dict[str, str]) -> None:
    write(tmp_path / "lake", "a", {"d": OLD_DATES, "t": utc([-DAY * 200_000] * 4)}, metadata)
    found = read(tmp_path / "lake")
    assert found["d"] == OLD_DATES.to_pylist()
    assert found["t"] == utc([-DAY * 200_000] * 4).to_pylist()


def test_nested_columns_and_files_of_both_calendars(tmp_path: Path) -> None:
    nulls = pa.array([False, False, True, False])
    pairs = pa.StructArray.from_arrays([OLD_DATES, pa.array([1, 2, 3, 4])], ["d", "n"], mask=nulls)
    days = OLD_DATES.filter(OLD_DATES.is_valid())
    table = {
        "s": pairs,
        "m": pa.MapArray.from_arrays(pa.array([0, 1, None, 2, 3], pa.int32()), days, days),
        "f": pa.FixedSizeListArray.from_arrays(pa.concat_arrays([OLD_DATES] * 2), 2),
    }
    for name, metadata in (("a", SPARK_2), ("b", {VERSION: "3.5.1"})):
        numbered = {**table, "file": [name] * 4, "row": [0, 1, 2, 3]}
        write(tmp_path / "lake", name, numbered, metadata, row_group_size=3)
    rows = {}
    found = read(tmp_path / "lake")
    for row in zip(*found.values(), strict=True):
        fields = dict(zip(found, row, strict=True))
        rows[fields["file"], fields["row"]] = [fields[name] for name in table]
    first, _, second, third = DATES
    assert [rows["a", row] for row in range(4)] == [
        [{"d": first, "n": 1}, [(first, first)], [first, None]],
        [{"d": None, "n": 2}, [(second, second)], [second, third]],
        [None, None, [first, None]],
        [{"d": third, "n": 4}, [(third, third)], [second, third]],
    ]
    plain = zip(*pa.table(table).to_pydict().values(), strict=True)
    assert [rows["b", row] for row in range(4)] == [list(row) for row in plain]


@pytest.mark.parametrize("int96", [False, True])
def test_old_timestamps_in_utc_are_converted(tmp_path: Path, int96: bool) -> None:
    late = -DAY * 100_000 + 5
    given = utc([LAST_JULIAN * DAY + 7, None, late, OF_1000 * DAY + DAY - 1])
    options = {"use_deprecated_int96_timestamps": True} if int96 else {}
    write(tmp_path / "lake", "a", {"t": given}, LEGACY_UTC, **options)
    found = [t and t.replace(tzinfo=None) for t in read(tmp_path / "lake")["t"]]
    day = datetime.timedelta(days=1)
    epoch = datetime.datetime(1970, 1, 1)
    assert found == [
        datetime.datetime(1582, 10, 4, 0, 0, 0, 7),
        None,
        epoch - 100_000 * day + datetime.timedelta(microseconds=5),
        datetime.datetime(1000, 1, 1, 23, 59, 59, 999_999),
    ]


@pytest.mark.parametrize("metadata", [SPARK_2, BEFORE_2_4, LEGACY_ELSEWHERE])
@pytest.mark.parametrize("int96", [False, True])
def test_timestamps_of_an_unknown_zone_are_refused_where_they_are_old(
    tmp_path: Path, metadata: dict[str, str], int96: bool
) -> None:
    options = {"use_deprecated_int96_timestamps": True} if int96 else {}
    of_1900 = -2_208_988_800 * 10**6
    write(tmp_path / "new", "a", {"t": utc([of_1900, None])}, metadata, **options)
    (first, _) = read(tmp_path / "new")["t"]
    assert first.replace(tzinfo=None) == datetime.datetime(1900, 1, 1)
    table = {"t": utc([0, of_1900 - 1]), "n": pa.array([1, 2])}
    write(tmp_path / "old", "a", table, metadata, **options)
    assert read(tmp_path / "old", ["n"]) == {"n": [1, 2]}
    words = r"column 't' of file://.*/old/a has timestamps before 1900-01-01.*Spark (2 )?wrote it"
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / "old", ["n", "t"])
    # Statistics of INT96 tell nothing, so its values do; others are refused before a row is read.
    shard = shard_of(tmp_path / "old")
    assert list(shard.refused) == ([] if int96 else ["t"])
    with RankData(shard, tmp_path / "cache") as rows, pytest.raises(ConfigError, match=words):
        list(rows.batches(1))


def test_timestamps_without_a_zone_have_one_calendar(tmp_path: Path) -> None:
    given = pa.array([-DAY * 200_000], pa.timestamp("us"))
    write(tmp_path / "lake", "a", {"t": given}, LEGACY_ELSEWHERE)
    assert read(tmp_path / "lake")["t"] == given.to_pylist()


def by_hive(file: Path) -> None:
    """Has a file's footer say that Hive wrote it: its root and its writer's name."""
    content = file.read_bytes()
    footer = content[-8 - int.from_bytes(content[-8:-4], "little") : -8]
    body = content[: len(content) - 8 - len(footer)]
    assert footer.count(b"\x06schema") == 1
    changed = footer.replace(b"\x06schema", b"\x0bhive_schema")
    created = f"parquet-cpp-arrow version {pa.__version__}".encode()
    assert changed.count(created) == 1
    changed = changed.replace(created, b"parquet-mr version 1.10.0".ljust(len(created)))
    file.write_bytes(body + changed + len(changed).to_bytes(4, "little") + content[-4:])


def test_hive(tmp_path: Path) -> None:
    for name, metadata in (
        ("unknown", {}),
        ("hybrid", {"writer.date.proleptic": "false"}),
        ("same", {"writer.date.proleptic": "true", "writer.zone.conversion.legacy": "false"}),
    ):
        table = {"d": OLD_DATES, "t": utc([-DAY * 30_000] * 4), "n": pa.array(range(4))}
        write(tmp_path / name, "a", table, metadata, use_deprecated_int96_timestamps=True)
        by_hive(tmp_path / name / "a")
    assert read(tmp_path / "unknown", ["n"])["n"] == [0, 1, 2, 3]
    assert list(shard_of(tmp_path / "unknown").refused) == ["d"]
    with pytest.raises(ConfigError, match="unknown/a .*dates .*1582-10-15"):
        read(tmp_path / "unknown")
    assert read(tmp_path / "hybrid", ["d"])["d"] == DATES
    with pytest.raises(ConfigError, match="hybrid/a .*timestamps .*1900"):
        read(tmp_path / "hybrid", ["t"])
    assert read(tmp_path / "same")["d"] == OLD_DATES.to_pylist()
    new = {"d": pa.array([LAST_JULIAN + 1], pa.int32()).cast(pa.date32()), "t": utc([0])}
    write(tmp_path / "new", "a", new, {}, use_deprecated_int96_timestamps=True)
    by_hive(tmp_path / "new" / "a")
    assert read(tmp_path / "new")["d"] == DATES[3:]
