"""Attempts on a real cluster: lost executors, blamed GPUs, unreachable drivers, records."""

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
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.control.server import ControlServer
from hopsgpu.core.run_values import RunStatus
from tests.bounds import HANG_SECONDS
from tests.cluster.test_launch import gang_jvms
from tests.conftest import gpus_become, until
from tests.in_ranks import kill_when_noted


def containers_of(directory: Path, attempt: int) -> list[str]:
    """What the ranks of an attempt have noted."""
    return [(directory / f"{attempt}-{rank}").read_text() for rank in (0, 1)]


def test_a_lost_executor_is_replaced_and_the_other_kept(
    spark: SparkSession, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    states: list[str] = []

    def note(status: RunStatus) -> None:
        if states[-1:] != [status.state]:
            states.append(status.state)

    given = (str(tmp_path), 1, "executor")
    result = hopsgpu.launch(kill_when_noted, args=given, workers=2, retries=1, progress=note)
    assert [attempt for attempt, _ in result.values] == [1, 1]
    (kept, lost), after = containers_of(tmp_path, 0), containers_of(tmp_path, 1)
    assert kept in after and lost not in after and len(set(after)) == 2
    # Whether the function was seen to run where the executor was killed at once is chance.
    assert states.count("starting") == 2 and "waiting" in states[states.index("starting") :]
    assert states[-3:] == ["running", "releasing", "succeeded"]
    phases = dict(result.timeline.phases())
    assert list(phases) == ["earlier attempts", "waited", "started", "trained", "released"]
    (warning,) = result.warnings
    assert "attempt 0 failed (infrastructure): the executor of rank 1 on node" in warning
    assert result.gpu_seconds.training < result.gpu_seconds.held


@pytest.mark.soak
def test_a_gpu_to_blame_gets_no_rank_in_the_next_attempt(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    def breaks() -> tuple[str, ...]:
        import torch
        import torch.distributed as dist

        context = hopsgpu.context()
        dist.init_process_group("gloo")
        word, total = torch.zeros(1), torch.ones(1)
        if context.attempt == 0 and context.rank == 1:
            dist.recv(word, 0)
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        reducing = dist.all_reduce(total, async_op=True)
        if context.attempt == 0:
            dist.send(word, 1)
        # The peer of a rank that fails raises RuntimeError too: its connection is closed.
        reducing.wait()
        return context.gpus

    result = hopsgpu.launch(breaks, workers=2, retries=1, progress="off")
    (warning,) = result.warnings
    assert "rank 1 on node" in warning and "raised RuntimeError: CUDA error" in warning
    bad = warning.partition("GPU ")[2].partition(")")[0]
    assert bad.startswith("GPU-")
    assert bad not in {gpu for gpus in result.values for gpu in gpus}
    assert gpus_become(manager, 0)


def test_the_first_executor_that_cannot_reach_the_driver_ends_the_launch(
    spark: SparkSession,
    gpus_back: Callable[[], int],
    cluster_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Port 1 has no listener.
    monkeypatch.setattr(ControlServer, "port", property(lambda _: 1))
    given_up = threading.Event()
    states: set[str] = set()

    def note(status: RunStatus) -> None:
        states.add(status.state)
        if status.state == "releasing":
            given_up.set()

    others = gang_jvms(cluster_dir)
    run = hopsgpu.submit(os.getpid, workers=2, progress=note)
    assert until(lambda: len(gang_jvms(cluster_dir) - others) == 2, step=0.02)
    # One never gets as far as to register. Of one that has, the other would fetch Spark's
    # broadcast of the task, and wait for it until spark.network.timeout (120 s) is over.
    frozen = (gang_jvms(cluster_dir) - others).pop()
    os.kill(frozen, signal.SIGSTOP)
    began = time.monotonic()
    try:
        assert given_up.wait(HANG_SECONDS)
        print(f"given up {time.monotonic() - began:.1f} s after the executors were started")
    finally:
        # Spark can only end an executor that has registered.
        os.kill(frozen, signal.SIGCONT)
    with pytest.raises(hopsgpu.ConfigError, match=r"cannot be reached at .*:1 .*spark.hopsgpu"):
        run.result()
    assert states.isdisjoint({"granted", "ready"})
