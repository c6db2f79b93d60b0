"""What `hopsgpu gpus` and `inventory()` say of a real YARN, by its REST interfaces alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu import devcluster
from hopsgpu.cluster_managers.manager import ClusterManager
from tests.bounds import HANG_SECONDS
from tests.conftest import until

pytestmark = pytest.mark.usefixtures("nothing_warmed")


def said(env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hopsgpu.cli.main", "gpus", *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS)


def as_json(env: dict[str, str]) -> dict[str, Any]:
    ran = said(env, "--json")
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


def test_the_nodes_and_their_gpus(cluster_env: dict[str, str]) -> None:
    found = hopsgpu.inventory()
    assert found.problems == ()
    assert [node.host for node in found.nodes] == ["node1", "node2"]
    for node in found.nodes:
        assert (node.state, node.total, node.free + node.used) == ("RUNNING", 2, 2)
    assert found.acls is False
    table = said(cluster_env)
    assert table.returncode == 0, table.stderr
    assert "node1  RUNNING" in table.stdout


@pytest.mark.yarn
def test_what_the_gpus_are_and_what_queues_may_have(cluster_env: dict[str, str]) -> None:
    found = hopsgpu.inventory()
    for node in found.nodes:
        (kind,) = node.types
        assert kind.count == 2
        assert kind.name
        assert (kind.memory_mib or 0) > 1024
        assert node.driver
    (queue,) = [queue for queue in found.queues if queue.path == "root.default"]
    assert (queue.path, queue.maximum) == ("root.default", 4)
    assert found.types[0].name in said(cluster_env).stdout


def test_who_has_them_and_since_when_and_spread_puts_one_rank_on_each_node(
    spark: SparkSession,
    manager: ClusterManager,
    cluster_env: dict[str, str],
    gpus_back: Callable[[], int],
    is_yarn: bool,
) -> None:
    before, began = hopsgpu.inventory(), time.time()
    with hopsgpu.hold(workers=2, placement="spread", progress="off") as gang:
        # What a node has reported comes a heartbeat after the grant.
        assert until(lambda: hopsgpu.inventory().free == before.free - 2)
        found = as_json(cluster_env)
        ranks = gang.launch(os.getpid, progress="off").ranks
    assert {rank.host for rank in ranks} == {"node1", "node2"}
    ours = spark.sparkContext.applicationId
    (user,) = [user for user in found["users"] if user["id"] == ours]
    assert (user["gpus"], user["hosts"]) == (2, {"node1": 1, "node2": 1})
    assert user["name"] == spark.sparkContext.appName
    # The application is older than its GPUs.
    assert user["started"] < began - 1
    assert found["gpus"]["used"] == before.used + 2
    assert found["gpus"]["obtainable"] <= before.free - 2
    if is_yarn:
        assert user["queue"] == "root.default"
        assert began - 1 <= user["since"] <= found["time"]
        (queue,) = [queue for queue in found["queues"] if queue["path"] == "root.default"]
        assert queue["used"] == before.used + 2
        assert queue["obtainable"] == found["gpus"]["obtainable"]
    assert until(lambda: hopsgpu.inventory().used == before.used)
    assert until(lambda: ours not in {user.id for user in hopsgpu.inventory().users})


@pytest.mark.yarn
def test_a_node_manager_that_is_frozen_is_one_line_and_the_rest(
    cluster_env: dict[str, str], cluster_dir: Path
) -> None:
    (pid,) = [d.pid for d in devcluster.status(cluster_dir).daemons if d.name == "node2"]
    os.kill(pid, signal.SIGSTOP)
    try:
        ran = said(cluster_env)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ran.returncode == 0
    (problem,) = [line for line in ran.stdout.splitlines() if line.startswith("node2: ")]
    assert problem == "node2: the NodeManager does not describe its GPUs: timed out"
    rows = {line.split()[0]: line for line in ran.stdout.splitlines() if "RUNNING" in line}
    assert set(rows) == {"node1", "node2"}
    # Until the ResourceManager misses it, which takes ten minutes, its GPUs are there.
    assert rows["node2"].split()[4:6] == ["2", "-"]
    assert until(lambda: not hopsgpu.inventory().problems)


@pytest.mark.yarn
def test_a_resource_manager_that_is_not_there_is_one_line(
    cluster_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "yarn-site.xml").write_text(
        '<configuration><property name="yarn.resourcemanager.webapp.address"'
        ' value="127.0.0.1:1"/></configuration>'
    )
    ran = said({**cluster_env, "HADOOP_CONF_DIR": str(tmp_path), "YARN_CONF_DIR": str(tmp_path)})
    assert (ran.returncode, ran.stdout) == (1, "")
    assert len(ran.stderr.splitlines()) == 1
    assert "http://127.0.0.1:1: Connection refused" in ran.stderr
