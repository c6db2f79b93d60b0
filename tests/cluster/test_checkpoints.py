"""Trainings that are killed and go on, on the real cluster: the examples, and what they leave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.in_ranks import who_and_where

STEPS = 6


@pytest.fixture(scope="module")
def gang(spark: SparkSession) -> Iterator[hopsgpu.Gang]:
    """Two ranks on CPUs."""
    with hopsgpu.hold(workers=2, gpus_per_worker=0, progress="off") as held:
        yield held


def runs(gang: hopsgpu.Gang) -> LakePath:
    """Where runs leave what they left, once their logs are there, which is soon after them."""
    gang._background.flush(HANG_SECONDS)
    return LakePath(f"{hopsgpu.plan(sys.exit).paths['root']}/runs")


def check_that_it_goes_on(gang: hopsgpu.Gang, train: Callable[..., float], workers: int) -> None:
    """Kills a training at step 4: the next attempt, or a later run, comes to the same loss."""
    whole = gang.launch(train, args=(STEPS,), progress="off")
    assert whole.warnings == () and len(set(whole.values)) == 1

    retried = gang.launch(train, args=(STEPS, 4), retries=1, progress="off")
    assert retried.values == pytest.approx(whole.values, abs=1e-6)
    assert len(retried.warnings) == 1 and "attempt 0 failed (rank)" in retried.warnings[0]
    assert "SIGKILL" in retried.warnings[0]

    with pytest.raises(hopsgpu.RankFailed) as failed:
        gang.launch(train, args=(STEPS, 4), progress="off")
    assert failed.value.signal == "SIGKILL"
    killed = failed.value.result.run_id
    resumed = gang.launch(train, args=(STEPS,), resume=killed, progress="off")
    assert resumed.values == pytest.approx(whole.values, abs=1e-6)
    for rank in range(workers):
        for log in (f"{retried.run_id}/logs/attempt-1", f"{resumed.run_id}/logs"):
            assert b"resumes at step 4\n" in (runs(gang) / log / f"rank-{rank}.log").read()

    there = runs(gang) / resumed.run_id / "checkpoints"
    assert there.names() == ("4", "5", "_ranks", "_staging")
    assert (there / "_staging").names() == ()


@pytest.mark.soak
def test_a_sharded_model_of_torch_goes_on(
    gang: hopsgpu.Gang, example: Callable[[str], ModuleType]
) -> None:
    check_that_it_goes_on(gang, example("checkpoint_torch").train, 2)


@pytest.mark.soak
def test_a_checkpoint_of_tensorflow_goes_on(
    spark: SparkSession, nothing_warmed: None, example: Callable[[str], ModuleType]
) -> None:
    with hopsgpu.hold(workers=1, gpus_per_worker=0, progress="off") as alone:
        check_that_it_goes_on(alone, example("checkpoint_tensorflow").train, 1)


def test_a_gang_on_cpus_takes_no_gpu(gang: hopsgpu.Gang, manager: ClusterManager) -> None:
    result = gang.launch(who_and_where, progress="off")
    assert [value[4] for value in result.values] == ["", ""]
    assert manager.gpus()[0] == 0
    assert result.gpu_seconds.held == 0


def test_what_a_rank_logs_grows_on_the_lake(gang: hopsgpu.Gang) -> None:
    def train() -> list[int]:
        import time
        from pathlib import Path

        context = hopsgpu.context()
        events = Path(context.log_dir, "events.out.tfevents.1")
        seen = []
        for number in range(3):
            with events.open("ab") as file:
                file.write(b"event %d of rank %d\n" % (number, context.rank))
            there = LakePath(context.log_dir_url) / f"rank-{context.rank}"
            deadline = time.monotonic() + HANG_SECONDS
            while number < 2 and time.monotonic() < deadline:
                sizes = [entry.size for entry in there.entries()] if there.names() else []
                if sizes == [events.stat().st_size]:
                    seen.append(number)
                    break
                time.sleep(0.1)  # nobody tells
        return seen

    result = gang.launch(train, progress="off")
    assert result.values == ([0, 1], [0, 1]) and result.warnings == ()
    logs = runs(gang) / result.run_id / "tensorboard"
    for rank in range(2):
        content = (logs / f"rank-{rank}" / "events.out.tfevents.1").read()
        assert content == b"".join(b"event %d of rank %d\n" % (n, rank) for n in range(3))
