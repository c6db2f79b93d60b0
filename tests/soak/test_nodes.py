"""Nodes without anything of ours, unhealthy or lost ones, and a network that is encrypted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hopsgpu import devcluster
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from hopsgpu.storage.lake_root import default_root
from tests.bounds import HANG_SECONDS
from tests.cluster.test_gpus import BROKEN, said_by
from tests.cluster.test_launch import executor_jvms
from tests.cluster.test_run import (
    SMALL,
    copy_of,
    has_snapshot,
    losses,
    losses_of_torchrun,
    running,
)
from tests.cluster.test_submit import ends
from tests.conftest import gone, gpus_become, until
from tests.processes import processes_of

# By default the ResourceManager waits ten minutes for a node, and health is looked at every ten.
CONF = {
    "yarn-site": {
        "yarn.nm.liveness-monitor.expiry-interval-ms": "15000",
        "yarn.nodemanager.health-checker.interval-ms": "5000",
    }
}

# A node that a test has lost stays so.
NODES = 5

# Beside another cluster's tests an application takes a minute and more to start.

TRAINING = """
    import sys, time
    from pathlib import Path
    import hopsgpu

    def train(directory):
        import os
        context = hopsgpu.context()
        Path(directory, f"{context.rank}-{context.host}").write_text(str(os.getpid()))
        while not Path(directory, "go").exists():
            time.sleep(0.1)
        return context.host

    hopsgpu.session("node-lost")
    try:
        result = hopsgpu.launch(train, args=(sys.argv[1],), workers=2, placement="spread")
    except hopsgpu.RankFailed as failure:
        print("failed", failure.host, failure)
        sys.exit(3)
    print("values", *result.values)
    print("released", result.timeline.released is not None, *result.warnings)
"""

ENCRYPTED = """
    import os
    import hopsgpu
    from hopsgpu.control import server

    made = []
    new_identity = server.new_identity
    server.new_identity = lambda: made.append(new_identity()) or made[-1]
    conf = {"spark.authenticate": True, "spark.network.crypto.enabled": True}
    hopsgpu.session("encrypted", conf=conf)
    result = hopsgpu.launch(lambda: "x" * 2_000_000, workers=2)
    print("values", *map(len, result.values), "certificates", len(made))
"""

BARE = """
    import hopsgpu

    def where():
        import sys
        return sys.executable, hopsgpu.__file__

    spark = hopsgpu.session("bare")
    assert spark.sparkContext.parallelize([1], 1).map(lambda x: x + 1).collect() == [2]
    for executable, package in hopsgpu.launch(where, workers=2).values:
        print(executable, package)
