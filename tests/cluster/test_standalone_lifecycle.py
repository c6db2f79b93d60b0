"""Real standalone clusters: daemons that are killed and started again, and applications."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from hopsgpu import devcluster
from hopsgpu.devcluster.daemons import members
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.storage.spark_defaults import read_properties
from tests.bounds import HANG_SECONDS
from tests.cluster.test_cluster_lifecycle import daemon, hopsgpu, open_ports, processes, status
from tests.conftest import gone, until

# These clusters are started beside that of `make test`.
pytestmark = pytest.mark.soak

UP = ("up", "--standalone", "--nodes", "2", "--gpus-per-node", "1")
NODES = ["node1", "node2"]
# A task on each GPU, as often as a line arrives.
APPLICATION = """
import sys, time
from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

def addresses(_):
    from pyspark import TaskContext
    time.sleep(1)
    return TaskContext.get().resources()["gpu"].addresses

context = SparkSession.builder.appName("mine").getOrCreate().sparkContext
executors = ExecutorResourceRequests().cores(1).memory("512m").resource("gpu", 1)
tasks = TaskResourceRequests().cpus(1).resource("gpu", 1)
profile = ResourceProfileBuilder().require(executors).require(tasks).build
while sys.stdin.readline():
    gpus = context.parallelize(range(2), 2).withResources(profile).mapPartitions(addresses)
    print("GPUS", *gpus.collect(), flush=True)
"""


@contextmanager
def running(directory: Path, *options: str) -> Iterator[Path]:
    try:
        first = hopsgpu(directory, *UP, *options)
        assert first.returncode == 0, first.stderr
        yield directory
    finally:
        last = hopsgpu(directory, "down")
    assert last.returncode == 0, last.stderr
    assert processes(directory) == []
    assert open_ports(directory) == []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with running(tmp_path_factory.mktemp("standalone")) as directory:
        yield directory


@contextmanager
def application(cluster: Path) -> Iterator[Callable[[], set[str]]]:
    """Start the application; yield a function that returns the GPUs of its next tasks."""
    with subprocess.Popen(
        [sys.executable, "-c", APPLICATION],
        env={**os.environ, **devcluster.environment(cluster)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        assert driver.stdin and driver.stdout
        requests_of_gpus, answers = driver.stdin, driver.stdout

        def next_gpus() -> set[str]:
            requests_of_gpus.write("\n")
            requests_of_gpus.flush()
            word, *gpus = answers.readline().split()
            assert word == "GPUS"
            return set(gpus)

        try:
            yield next_gpus
        finally:
            # The group has the driver's JVM too.
            os.killpg(driver.pid, signal.SIGKILL)


def kill(directory: Path, name: str) -> None:
    pid = daemon(directory, name)["pid"]
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: gone(pid))


def page_of(directory: Path, name: str = "master") -> dict[str, Any]:
    """Return what a Master reports."""
    url = f"{daemon(directory, name)['web']}/json/"
    page: dict[str, Any] = requests.get(url, timeout=HANG_SECONDS).json()
    return page


def workers(page: dict[str, Any]) -> dict[str, str]:
    """Return host → GPU of the ALIVE Workers."""
    return {
        worker["host"]: " ".join(worker["resources"]["gpu"]["addresses"])
        for worker in page["workers"]
        if worker["state"] == "ALIVE"
    }


def test_the_master_lists_every_worker_with_its_gpus(cluster: Path) -> None:
    page = page_of(cluster)
    assert page["status"] == "ALIVE"
    gpus = workers(page)
    assert sorted(gpus) == NODES
    assert len(set(gpus.values())) == 2
    assert all(gpu.startswith("GPU-") for gpu in gpus.values())
    seen = status(cluster)
    assert seen["masters"] == {"master": "ALIVE"}
    nodes = [(node["name"], node["state"], node["gpus"]) for node in seen["nodes"]]
    assert nodes == [(name, "ALIVE", 1) for name in NODES]
    assert "0 of 2 used" in hopsgpu(cluster, "status").stdout


def test_env_points_spark_at_the_master_and_at_no_yarn(cluster: Path) -> None:
    environ = devcluster.environment(cluster)
    assert not Path(environ["HADOOP_CONF_DIR"], "yarn-site.xml").exists()
    defaults = read_properties(Path(environ["SPARK_CONF_DIR"], "spark-defaults.conf"))
    assert defaults["spark.master"] == f"spark://{daemon(cluster, 'master')['rpc']}"
    assert defaults["spark.hopsgpu.master.ui"] == daemon(cluster, "master")["web"]


def test_an_application_outlives_a_master_and_a_worker(cluster: Path) -> None:
    gpus = set(workers(page_of(cluster)).values())
    with application(cluster) as next_gpus:
        assert until(lambda: next_gpus() == gpus)
        (before,) = page_of(cluster)["activeapps"]

        kill(cluster, "master")
        seen = status(cluster)
        assert not seen["healthy"] and seen["masters"] == {"master": ""}
        assert "no Master is ALIVE" in hopsgpu(cluster, "status").stdout
        restarted = hopsgpu(cluster, "up")
        assert "starting the missing daemons: master\n" in restarted.stdout
        page = page_of(cluster)
        assert sorted(workers(page)) == NODES
        assert [app["id"] for app in page["activeapps"]] == [before["id"]]
        assert until(lambda: next_gpus() == gpus)

        kill(cluster, "node1")
        assert status(cluster)["gpus_total"] == 1
        # The executor ends with its Worker.
        assert until(lambda: not members(ClusterLayout.at(cluster).root, "node1"))
        restarted = hopsgpu(cluster, "up")
        assert "starting the missing daemons: node1\n" in restarted.stdout
        assert workers(page_of(cluster)).keys() == set(NODES)
        assert until(lambda: next_gpus() == gpus)
    assert until(lambda: status(cluster)["gpus_used"] == 0)


def test_down_ends_the_executors_of_an_application(tmp_path: Path) -> None:
    with running(tmp_path), application(tmp_path) as next_gpus:
        next_gpus()
        assert len(members(tmp_path, "node1")) > 1
        assert hopsgpu(tmp_path, "down").returncode == 0
        assert members(tmp_path) == []


def test_a_standby_takes_over_the_workers_of_a_dead_master(tmp_path: Path) -> None:
    with running(tmp_path, "--master-ha"):
        states = status(tmp_path)["masters"]
        assert sorted(states.values()) == ["ALIVE", "STANDBY"]
        alive, standby = sorted(states, key=lambda name: states[name])
        gpus = workers(page_of(tmp_path, alive))
        assert sorted(gpus) == NODES

        kill(tmp_path, alive)
        assert until(lambda: status(tmp_path)["masters"][standby] == "ALIVE")
        assert until(lambda: workers(page_of(tmp_path, standby)) == gpus)

        restarted = hopsgpu(tmp_path, "up")
        assert f"starting the missing daemons: {alive}\n" in restarted.stdout
        assert status(tmp_path)["masters"] == {alive: "STANDBY", standby: "ALIVE"}
        assert status(tmp_path)["healthy"]
