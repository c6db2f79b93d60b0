"""Each behaviour once, from the start of a cluster on; tests/cluster has their variants.

In the order of tests/matrix/behaviours.py, so that what a test starts is not counted for another.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu import devcluster
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager
from tests.bounds import HANG_SECONDS
from tests.cluster.test_doctor import doctor, states
from tests.cluster.test_submit import (
    application_in,
    client_env,
    ends,
    started,
    submitting,
)
from tests.conftest import executors_of, gone, gpus_become, until
from tests.contention import both_finish
from tests.in_ranks import executor_jvm, own_gpu, where

pytestmark = pytest.mark.usefixtures("nothing_warmed")
quiet = functools.partial(hopsgpu.launch, memory_per_worker="512m", progress="off")
JOB = """
    import sys
    import hopsgpu

    if __name__ == "__main__":
        hopsgpu.session("matrix")
        result = hopsgpu.launch(
            lambda: hopsgpu.context().gpus, workers=2, memory_per_worker="512m",
            cores_per_worker=1, progress="off", acquire_timeout=None,
        )
        print("GPUs of ranks:", len(set(result.values)))
        sys.exit(int(sys.argv[1]))
"""


@pytest.mark.corner
def test_cluster(cluster_dir: Path, hadoop: str | None) -> None:
    status = devcluster.status(cluster_dir)
    assert status.healthy
    assert (status.gpus_total, status.gpus_used) == (4, 0)
    version = (cluster_dir / "hdfs" / "formatted").read_text()
    assert hadoop in (None, version)


@pytest.mark.corner
def test_session(spark: SparkSession) -> None:
    assert spark.range(100).repartition(2).count() == 100


@pytest.mark.corner
def test_launch(spark: SparkSession, gpus_back: Callable[[], int]) -> None:
    result = quiet(own_gpu, workers=4)
    assert len({gpu for gpus in result.values for gpu in gpus}) == 4
    assert {rank.host for rank in result.ranks} == {"node1", "node2"}
    assert result.warnings == ()


@pytest.mark.corner
def test_release(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    run = hopsgpu.submit(time.sleep, args=(3,), workers=2, progress="off")
    assert until(lambda: run.status().state == "running")
    assert manager.gpus() == (2, 4)
    result = run.result()
    assert result.timeline.released is not None
    # The call returns when the ResourceManager counts none any more.
    assert manager.gpus() == (0, 4)
    assert all(node.used.gpus == 0 for node in manager.nodes())


@pytest.mark.corner
def test_hold(spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]) -> None:
    with hopsgpu.hold(workers=2, progress="off") as gang:
        first = gang.launch(where, progress="off")
        with pytest.raises(hopsgpu.RankFailed, match="ZeroDivisionError"):
            gang.launch(lambda: 1 / 0, progress="off")
        assert gang.launch(where, progress="off").values == first.values
        assert manager.gpus()[0] == 2
        # A release tells them so, too, rather than to wait for YARN's kill.
        processes = gang.launch(executor_jvm, progress="off").values
        application_of(spark).jvm.shut_down(executors_of(spark))
        assert all(until(lambda jvm=jvm: gone(jvm)) for jvm in processes)
    assert gpus_become(manager, 0)


@pytest.mark.corner
def test_failure(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    def fails() -> None:
        if hopsgpu.context().rank == 1:
            raise ValueError("rank 1 has had enough")
        time.sleep(600)

    with pytest.raises(hopsgpu.RankFailed) as failed:
        quiet(fails, workers=2)
    assert (failed.value.rank, failed.value.exit_code) == (1, 1)
    assert "ValueError: rank 1 has had enough" in (failed.value.traceback or "")
    assert gpus_become(manager, 0)
    assert spark.range(100).count() == 100


def test_cancel(spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]) -> None:
    for state in ("waiting", "running"):
        run = hopsgpu.submit(time.sleep, args=(600,), workers=2, progress="off")
        assert until(lambda run=run, state=state: run.status().state == state, step=0.002)
        run.cancel()
        with pytest.raises(hopsgpu.Cancelled):
            run.result()
        assert gpus_become(manager, 0), state


def test_data(spark: SparkSession, gpus_back: Callable[[], int]) -> None:
    def ids() -> list[int]:
        shard = hopsgpu.context().data
        return [int(n) for batch in shard.batches(1000, ["id"]) for n in batch["id"]]

    frame = spark.range(0, 10_001, 1, 4)
    result = quiet(ids, workers=2, data=hopsgpu.Data(frame, "keep"))
    one, other = map(set, result.values)
    assert one | other == set(range(10_001)) and not one & other
    assert sorted(map(len, result.values)) == [5_000, 5_001]


def test_search(spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int]) -> None:
    result = hopsgpu.search(
        lambda x: (x - 1) ** 2,
        {"x": optuna.distributions.FloatDistribution(-10.0, 10.0)},
        trials=6,
        max_concurrent=2,
        cores_per_worker=1,
        memory_per_worker="512m",
        seed=1,
        progress="off",
    )
    assert [trial.state for trial in result.trials] == ["complete"] * 6
    assert result.best is not None
    assert gpus_become(manager, 0)


def test_gpus(cluster_env: dict[str, str], spark: SparkSession) -> None:
    command = [sys.executable, "-m", "hopsgpu.cli.main", "gpus"]
    with hopsgpu.hold(workers=2, memory_per_worker="512m", progress="off"):
        said, shown = (
            subprocess.run(
                [*command, *more],
                env=cluster_env,
                capture_output=True,
                text=True,
                check=True,
                timeout=HANG_SECONDS,
            ).stdout
            for more in (["--json"], [])
        )
    assert {k: json.loads(said)["gpus"][k] for k in ("total", "used", "free")} == {
        "total": 4,
        "used": 2,
        "free": 2,
    }
    assert "2 of 4 GPUs free" in shown
    assert spark.sparkContext.applicationId in shown


@pytest.mark.corner
def test_doctor(cluster_env: dict[str, str]) -> None:
    code, found = doctor(cluster_env)
    wrong = [f"{name}: {one['seen']}" for name, one in found.items() if one["state"] == "wrong"]
    assert wrong == []
    assert code == 0
    assert {"session", "gang", "discovery"} <= {
        name for name, state in states(found).items() if state == "ok"
    }


def test_rivals(
    cluster_env: dict[str, str], manager: ClusterManager, gpus_back: Callable[[], int]
) -> None:
    both_finish(cluster_env, workers=3, launches=1)


@pytest.fixture
def job(tmp_path: Path) -> str:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    return str(script)


def test_submit_client(cluster_env: dict[str, str], job: str, gpus_back: Callable[[], int]) -> None:
    command = submitting("--deploy-mode", "client", job, "5")
    ((code, out, err),) = ends(started(command, client_env(cluster_env)))
    assert code == 5, err[-2000:]
    assert "GPUs of ranks: 2" in out


@pytest.mark.corner
def test_submit_cluster(
    cluster_env: dict[str, str],
    job: str,
    resource_manager: ResourceManager,
    gpus_back: Callable[[], int],
    kerberos: bool,
) -> None:
    good, bad = ends(
        *(
            started(submitting("--deploy-mode", "cluster", job, status), cluster_env)
            for status in ("0", "3")
        )
    )
    assert good[0] == 0, good[2][-2000:]
    # With Kerberos a NodeManager returns logs only with Hadoop's native library, which the
    # development cluster does not have.
    told = "(its node does not return it: HTTP 500" if kerberos else "GPUs of ranks: 2"
    assert told in good[2], good[2][-2000:]
    assert resource_manager.application_state(application_in(good[2])).has_succeeded
    assert bad[0] == 3 and "User application exited with status 3" in bad[2], bad[2][-2000:]