"""


class Training(NamedTuple):
    """What runs on two nodes, by rank; of `lost`'s the application's master is not."""

    driver: subprocess.Popen[str]
    hosts: list[str]
    pids: list[int]
    lost: int


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("nodes")
    try:
        devcluster.up(directory, nodes=NODES, conf=CONF)
        yield directory
    finally:
        devcluster.down(directory)


def started(
    own_cluster: Path, script: str, *arguments: str, **variables: str
) -> subprocess.Popen[str]:
    # Modules beside a script travel; this project is not to be among them.
    scripts = own_cluster.with_name("scripts")
    scripts.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=scripts,
        env={**os.environ, **devcluster.environment(own_cluster), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(own_cluster: Path, script: str, **variables: str) -> tuple[str, str]:
    """What a driver writes on stdout and stderr, which ends within five minutes."""
    driver = started(own_cluster, script, **variables)
    try:
        return driver.communicate(timeout=HANG_SECONDS)
    finally:
        driver.kill()
        driver.wait()


def resource_manager(own_cluster: Path) -> ResourceManager:
    (web,) = (d.web for d in devcluster.status(own_cluster).daemons if d.name == "resourcemanager")
    return ResourceManager((web,))


def test_nothing_of_ours_need_be_on_the_nodes(own_cluster: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    library = tmp_path / "env" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # All that is installed here, but not what is installed editable, as hopsgpu is.
    (library / "all.pth").write_text(sysconfig.get_path("purelib"))
    for module, is_missing in (("pyspark", 0), ("hopsgpu", 1)):
        ran = subprocess.run([python, "-c", f"import {module}"], cwd=tmp_path, check=False)
        assert ran.returncode == is_missing
    said, problem = finished(own_cluster, BARE, PYSPARK_PYTHON=str(python))
    lines = said.splitlines()
    assert len(lines) == 2, problem
    for line in lines:
        assert line.startswith(f"{python} ") and "/hopsgpu-shipped.zip/hopsgpu/" in line
    assert gpus_become(resource_manager(own_cluster), 0)


def test_where_spark_encrypts_the_control_channel_does_too(own_cluster: Path) -> None:
    said, problem = finished(own_cluster, ENCRYPTED)
    assert "values 2000000 2000000 certificates 1" in said, problem
    assert gpus_become(resource_manager(own_cluster), 0)


@contextlib.contextmanager
def training(own_cluster: Path, directory: Path) -> Iterator[Training]:
    """Ranks on two nodes, of whom and of whose GPUs nothing is left at the end."""
    driver = started(own_cluster, TRAINING, str(directory))
    try:
        assert until(lambda: len(list(directory.glob("?-node?"))) == 2)
        files = sorted(directory.glob("?-node?"))
        assert until(lambda: all(f.read_text() for f in files))
        hosts = [file.name.partition("-")[2] for file in files]
        pids = [int(file.read_text()) for file in files]
        apps = resource_manager(own_cluster).ask("/ws/v1/cluster/apps?states=RUNNING")
        master = apps["apps"]["app"][0]["amHostHttpAddress"].partition(":")[0]
        # A lost master is the end of the application, whatever becomes of the ranks.
        yield Training(driver, hosts, pids, int(hosts[0] == master))
        assert until(lambda: all(map(gone, pids)))
        assert gpus_become(resource_manager(own_cluster), 0, seconds=120)
    finally:
        driver.kill()
        driver.communicate()


def test_a_node_without_a_usable_gpu_is_unhealthy_and_comes_back(
    own_cluster: Path, tmp_path: Path
) -> None:
    manager = resource_manager(own_cluster)
    with training(own_cluster, tmp_path) as trained:
        host = trained.hosts[trained.lost]

        def state() -> str:
            return next(node.state for node in manager.nodes() if node.host == host)

        assert state() == "RUNNING"
        with said_by(
            own_cluster / "nodes" / host,
            lambda said: said.replace("<product_name>", f"{BROKEN}<product_name>"),
        ):
            assert until(lambda: state() == "UNHEALTHY")
            assert {n.state for n in manager.nodes() if n.host != host} == {"RUNNING"}
            said, problem = trained.driver.communicate(timeout=HANG_SECONDS)
            print(said)
            assert trained.driver.returncode == 3, problem
            assert f"\nfailed {host} the executor of rank {trained.lost} on {host} was lost" in said
            assert "UNHEALTHY, and an unhealthy node loses all containers; its health" in said
            assert "check says: ERROR" in said
        assert until(lambda: state() == "RUNNING")


def kill_node_manager(own_cluster: Path, host: str) -> None:
    (manager,) = (d for d in devcluster.status(own_cluster).daemons if d.name == host)
    os.kill(manager.pid, signal.SIGKILL)
    assert until(lambda: gone(manager.pid))


def test_a_node_manager_that_is_killed_does_not_end_the_training(
    own_cluster: Path, tmp_path: Path
) -> None:
    """Its containers live on; they are lost for good only when YARN gives the node up."""
    with training(own_cluster, tmp_path) as trained:
        kill_node_manager(own_cluster, trained.hosts[trained.lost])
        (tmp_path / "go").touch()
        said, problem = trained.driver.communicate(timeout=HANG_SECONDS)
        assert f"values {' '.join(trained.hosts)}" in said, problem
        print(said)


def test_a_node_manager_that_stays_lost_ends_the_training_and_is_named(
    own_cluster: Path, tmp_path: Path
) -> None:
    """Spark is told when YARN gives the node up; the ranks there, out of YARN's reach, end too."""
    with training(own_cluster, tmp_path) as trained:
        kill_node_manager(own_cluster, trained.hosts[trained.lost])
        said, problem = trained.driver.communicate(timeout=HANG_SECONDS)
        print(said)
        assert trained.driver.returncode == 3, problem
        host = trained.hosts[trained.lost]
        assert f"\nfailed {host} the executor of rank {trained.lost} on {host} was lost" in said
        assert "its NodeManager was lost: it did not report to the ResourceManager" in said
        assert "Spark says: " in said


def node_of(own_cluster: Path, pid: int) -> str:
    """The node in whose directory a process of a container runs."""
    return Path(f"/proc/{pid}/cwd").readlink().relative_to(own_cluster / "nodes").parts[0]


def kill_node(own_cluster: Path, host: str) -> None:
    """Kill all that runs on a node at once, as the loss of its power does."""
    pids = {p for p in processes_of(own_cluster, b"") if node_of_container(own_cluster, p) == host}
    kill_node_manager(own_cluster, host)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def node_of_container(own_cluster: Path, pid: int) -> str:
    try:
        return node_of(own_cluster, pid)
    except (OSError, ValueError):  # it has ended, or is a daemon
        return ""


def test_a_script_continues_from_its_snapshot_after_the_loss_of_a_node(
    own_cluster: Path, tmp_path: Path
) -> None:
    epochs, ddp = "12", copy_of("ddp", tmp_path)
    expected = losses_of_torchrun(ddp, "train.py", "--epochs", epochs)
    for left in ("snapshots", "out"):
        shutil.rmtree(ddp / left)
    env = {**os.environ, **devcluster.environment(own_cluster)}
    command = (*SMALL, "--workers", "2", "--placement", "spread", "--max-restarts", "3")
    arguments = ("--checkpoint-dir", "snapshots", "train.py", "--epochs", epochs, "--pause", "1.5")
    run = running(env, ddp, *command, *arguments)
    try:
        assert until(lambda: has_snapshot(default_root(env), run)), run.err.read_text()
        apps = resource_manager(own_cluster).ask("/ws/v1/cluster/apps?states=RUNNING")
        master = apps["apps"]["app"][0]["amHostHttpAddress"].partition(":")[0]
        hosts = {node_of(own_cluster, pid) for pid in executor_jvms(own_cluster)}
        assert len(hosts) == 2
        kill_node(own_cluster, min(hosts - {master}))
        ((code, out, err),) = ends(run)
    finally:
        run.process.kill()
    assert code == 0, out + err
    printed = losses(out)
    assert dict.fromkeys(printed) == dict.fromkeys(expected), out
    assert printed[-1] == expected[-1]
    # The snapshot of an epoch is on the lake before the next one is over.
    assert len(printed) - len(expected) <= 2, out
    assert "continues at epoch" in out + err
    assert gpus_become(resource_manager(own_cluster), 0, seconds=120)
