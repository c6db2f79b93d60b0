"""Four executors on two nodes of two GPUs get four GPUs, again and again; and a node's health."""

from __future__ import annotations

import os

import pytest

from hopsgpu import cluster
from hopsgpu.yarn.resource_manager import ResourceManager
from tests.conftest import until
from tests.contention import start_script

ROUNDS = 20

LAUNCHES = f"""
    import os, signal
    import hopsgpu

    def gpus(kill):
        context = hopsgpu.context()
        # Whoever holds the lease is killed with all that it has, or before it.
        if kill == "keeper" and context.rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        if kill == "rank" and context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return context.gpus

    hopsgpu.session("gpus")
    for number in range({ROUNDS}):
        kill = ("", "rank", "keeper")[number % 3]
        try:
            result = hopsgpu.launch(gpus, args=(kill,), workers=4, progress="off")
        except hopsgpu.RankFailed as error:
            result = error.result
            assert kill, error
        ranks = [gpu for rank in result.ranks for gpu in rank.gpus]
        print("round", number, kill or "none", len(ranks), len(set(ranks)), flush=True)
"""


def test_four_executors_get_four_gpus_across_kills(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("gpus")
    cluster.up(directory)
    try:
        script = start_script({**os.environ, **cluster.environment(directory)}, LAUNCHES)
        out, err = script.communicate(timeout=900)
        assert script.returncode == 0, err[-3000:]
        rounds = [line.split()[1:] for line in out.splitlines() if line.startswith("round")]
        assert [int(number) for number, *_ in rounds] == list(range(ROUNDS))
        for number, kill, ranks, different in rounds:
            assert ranks == different, (number, kill)
            assert kill != "none" or ranks == "4"
    finally:
        cluster.down(directory)


def test_a_node_without_a_usable_gpu_is_unhealthy_and_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("health")
    often = {"yarn-site": {"yarn.nodemanager.health-checker.interval-ms": "1000"}}
    cluster.up(directory, conf=often)
    try:
        daemons = cluster.status(directory).daemons
        (web,) = (daemon.web for daemon in daemons if daemon.name == "resourcemanager")
        manager = ResourceManager((web,))
        smi = directory / "nodes" / "node1" / "bin" / "nvidia-smi"
        before = smi.read_text()

        def state() -> str:
            return next(node.state for node in manager.nodes() if node.host == "node1")

        assert state() == "RUNNING"
        broken = before.replace(
            "<product_name>",
            "<remapped_rows><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>"
            "<product_name>",
        )
        smi.write_text(broken)
        assert until(lambda: state() == "UNHEALTHY", 60)
        assert [n.state for n in manager.nodes() if n.host != "node1"] == ["RUNNING"]
        smi.write_text(before)
        assert until(lambda: state() == "RUNNING", 60)
    finally:
        cluster.down(directory)
