"""A rank's data on every lake: a local directory, and the real HDFS."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.data.rank_data import RankData
from hopsgpu.data.row_groups import Fetcher
from hopsgpu.data.shard import Shard
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import read_source
from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.storage.lake import LakePath

ROWS = 30_000


@pytest.fixture
def written(lake: LakePath) -> LakePath:
    """Three files, one of them empty and one below a directory, beside files of Spark's."""
    lake.make()
    (lake / "below").make()
    values = np.arange(ROWS * 16, dtype="f4").reshape(ROWS, 16)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 16)
    words = [f"row {n}" for n in range(ROWS)]
    whole = pa.table({"id": np.arange(ROWS), "x": lists, "word": words})
    for name, part in (
        ("part-0", whole[: ROWS // 3]),
        ("below/part-1", whole[ROWS // 3 :]),
        ("part-2", whole[:0]),
    ):
        sink = pa.BufferOutputStream()
        parquet.write_table(part, sink, row_group_size=2_000)
        (lake / f"{name}.parquet").write(sink.getvalue().to_pybytes())
    (lake / "_SUCCESS").write(b"")
    return lake


def ids(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in batch["id"]]


@pytest.mark.parametrize("large", [False, True])
def test_all_rows_come_to_the_ranks(
    written: LakePath, tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # row groups are not fetched as a whole
        monkeypatch.setattr("hopsgpu.data.stream._FETCHED_BYTES", 0)
    source = read_source(written)
    assert source.num_rows == ROWS
    found: list[int] = []
    for number, shard in enumerate(plan_shards(source, 7, remainder="keep", seed=5)):
        with RankData(Shard.load(shard.dump()), tmp_path / str(number)) as rank:
            batches = list(rank.batches(256))
            for batch in batches:
                assert (batch["x"][:, 3] == batch["id"].astype("f4") * 16 + 3).all()
                assert batch["word"].tolist() == [f"row {n}" for n in batch["id"]]
            again = ids(rank.batches(256, shuffle=True))
            assert sorted(again) == sorted(ids(batches))
            assert again != ids(batches)
            found += again
    assert sorted(found) == list(range(ROWS))


def test_a_later_epoch_touches_no_lake(
    written: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = plan_shards(read_source(written), 2)[1]
    # The default budget depends on how full this machine's disk is.
    with RankData(shard, tmp_path, budget=2**26) as rank:
        first = ids(rank.batches(100, shuffle=True))
        written.remove()
        assert ids(rank.batches(100, shuffle=True)) == first
    with RankData(shard, tmp_path) as rank, pytest.raises(StoreError, match="part-"):
        ids(rank.batches(100))


def test_a_lake_that_fails_meanwhile_is_named(
    written: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = plan_shards(read_source(written), 1)[0]
    fetch, fetched = Fetcher.fetch, iter([True, True, False])

    def failing(self: Fetcher, part: Any) -> Any:
        if not next(fetched):
            written.remove()
        return fetch(self, part)

    monkeypatch.setattr(Fetcher, "fetch", failing)
    with RankData(shard, tmp_path) as rank, pytest.raises(StoreError, match="part-") as raised:
        ids(rank.batches(100))
    assert raised.value.kind == "absent"


def test_one_file_is_a_source(written: LakePath, tmp_path: Path) -> None:
    source = read_source(written / "part-0.parquet")
    with RankData(plan_shards(source, 1)[0], tmp_path) as rank:
        assert sorted(ids(rank.batches(999))) == list(range(ROWS // 3))
    with pytest.raises(ConfigError, match="but no rows"):
        read_source(written / "part-2.parquet")
    with pytest.raises(ConfigError, match="is empty"):
        read_source(written / "_SUCCESS")


def test_a_part_of_a_table_with_a_transaction_log_is_refused(written: LakePath) -> None:
    (written / "_delta_log").make()
    (written / "_delta_log/00000000000000000000.json").write(b"{}")
    for part in (written, written / "below", written / "below/part-1.parquet"):
        with pytest.raises(ConfigError, match=r"\(Delta Lake, .*/_delta_log\)"):
            read_source(part)


def test_files_that_are_empty_or_still_copied_are_skipped(written: LakePath) -> None:
    (written / "empty.parquet").write(b"")
    (written / "part-9.parquet._COPYING_").write(b"PAR1half")
    assert read_source(written).num_rows == ROWS


# As a user who may enter the directories above the data, but not list them.
AS_MALLORY = """
import sys
from hopsgpu.data.source import read_source
from hopsgpu.storage.lake import LakePath
try:
    source = read_source(LakePath(sys.argv[1]))
    print(source.num_rows, *source.unchecked, sep="\\n")
except Exception as error:
    print(error)
"""


def read_as_mallory(url: str, cluster_env: dict[str, str]) -> str:
    command = [sys.executable, "-c", AS_MALLORY, url]
    environ = {**cluster_env, "HADOOP_USER_NAME": "mallory"}
    return subprocess.run(command, env=environ, text=True, capture_output=True, check=True).stdout


def test_directories_that_may_not_be_listed(hdfs_url: str, cluster_env: dict[str, str]) -> None:
    root = LakePath(f"{hdfs_url}/tmp/closed-{uuid.uuid4().hex}")
    table, data = root / "table", root / "table/data"
    data.make()
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"a": [1, 2]}), sink)
    (data / "0.parquet").write(sink.getvalue().to_pybytes())
    try:
        for directory in (root, table):
            directory.set_mode(0o711)
        assert read_as_mallory(data.url, cluster_env).split() == ["2"]
        (table / "metadata").make()
        (table / "metadata/v1.metadata.json").write(b"{}")
        assert "(Iceberg, " in read_as_mallory(data.url, cluster_env)
        (table / "metadata").set_mode(0o700)
        assert read_as_mallory(data.url, cluster_env).split() == ["2", f"{table.url}/metadata"]
        (root / "_delta_log").make()
        assert "(Delta Lake, " in read_as_mallory(data.url, cluster_env)
    finally:
        root.remove()


def test_viewfs_reads_mount_points_and_sees_the_table_behind_them(
    hdfs_url: str,
    cluster_env: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a fallback mount, which Hadoop does not need."""
    root = LakePath(f"{hdfs_url}/tmp/mounted-{uuid.uuid4().hex}")
    (root / "table/day=1").make()
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"a": [1, 2]}), sink)
    (root / "table/day=1/0.parquet").write(sink.getvalue().to_pybytes())
    shutil.copytree(cluster_env["HADOOP_CONF_DIR"], tmp_path / "conf")
    site = tmp_path / "conf/core-site.xml"
    name = "fs.viewfs.mounttable.company.link"
    links = {f"{name}./part": f"{root.url}/table/day=1", f"{name}./cold": "s3a://bucket/cold"}
    mounts = "".join(
        f"<property><name>{key}</name><value>{value}</value></property>"
        for key, value in links.items()
    )
    site.write_text(site.read_text().replace("</configuration>", f"{mounts}</configuration>"))
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
    try:
        assert read_source(LakePath("viewfs://company/part")).num_rows == 2
        for unmounted in ("viewfs://company/x", "viewfs://company/cold/x"):
            with pytest.raises(StoreError) as raised:
                read_source(LakePath(unmounted))
            assert raised.value.kind == "absent"
            with pytest.raises(StoreError, match="has no mount point on HDFS"):
                LakePath(unmounted).make()
        (root / "table/_delta_log").make()
        with pytest.raises(ConfigError, match=r"\(Delta Lake, .*`day` = '1'"):
            read_source(LakePath("viewfs://company/part"))
    finally:
        root.remove()
