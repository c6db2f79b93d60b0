"""HDFS in trouble: its NameNode is in safe mode, or its DataNode says nothing.

The cluster is this file's alone meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hopsgpu import devcluster
from hopsgpu.artifacts.models import ModelStore
from hopsgpu.devcluster.layout import DATANODE, NAMENODE
from hopsgpu.errors import StoreError
from hopsgpu.storage import hdfs, retrying
from hopsgpu.storage import lake as lake_module
from hopsgpu.storage.error_messages import SAFE_MODE, Trouble, explain
from hopsgpu.storage.lake import Lake

Admin = Callable[..., str]


@pytest.fixture
def dfsadmin(cluster_dir: Path, cluster_env: dict[str, str]) -> Admin:
    """Runs `hdfs dfsadmin`, whose class is among the NameNode's jars; gives what it says."""
    (pid,) = (d.pid for d in devcluster.status(cluster_dir).daemons if d.name == NAMENODE)
    java, *options = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    classes = options[options.index("-cp") + 1]

    def run(*words: str) -> str:
        command = [java, "-cp", classes, "org.apache.hadoop.hdfs.tools.DFSAdmin", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def store(hdfs_lake: Lake, tmp_path: Path) -> ModelStore:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"w" * 1000)
    store = ModelStore(hdfs_lake.url)
    store.publish(tmp_path / "model", "net")
    return store


@pytest.fixture
def safe_mode(store: ModelStore, dfsadmin: Admin) -> Iterator[None]:
    """The NameNode is in safe mode, once the store has its first version; never after the test."""
    try:
        assert "Safe mode is ON" in dfsadmin("-safemode", "enter")
        yield
    finally:
        dfsadmin("-safemode", "leave")


def test_a_publish_in_safe_mode_says_so_and_what_is_there_can_be_read(
    safe_mode: None, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_module, "_PATIENT_SECONDS", 0.5)
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
    dfsadmin: Admin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = threading.Event()

    def explained(error: BaseException) -> Trouble:
        trouble = explain(error)
        if trouble.kind == SAFE_MODE:
            refused.set()
        return trouble

    monkeypatch.setattr(retrying, "explain", explained)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(store.publish, tmp_path / "model", "net")
        assert refused.wait(30)
        dfsadmin("-safemode", "leave")
        assert publishing.result(90).version == 2
    assert [version.version for version in store.versions("net")] == [1, 2]


def test_a_datanode_that_says_nothing_is_waited_for_in_bounds(
    cluster_dir: Path, hdfs_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is frozen in mid-read, and goes on when the first attempt was given up."""
    monkeypatch.setattr(hdfs, "_READ_SECONDS", 2.0)
    (datanode,) = (
        one.pid for one in devcluster.status(cluster_dir).daemons if one.name == DATANODE
    )
    lake = Lake(f"{hdfs_url}/tmp/contract-{uuid.uuid4().hex}")
    lake.make()
    content = os.urandom(40 << 20)
    (lake / "large").write(content)
    try:
        blocks = lake.files.blocks((lake / "large").path)
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
            fetching.result(60)
    finally:
        os.kill(datanode, signal.SIGCONT)
    assert (tmp_path / "large").read_bytes() == content
    lake.remove()
