"""Where the queues of gangs are: on the lake, or in Leases of Kubernetes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.backends.gang_queue_root import (
    configured_queue_root,
    configured_queues,
    find_hosted_queues,
    gang_queue_root,
    is_queue_on_lake,
)
from hopsgpu.backends.spark.kubernetes_application import KubernetesApplication
from hopsgpu.cluster_managers.kubernetes.lease_directory import LeaseQueueDirectory, LeaseQueueRoot
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.standalone.manager import StandaloneManager
from hopsgpu.errors import ConfigError
from hopsgpu.storage.lake import LakePath
from tests.unit.cluster_managers.kubernetes.api_server import GPU, access_of, api_server, manager_of

KUBERNETES = KubernetesManager(access_of("https://h:6443", "team"), gpu_resource=GPU)
STANDALONE = StandaloneManager("spark://h:7077", ("http://h:8080",))


def test_the_place_is_named_or_on_the_default_file_system() -> None:
    place, names = gang_queue_root("hdfs://other/locks", "hdfs://host", "blue")
    assert (place.url, names) == ("hdfs://other/locks", ("blue",))
    place, names = gang_queue_root(None, "hdfs://host", "blue")
    assert (place.url, names) == ("hdfs://host/tmp", ("hopsgpu", "locks", "blue"))


@pytest.mark.parametrize(
    ("locks", "files"), [("s3://bucket/locks", "hdfs://host"), (None, "s3a://bucket")]
)
def test_the_place_is_not_on_an_object_store(locks: str | None, files: str) -> None:
    with pytest.raises(ConfigError, match=r"queues of gangs must be on HDFS .*hopsgpu\.locks"):
        gang_queue_root(locks, files, "blue")


@pytest.mark.parametrize(
    ("locks", "default_fs", "is_on_lake"),
    [
        ("file:///volume", None, True),
        ("hdfs://host/locks", "s3a://bucket", True),
        ("s3://bucket/locks", None, True),  # which is then refused
        (None, "hdfs://host", True),
        ("", "hdfs://host:8020/", True),
        (None, "viewfs://cluster", True),
        (None, "webhdfs://host:9870", True),
        (None, "swebhdfs://host:9871", True),
        (None, None, False),
        (None, "", False),
        (None, "file:///", False),
        (None, "s3a://bucket", False),
        (None, "s3a://bucket/", False),
        (None, "gs://bucket", False),
        (None, "abfss://c@account.dfs.core.windows.net", False),
        (None, "wasb://c@account", False),
        (None, "no URL", False),
    ],
)
def test_the_lake_has_the_queues_if_it_is_shared_and_has_renames(
    locks: str | None, default_fs: str | None, is_on_lake: bool
) -> None:
    assert is_queue_on_lake(locks, default_fs) is is_on_lake
    hosted = find_hosted_queues(KUBERNETES, locks, default_fs)
    assert (hosted is None) is is_on_lake
    assert find_hosted_queues(STANDALONE, locks, default_fs) is None


def environment(directory: Path, defaults: str = "", default_fs: str = "") -> dict[str, str]:
    (directory / "spark-defaults.conf").write_text(defaults)
    value = f"<property><name>fs.defaultFS</name><value>{default_fs}</value></property>"
    site = f"<configuration>{value if default_fs else ''}</configuration>"
    (directory / "core-site.xml").write_text(site)
    return {"SPARK_CONF_DIR": str(directory), "HADOOP_CONF_DIR": str(directory)}


def test_a_reader_finds_the_queues_of_sessions(tmp_path: Path) -> None:
    cluster = KUBERNETES.cluster
    environ = environment(tmp_path)
    assert isinstance(configured_queue_root(environ, KUBERNETES), LeaseQueueRoot)
    local = configured_queue_root(environ, STANDALONE)
    assert local.url.startswith("file:///tmp/hopsgpu/locks/")
    with_locks = configured_queue_root({**environ, "HOPSGPU_LOCKS": "file:///x"}, KUBERNETES)
    assert with_locks.url == f"file:///x/{cluster}"

    environ = environment(tmp_path, default_fs="hdfs://host")
    expected = f"hdfs://host/tmp/hopsgpu/locks/{cluster}"
    assert configured_queue_root(environ, KUBERNETES).url == expected
    # Spark's property is first, as in a session.
    environ = environment(tmp_path, "spark.hadoop.fs.defaultFS s3a://b", "hdfs://host")
    assert isinstance(configured_queue_root(environ, KUBERNETES), LeaseQueueRoot)
    environ = environment(tmp_path, "spark.hadoop.fs.defaultFS hdfs://host", "s3a://b")
    assert configured_queue_root(environ, KUBERNETES).url == expected


def test_a_reader_reads_leases(tmp_path: Path) -> None:
    with api_server() as server:
        queues, problems = configured_queues(environment(tmp_path), manager_of(server)).read()
    assert [*queues] == ["default"] and queues["default"][0].tickets == () and problems == []


def application(default_fs: str | None, **settings: str) -> KubernetesApplication:
    it: Any = object.__new__(KubernetesApplication)
    it.manager = KUBERNETES
    it.jvm = SimpleNamespace(
        setting=lambda name: settings.get(name.rpartition(".")[2]), hadoop=lambda _: default_fs
    )
    made: KubernetesApplication = it
    return made


def test_a_session_has_the_queue_in_leases_or_on_the_lake(tmp_path: Path) -> None:
    for default_fs in (None, "file:///", "s3a://bucket"):
        assert isinstance(application(default_fs).gang_queue_dir, LeaseQueueDirectory)
    one = application("s3a://bucket", locks=f"file://{tmp_path}")
    assert isinstance(one.gang_queue_dir, LakePath)
    assert one.gang_queue_dir.url == f"file://{tmp_path}/{KUBERNETES.cluster}/default"
