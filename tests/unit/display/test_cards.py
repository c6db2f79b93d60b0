"""What notebooks show of values: readable, escaped, bounded, and with no look at the lake."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Protocol

import pytest

from hopsgpu.artifacts.versions import ModelVersion
from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus, GpuNode, GpuType, GpuUser
from hopsgpu.core.gang import GangState
from hopsgpu.core.run_values import GpuSeconds, RankReport, Timeline, WorldReport
from hopsgpu.core.spec import ExecutorShape, GangSpec, GpuRequest, LaunchPlan
from hopsgpu.core.wait_reasons import WaitReason
from hopsgpu.display.progress import progress_of
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.run import Run
from hopsgpu.runs.status_board import GangBoard

NASTY = "<script>alert(1)</script>"


class Shown(Protocol):
    def _repr_html_(self) -> str: ...


GPU = "GPU-0a2b3c4d-1111-2222-3333-444455556666"


def result(ranks: int = 2) -> GangResult:
    return GangResult(
        run_id="run-1",
        values=({"note": NASTY},) * ranks,
        metrics=({"step": 3, NASTY: 0.25, "gpu.0.power": 90.0},) * ranks,
        warnings=(f"warned: {NASTY}",),
        ranks=tuple(
            RankReport(rank, "worker", f"node{rank}", (GPU, NASTY), 17, 0, None, 2**30, 0.5)
            for rank in range(ranks)
        ),
        model=ModelVersion("digits", 3, "hdfs://nowhere/models/digits/3"),
        timeline=Timeline(requested=100.0, granted=107.5),
        gpu_seconds=GpuSeconds(held=8.0, training=4.0),
    )


def run() -> Run:
    board = GangBoard("run-1", wanted=2, gpus=1, progress=progress_of("off"))
    board.state(GangState.WAITING, ["node1"], WaitReason(NASTY))
    return Run(board, threading.Event(), result, lambda body: None)


PLAN = LaunchPlan(
    GangSpec("digits", workers=2, gpus=GpuRequest(1), env_vars={"A": "b"}),
    executors=2,
    ranks_per_executor=1,
    shape=ExecutorShape(1, 1, 512, 1024),
    queue="root.default",
    environment={"A": NASTY},
    paths={"root": "hdfs://nowhere"},
)
NODE = GpuNode("node1", "RUNNING", "", (GpuType("A100", 81920, 2),), "550", 2, 1, 1, 0, "")
CLUSTER = ClusterGpus(
    time=0.0,
    user="ann",
    nodes=(NODE,),
    nodes_without=0,
    users=(GpuUser("application_1", NASTY, "bob", "root.default", 1, None, 0.0, {}),),
    queues=(),
    unexplained=0,
    acls=None,
    executor="",
    problems=(NASTY,),
)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            result(),
            ["waited 7.5 s", "held 8.0", "digits/3", "node1", "50%", "1.00 GiB", "host memory"],
        ),
        (run(), ["run-1", "waiting", "1 of 2 executors on node1"]),
        (PLAN, ["2 ranks in 2 executors", "root.default"]),
        (ModelVersion(f"digits{NASTY}", 3, "hdfs://nowhere/3"), ["version 3", "hdfs://nowhere/3"]),
        (CLUSTER, ["1 of 2 free", "2 × A100", "application_1", "bob"]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_values_are_readable_and_escaped(value: Shown, words: list[str]) -> None:
    shown = value._repr_html_()
    for word in words:
        assert word in shown, shown
    assert "&lt;script&gt;" in shown and "<script" not in shown, shown


def test_a_result_of_many_ranks_is_bounded() -> None:
    shown = result(10_000)._repr_html_()
    assert "and 9,936 more" in shown and len(shown) < 100_000


def test_an_empty_result_has_a_card() -> None:
    assert "run-2" in GangResult("run-2")._repr_html_()


def test_a_cluster_that_nobody_uses_has_no_table_of_users() -> None:
    assert "application" in CLUSTER._repr_html_()
    assert "application" not in replace(CLUSTER, users=())._repr_html_()


def test_the_worlds_of_an_elastic_gang_are_in_its_card() -> None:
    worlds = (
        WorldReport(0, 2, ("node1",), 110.0, 112.0, 130.0, "lost", NASTY, None, 40.0),
        WorldReport(1, 3, ("node1",), 131.0, 134.0, 150.0, "returned", "", 5.5, 57.0),
    )
    given = replace(result(), worlds=worlds)
    shown = given._repr_html_()
    for word in ("ranks of the worlds: 2, 3", "resize", "5.5 s", "57.0", "returned", "50.0 s"):
        assert word in shown, shown
    assert "&lt;script&gt;" in shown and "<script" not in shown
    assert "2 worlds of [2, 3] ranks" in repr(given)
    assert "world" not in result()._repr_html_() + repr(result())
