"""HDFS in trouble: its NameNode is in safe mode, or its DataNode says nothing.

The cluster is this file's alone meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from hopsgpu import devcluster
from hopsgpu.artifacts.models import ModelStore
from hopsgpu.devcluster.layout import DATANODE
from hopsgpu.errors import StoreError
from hopsgpu.storage import hdfs, retrying
from hopsgpu.storage import lake as lake_module
from hopsgpu.storage.error_messages import SAFE_MODE, ErrorMeaning, explain
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS

# Whether it is on afterwards.
SetSafeMode = Callable[[str], bool]


@pytest.fixture
def set_safe_mode(spark: SparkSession) -> SetSafeMode:
    """Does what `hdfs dfsadmin -safemode` does, without a JVM for each time."""
    jvm = spark.sparkContext._jvm
    conf = spark.sparkContext._jsc.hadoopConfiguration()

    def set_it(action: str) -> bool:
        files = jvm.org.apache.hadoop.fs.FileSystem.get(conf)
        return bool(files.setSafeMode(getattr(jvm.org.apache.hadoop.fs.SafeModeAction, action)))

    return set_it


@pytest.fixture
def store(hdfs_lake: LakePath, tmp_path: Path) -> ModelStore:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"w" * 1000)
    store = ModelStore(hdfs_lake.url)
    store.publish(tmp_path / "model", "net")
    return store


@pytest.fixture
def safe_mode(store: ModelStore, set_safe_mode: SetSafeMode) -> Iterator[None]:
    """The NameNode is in safe mode, once the store has its first version; never after the test."""
    try:
        assert set_safe_mode("ENTER")
        yield
    finally:
        assert not set_safe_mode("LEAVE")


def test_a_publish_in_safe_mode_says_so_and_what_is_there_can_be_read(
    safe_mode: None, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_module, "_RETRY_SECONDS", 0.5)
    with pytest.raises(StoreError, match="HDFS is in safe mode: try again when") as told:
        store.publish(tmp_path / "model", "net")
    assert told.value.kind == SAFE_MODE
    assert "cannot create" in str(told.value) and "/net/_staging/" in str(told.value)
    for change in (lambda: store.tag("net", 1, "production"), lambda: store.delete("net", 1)):
        with pytest.raises(StoreError) as told:
            change()
        assert told.value.kind == SAFE_MODE
    (version,) = store.versions("net")
    assert version == store.get("net") and store.list() == ("net",)
    version.verify()


def test_a_publish_goes_on_when_safe_mode_ends(
    safe_mode: None,
    store: ModelStore,
    set_safe_mode: SetSafeMode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = threading.Event()

    def explained(error: BaseException) -> ErrorMeaning:
        trouble = explain(error)
        if trouble.kind == SAFE_MODE:
            refused.set()
        return trouble

    monkeypatch.setattr(retrying, "explain", explained)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(store.publish, tmp_path / "model", "net")
        assert refused.wait(HANG_SECONDS)
        assert not set_safe_mode("LEAVE")
        assert publishing.result(HANG_SECONDS).version == 2
    assert [version.version for version in store.versions("net")] == [1, 2]


def test_a_datanode_that_says_nothing_is_waited_for_in_bounds(
    cluster_dir: Path, hdfs_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is frozen in mid-read, and goes on when the first attempt was given up."""
    monkeypatch.setattr(hdfs, "_READ_SECONDS", 2.0)
    (datanode,) = (
        one.pid for one in devcluster.status(cluster_dir).daemons if one.name == DATANODE
    )
    lake = LakePath(f"{hdfs_url}/tmp/contract-{uuid.uuid4().hex}")
    lake.make()
    content = os.urandom(40 << 20)
    (lake / "large").write(content)
    try:
        blocks = lake.client.blocks((lake / "large").path)
        assert next(blocks)
        os.kill(datanode, signal.SIGSTOP)
        with pytest.raises(OSError, match="no answer in 2 s"):
            for _ in blocks:
                pass
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            fetching = pool.submit((lake / "large").download, tmp_path / "large")
            with pytest.raises(concurrent.futures.TimeoutError):
                fetching.result(3)  # it has given up once, and tries again
            os.kill(datanode, signal.SIGCONT)
            fetching.result(HANG_SECONDS)
    finally:
        os.kill(datanode, signal.SIGCONT)
    assert (tmp_path / "large").read_bytes() == content
    lake.remove()
