"""`hopsgpu doctor` and `hopsgpu-submit` on a real cluster; tests/soak has one that is broken."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import hopsgpu
from hopsgpu.cluster_managers.manager import ClusterManager
from tests.bounds import HANG_SECONDS
from tests.conftest import until

pytestmark = pytest.mark.usefixtures("nothing_warmed")
ROOT = Path(__file__).resolve().parents[2]
Found = dict[str, dict[str, Any]]
# A script that knows nothing of hopsgpu.session(), which starts again where the UI trips Spark.
SCRIPT = """
    import os, sys
    from pyspark.sql import SparkSession
    import hopsgpu

    spark = SparkSession.builder.appName("own").config("spark.ui.enabled", "false").getOrCreate()
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
        timeout=HANG_SECONDS,
        check=False,
    )
    assert ran.stdout, ran.stderr
    checks = [json.loads(line) for line in ran.stdout.splitlines()]
    return ran.returncode, {check["name"]: check for check in checks}


def states(found: Found) -> dict[str, str]:
    return {name: check["state"] for name, check in found.items()}


def own_script(directory: Path) -> list[str]:
    """What spark-submit is given: the script, with an archive of the user's own."""
    script, mine = directory / "own.py", directory / "mine.zip"
    script.write_text(textwrap.dedent(SCRIPT))
    (directory / "f.txt").write_text("mine")
    zipped = [sys.executable, "-m", "zipfile", "-c", mine, directory / "f.txt"]
    subprocess.run(zipped, check=True)
    return ["--archives", f"{mine}#mine", str(script), "a b"]


def submitted(command: list[str], env: dict[str, str]) -> None:
    """Runs the script, which must see the archive and launch."""
    ran = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert ran.stdout.splitlines() == ["given [True] launched True a b"], ran.stderr[-2000:]


@pytest.mark.soak
def test_a_whole_cluster_with_one_node_in_use(
    cluster_env: dict[str, str], spark: Any, manager: ClusterManager
) -> None:
    with hopsgpu.hold(workers=2, placement="pack", memory_per_worker="512m", progress="off"):
        assert until(lambda: any(node.used.gpus == 2 for node in manager.nodes()))
        held = next(node for node in manager.nodes() if node.used.gpus == 2)
        code, found = doctor(cluster_env)
    (free,) = (node.host for node in manager.nodes() if node.host != held.host)
    simulated = "simulated" in found["cuda"]["seen"]
    unknown = {"discovery", *(["cuda"] if simulated else [])}
    assert {name for name, state in states(found).items() if state != "ok"} == unknown
    assert code == 0
    assert found["discovery"]["seen"] == f"ran on 1 node ({free}); 1 not checked"
    (why,) = found["discovery"]["details"]
    user = spark.sparkContext.applicationId
    assert re.match(f"{held.host} not checked: its 2 GPUs are in use by {user} .* \\(2\\)", why)
    for name in ("executor python", "executor java", "executor spark"):
        assert re.match(r"\d+\.\d+\.", found[name]["seen"]), found[name]


@pytest.mark.yarn
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


@pytest.mark.yarn
@pytest.mark.soak
def test_a_context_of_the_users_own_holds_a_gang(
    cluster_env: dict[str, str], tmp_path: Path
) -> None:
    submitted([str(ROOT / "yarn-scripts" / "hopsgpu-submit"), *own_script(tmp_path)], cluster_env)
