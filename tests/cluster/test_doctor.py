"""`hopsgpu doctor` and the administrator's files on a real cluster, whole and broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hopsgpu
from hopsgpu import cluster
from hopsgpu.cluster import admin
from hopsgpu.spark.submission import pack
from hopsgpu.stores.lake import Lake
from hopsgpu.yarn.resource_manager import ResourceManager

ROOT = Path(__file__).resolve().parents[2]
Found = dict[str, dict[str, Any]]
FAILING = """#!/bin/sh
echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'
exit 9
"""
# A script that knows nothing of hopsgpu.session().
SCRIPT = """
    import os, sys
    from pyspark.sql import SparkSession
    import hopsgpu

    spark = SparkSession.builder.appName("own").getOrCreate()
    given = spark.sparkContext.parallelize([0], 1).map(lambda _: os.path.exists("mine/f.txt"))
    value = hopsgpu.launch(os.getcwd, workers=1, memory_per_worker="512m", progress="off").value
    print("given", given.collect(), "launched", bool(value), *sys.argv[1:])
"""


def doctor(env: dict[str, str], *arguments: str) -> tuple[int, Found]:
    """Its exit code, and its checks by name."""
    ran = subprocess.run(
        [sys.executable, "-m", "hopsgpu.cli.main", "doctor", "--json", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.stdout, ran.stderr
    checks = [json.loads(line) for line in ran.stdout.splitlines()]
    return ran.returncode, {check["name"]: check for check in checks}


def states(found: Found) -> dict[str, str]:
    return {name: check["state"] for name, check in found.items()}


def test_a_whole_cluster_with_one_node_in_use(
    cluster_env: dict[str, str], spark: Any, manager: ResourceManager
) -> None:
    with hopsgpu.hold(workers=2, placement="pack", memory_per_worker="512m", progress="off"):
        held = next(node for node in manager.nodes() if node.used.gpus == 2)
        code, found = doctor(cluster_env)
    (free,) = (node.host for node in manager.nodes() if node.host != held.host)
    simulated = "Simulated" in found["node managers"]["seen"]
    unknown = {"discovery", *(["cuda"] if simulated else [])}
    assert {name for name, state in states(found).items() if state != "ok"} == unknown
    assert code == 0
    assert found["discovery"]["seen"] == f"ran on 1 nodes ({free}); 1 not checked"
    (why,) = found["discovery"]["details"]
    user = spark.sparkContext.applicationId
    assert re.match(f"{held.host} not checked: its 2 GPUs are in use by {user} .* \\(2\\)", why)


@pytest.fixture
def broken_node(cluster_dir: Path) -> Iterator[str]:
    """A node whose nvidia-smi fails, as it does when the driver is gone."""
    smi = cluster_dir / "nodes" / "node2" / "bin" / "nvidia-smi"
    text = smi.read_text()
    smi.write_text(FAILING)
    try:
        yield "node2"
    finally:
        smi.write_text(text)


def test_a_node_that_gives_out_no_gpu_is_named_and_the_others_are_looked_at(
    cluster_env: dict[str, str], broken_node: str
) -> None:
    code, found = doctor(cluster_env)
    assert code == 1
    assert [name for name, state in states(found).items() if state == "wrong"] == ["discovery"]
    assert found["discovery"]["seen"] == "ran on 1 nodes (node1), and not on node2"
    (why,) = found["discovery"]["details"]
    assert why.startswith("node2: ")
    assert "could not communicate with the NVIDIA driver" in why
    assert found["executor python"]["state"] == "ok"


def test_what_is_wrong_before_a_session_is_told_without_one(
    cluster_env: dict[str, str], tmp_path: Path
) -> None:
    conf = tmp_path / "conf"
    conf.mkdir()
    for name in ("core-site.xml", "hdfs-site.xml", "yarn-site.xml"):
        (conf / name).write_text((Path(cluster_env["HADOOP_CONF_DIR"]) / name).read_text())
    env = {
        **cluster_env,
        "HADOOP_CONF_DIR": str(conf),
        "YARN_CONF_DIR": str(conf),
        "JAVA_HOME": str(tmp_path),
        "HOPSGPU_ROOT": "file:///proc/hopsgpu",
    }
    asked = ("--no-session", "--queue", "nowhere", "--conf", "spark.decommission.enabled=true")
    code, found = doctor(env, *asked)
    assert code == 1
    wrong = {name for name, state in states(found).items() if state == "wrong"}
    assert wrong == {"java", "resource types", "queue", "settings", "hdfs"}
    assert "root.default" in found["queue"]["seen"]
    assert "resource-types.xml" in found["resource types"]["mend"]
    assert "session" not in found


def test_queues_get_the_shares_of_gpus_of_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example that the development cluster is not made of, on a cluster of its own."""
    conf = {"capacity-scheduler": admin.yarn_file("capacity-scheduler-gpu-shares")}
    try:
        cluster.up(tmp_path, nodes=1, gpus_per_node=4, conf=conf)
        for name, value in cluster.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        queues = {queue.path: queue for queue in hopsgpu.inventory().queues}
        code, found = doctor(dict(os.environ), "--no-session", "--queue", "training")
    finally:
        cluster.down(tmp_path)
    default, training = queues["root.default"], queues["root.training"]
    assert (default.guaranteed, default.maximum) == (1, 2)
    assert (training.guaranteed, training.maximum) == (3, 4)
    assert code == 0, found
    assert found["queue"]["seen"] == "root.training: 3 GPUs guaranteed, at most 4, 0 used"


@pytest.mark.parametrize("way", ["hopsgpu-submit", "spark-defaults.conf"])
def test_a_context_of_the_users_own_holds_a_gang(
    cluster_env: dict[str, str], hdfs_url: str, tmp_path: Path, way: str
) -> None:
    script, mine = tmp_path / "own.py", tmp_path / "mine.zip"
    script.write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "f.txt").write_text("mine")
    subprocess.run([sys.executable, "-m", "zipfile", "-c", mine, tmp_path / "f.txt"], check=True)
    rest = ["--archives", f"{mine}#mine", str(script), "a b"]
    if way == "hopsgpu-submit":
        command = [str(ROOT / "yarn-scripts" / way), *rest]
    else:
        # As an administrator installs it, with the lines that are commented out.
        shipped = Lake(f"{hdfs_url}/apps/hopsgpu")
        shipped.make()
        for file in pack(tmp_path):
            (shipped / file.name).upload(file)
        text = (ROOT / "spark-conf" / way).read_text()
        text = re.sub(r"^#(?=spark\.)", "", text, flags=re.MULTILINE)
        own = Path(cluster_env["SPARK_CONF_DIR"], way).read_text()
        (tmp_path / way).write_text(text + own)
        submit = f"{cluster_env['SPARK_HOME']}/bin/spark-submit"
        command = [submit, "--properties-file", str(tmp_path / way), *rest]
    ran = subprocess.run(
        command, env=cluster_env, capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.stdout.splitlines() == ["given [True] launched True a b"], ran.stderr[-2000:]
