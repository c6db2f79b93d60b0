"""What a task makes of the executor of a standalone worker, and of one in a pod."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hopsgpu.agent import agent, container_entry, process_daemon
from hopsgpu.agent.container_entry import enter_container, variables_of, variables_of_pod
from hopsgpu.core.container_ids import describe_log, standalone_container

# The command line of an executor's JVM, as PySpark 4.3.0 starts it.
ARGUMENTS = [
    *("java", "-cp", "jars/*", "-Xmx1024M", "-Dspark.driver.port=38787"),
    *("org.apache.spark.executor.CoarseGrainedExecutorBackend", "--driver-url", "spark://d:38787"),
    *("--executor-id", "12", "--hostname", "node1", "--cores", "1"),
    *("--app-id", "app-20261130145442-0002", "--worker-url", "spark://Worker@node1:27191", ""),
]
CONTAINER = "app-20261130145442-0002/000012"


def test_the_variables_are_those_that_yarn_sets(tmp_path: Path) -> None:
    environ = {"SPARK_EXECUTOR_DIRS": f"/disk1/executor-a{os.pathsep}/disk2/executor-b"}
    assert variables_of(ARGUMENTS, environ, tmp_path) == {
        "CONTAINER_ID": CONTAINER,
        "NM_HOST": "node1",
        "LOCAL_DIRS": "/disk1/executor-a,/disk2/executor-b",
        "LOG_DIRS": str(tmp_path),
        "HOPSGPU_SCRATCH": "/disk1/executor-a/hopsgpu-executor-12",
    }


def test_without_directories_of_spark_the_executors_own_is_used(tmp_path: Path) -> None:
    variables = variables_of(ARGUMENTS, {}, tmp_path)
    assert variables["LOCAL_DIRS"] == str(tmp_path)
    assert variables["HOPSGPU_SCRATCH"] == str(tmp_path / "hopsgpu-executor-12")


def test_later_executors_have_larger_ids() -> None:
    ids = [standalone_container("app-1", number) for number in (9, 10, 99, 100)]
    assert ids == sorted(ids)


def test_a_pod_is_a_container_with_its_nodes_name() -> None:
    environ = {
        "HOPSGPU_POD": "train-exec-1",
        "HOPSGPU_NAMESPACE": "training",
        "HOPSGPU_NODE": "node1",
        "SPARK_LOCAL_DIRS": "/var/data/spark-1",
    }
    assert variables_of_pod(environ) == {
        "CONTAINER_ID": "training/train-exec-1",
        "NM_HOST": "node1",
        "LOCAL_DIRS": "/var/data/spark-1",
    }


def test_the_gpus_of_a_pod_are_leased_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed: list[list[str]] = []
    monkeypatch.setattr(container_entry, "_claim", claimed.append)
    for name in ("CONTAINER_ID", "NM_HOST"):
        # Restored at the end of the test, since the call sets them.
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOPSGPU_POD", "train-exec-1")
    monkeypatch.chdir(tmp_path)
    enter_container([])
    enter_container(["GPU-1"])
    assert claimed == [["GPU-1"]]
    (tmp_path / container_entry.CONTAINER_GPUS).touch()
    enter_container(["GPU-1"])
    assert claimed == [["GPU-1"]]


def test_a_container_of_yarn_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTAINER_ID", "container_1_0001_01_000002")
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    enter_container(["GPU-1"])
    assert dict(os.environ) == before
    assert not list(tmp_path.iterdir())


def test_the_ranks_directory_goes_with_the_executor(tmp_path: Path) -> None:
    work, scratch = tmp_path / "work", tmp_path / "local" / "hopsgpu-executor-1"
    (work / container_entry.HADOOP_CONF).mkdir(parents=True)
    for _ in range(2):  # the next task of the executor finds it
        container_entry._link_scratch(work, scratch)
        container_entry._link_hadoop_conf(work)
    assert (work / "hopsgpu").resolve() == scratch
    conf = work / "__spark_conf__" / "__hadoop_conf__"
    assert conf.resolve() == work / container_entry.HADOOP_CONF
    assert scratch.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_killed_process_daemon_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    scratch = tmp_path / "hopsgpu-executor-1"
    directory = scratch / "process-daemon-7"
    directory.mkdir(parents=True)
    monkeypatch.setenv(container_entry.SCRATCH, str(scratch))
    monkeypatch.chdir(directory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(process_daemon.SOCKET)
        if is_alive:
            listener.listen()
        agent._remove_scratch(directory)
    # A living daemon removes the directory at its own end.
    assert scratch.exists() is is_alive


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (CONTAINER, "executor 12 on the page of app-20261130145442-0002"),
        (CONTAINER, "work/app-20261130145442-0002/12 of the worker on node1"),
        ("container_1_0001_01_000002", "yarn logs -containerId container_1_0001_01_000002"),
        ("local-17", ""),
    ],
)
def test_where_the_log_of_an_executor_is(container: str, words: str) -> None:
    assert words in describe_log(container, "node1")
