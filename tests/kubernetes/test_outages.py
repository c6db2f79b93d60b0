"""Gangs while parts of Kubernetes are away: the API server, a kubelet, a whole node."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu import devcluster
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.devcluster.layout import API_SERVER
from tests.conftest import gpus_become, until
from tests.processes import family

_AWAY_SECONDS = 30.0


def wait_for(file: str) -> str:
    """Return the node once a file exists."""
    while not Path(file).exists():
        threading.Event().wait(0.1)
    return os.environ["NM_HOST"]


def pid_of(cluster_dir: Path, daemon: str) -> int:
    (pid,) = [d.pid for d in devcluster.status(cluster_dir).daemons if d.name == daemon]
    return pid


def processes_named(pid: int, name: str) -> list[int]:
    """Return a process's descendants with a name."""
    return [
        process
        for process in family(pid)
        if Path(f"/proc/{process}/comm").read_text().strip() == name
    ]


def test_an_api_server_that_is_away_neither_ends_nor_hides_a_training(
    spark: SparkSession,
    manager: ClusterManager,
    cluster_dir: Path,
    gpus_back: Callable[[], int],
    tmp_path: Path,
) -> None:
    server = pid_of(cluster_dir, API_SERVER)
    run = hopsgpu.submit(wait_for, args=(str(tmp_path / "go"),), workers=2, progress="off")
    assert until(lambda: run.status().state == "running")
    os.kill(server, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert until(lambda: time.monotonic() - began > _AWAY_SECONDS, step=1.0)
        assert run.status().state == "running"
    finally:
        os.kill(server, signal.SIGCONT)
    (tmp_path / "go").touch()
    result = run.result()
    assert len(result.values) == 2 and result.timeline.released is not None
    assert gpus_become(manager, 0)


def test_a_gang_waits_while_the_api_server_is_away(
    spark: SparkSession, manager: ClusterManager, cluster_dir: Path, gpus_back: Callable[[], int]
) -> None:
    server = pid_of(cluster_dir, API_SERVER)
    hopsgpu.plan(os.getpid, workers=2)
    os.kill(server, signal.SIGSTOP)
    try:
        with pytest.raises(hopsgpu.HopsGpuError, match="does not answer"):
            manager.nodes()
    finally:
        os.kill(server, signal.SIGCONT)
    assert hopsgpu.launch(abs, args=(-1,), workers=2, progress="off").values == (1, 1)
    assert gpus_become(manager, 0)


def test_a_kubelet_that_is_stopped_does_not_end_a_training(
    spark: SparkSession,
    manager: ClusterManager,
    cluster_dir: Path,
    gpus_back: Callable[[], int],
    tmp_path: Path,
) -> None:
    """SIGSTOP stops the kubelet only: the pods of its node run on."""
    run = hopsgpu.submit(
        wait_for, args=(str(tmp_path / "go"),), workers=2, placement="spread", progress="off"
    )
    assert until(lambda: run.status().state == "running")
    (kubelet,) = processes_named(pid_of(cluster_dir, "node2"), "kubelet")
    os.kill(kubelet, signal.SIGSTOP)
    try:
        assert until(lambda: "NOT READY" in {node.state for node in manager.nodes()})
        (tmp_path / "go").touch()
        assert sorted(run.result().values) == ["node1", "node2"]
    finally:
        os.kill(kubelet, signal.SIGCONT)
    assert until(lambda: {node.state for node in manager.nodes()} == {"RUNNING"})
    assert gpus_become(manager, 0)


def test_a_node_that_is_gone_is_named_and_its_gpus_are_given_up(
    spark: SparkSession,
    manager: ClusterManager,
    cluster_dir: Path,
    gpus_back: Callable[[], int],
    tmp_path: Path,
) -> None:
    run = hopsgpu.submit(
        wait_for, args=(str(tmp_path / "go"),), workers=2, placement="spread", progress="off"
    )
    assert until(lambda: run.status().state == "running")
    os.kill(pid_of(cluster_dir, "node2"), signal.SIGKILL)
    try:
        with pytest.raises(hopsgpu.RankFailed, match="node2") as lost:
            run.result()
        assert lost.value.result.timeline.released is not None
        assert until(lambda: "NOT READY" in {node.state for node in manager.nodes()})
    finally:
        devcluster.up(cluster_dir, say=lambda _: None)
    assert until(lambda: {node.state for node in manager.nodes()} == {"RUNNING"})
    assert gpus_become(manager, 0)
