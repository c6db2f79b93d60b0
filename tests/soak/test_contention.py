"""Several applications, crashed ones and foreign ones on the same GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.shortage import Shortage
from hopsgpu.core.queue_policy import Bound
from tests.bounds import HANG_SECONDS
from tests.conftest import gpus_become, until
from tests.contention import CONTENDER, both_finish, start_script


def test_two_applications_that_want_more_than_there_is_both_finish(
    cluster_env: dict[str, str], manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    """Twice; tests/cluster/test_submit.py has two that want all there is."""
    both_finish(cluster_env, workers=3, launches=2)


def test_many_launches_of_all_sizes_in_one_application_all_finish(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    sizes = (3, 1, 4, 2)
    runs = [
        hopsgpu.submit(hopsgpu.context, workers=size, name=f"of-{size}", progress="off")
        for size in sizes
    ]
    for size, run in zip(sizes, runs, strict=True):
        assert [context.world_size for context in run.result().values] == [size] * size


def test_whoever_crashes_while_it_asks_stops_nobody(
    cluster_env: dict[str, str],
    spark: SparkSession,
    manager: ClusterManager,
    gpus_back: Callable[[], int],
) -> None:
    queue = application_of(spark).gang_queue_dir
    crashing = start_script(cluster_env, CONTENDER, 4, 1, 60)
    try:
        assert until(lambda: any(name.startswith("asking") for name in queue.names()))
        # YARN ends what was asked for, and the ticket expires.
        crashing.kill()
        began = time.monotonic()
        assert hopsgpu.launch(os.getpid, workers=4, cores_per_worker=1, progress="off").value
        assert time.monotonic() - began < HANG_SECONDS
    finally:
        crashing.kill()
        crashing.communicate()


def test_a_foreign_application_only_makes_it_wait(
    cluster_env: dict[str, str],
    spark: SparkSession,
    manager: ClusterManager,
    gpus_back: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An application outside the queue of gangs takes GPUs between our poll and our request."""
    monkeypatch.setattr("hopsgpu.core.gang.PART_SECONDS", 5.0)
    # It asks whatever it sees, as if the foreign one had come just after it looked.
    monkeypatch.setattr(
        "hopsgpu.backends.spark.queued_gang.shortage", lambda *_: Shortage(Bound.NONE, "")
    )
    foreign = """
        import sys, time
        from pyspark.resource import *
        import hopsgpu
        from hopsgpu.backends.spark.resource_profiles import build_profile
        from hopsgpu.core.spec import ExecutorShape
        context = hopsgpu.session("foreign").sparkContext
        two = context.parallelize(range(2), 2).withResources(
            build_profile(ExecutorShape(1, 1, 512, 1024)))
        print("asking", flush=True)
        two.map(lambda _: time.sleep(40)).collect()
    """
    other = start_script(cluster_env, foreign)
    try:
        assert other.stdout is not None and other.stdout.readline() == "asking\n"
        # Else ours could get all of them first.
        assert gpus_become(manager, 2, HANG_SECONDS)
        run = hopsgpu.submit(
            os.getpid, workers=4, cores_per_worker=1, progress="off", acquire_timeout="3m"
        )
        said = set()
        while not run.wait(0.3):
            said.add(str((run.status().waiting_for, run.status().waiting_details)))
        assert len(run.result().values) == 4
        assert any("'foreign' of" in text for text in said), said
        assert any("executors back, so that others go first" in text for text in said), said
    finally:
        other.kill()
        other.communicate()
