"""Gangs in containers of Docker on a real YARN: what an image changes, and what must not change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.errors import Cancelled, ConfigError, RankFailed
from tests.conftest import until
from tests.docker import in_containers
from tests.docker.conftest import TRAIN
from tests.docker.images import PYTHON

Docker = Callable[..., str]
# The runtime with which YARN's GPU plugin starts containers.
GPUS = "nvidia"
SMALL: dict[str, Any] = {"cores_per_worker": 1, "memory_per_worker": "1g"}


def containers(docker: Docker) -> list[str]:
    """The containers with GPUs, which are those of gangs."""
    names = docker("ps", "--format", "{{.Names}}").split()
    return [n for n in names if docker("inspect", "--format", "{{.HostConfig.Runtime}}", n) == GPUS]


def has_saved(run: Any) -> bool:
    """Whether the ranks have reported some steps; fails if the run has ended before."""
    assert not run.wait(0), run.status()
    metrics = run.status().metrics
    return bool(metrics) and all(m.get("saved", 0) > 3 for m in metrics)


def test_each_executor_is_a_container_with_its_own_gpus(
    spark: SparkSession, gpus_back: Callable[[], int], docker: Docker
) -> None:
    running: list[int] = []

    def note(status: Any) -> None:
        if status.state == "running":
            running.append(len(containers(docker)))

    result = hopsgpu.launch(
        in_containers.describe_container, workers=2, image=TRAIN, progress=note, **SMALL
    )
    for value in result.values:
        assert value["executable"] == f"/usr/local/bin/{PYTHON}" and value["prefix"] == "/usr/local"
        # The container's own processes only.
        assert value["processes"] < 30
        # YARN's plugin has chosen the GPU; no other one is visible, and the node's leases are off.
        assert len(value["seen"]) == 1 and value["cuda"] in value["seen"][0]
        assert not value["has_leases_of_node"]
        assert value["shared_memory"] > 2**30
    assert len({value["cuda"] for value in result.values}) == 2
    assert max(running) == 2
    assert until(lambda: not containers(docker), 120)


def test_a_data_loader_has_room_for_its_batches_in_shared_memory(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    result = hopsgpu.launch(
        in_containers.train_with_workers, workers=2, cores_per_worker=1, memory_per_worker="2g"
    )
    assert result.values == (float(sum(range(16))),) * 2


def test_rows_of_etl_reach_ranks_and_their_model_the_lake(
    spark: SparkSession, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    rows = spark.range(100).selectExpr("id", "id * 2.0 AS y").repartition(2)
    result = hopsgpu.launch(sum_and_publish, workers=2, data=rows, model="sums", **SMALL)
    assert result.values == (float(sum(range(0, 200, 2))),) * 2
    assert result.model is not None
    model = hopsgpu.ModelStore().get("sums").download(tmp_path / "model")
    assert (model / "sum").read_text() == "9900.0"


def sum_and_publish() -> float:
    import torch
    import torch.distributed as dist

    context = hopsgpu.context()
    own = sum(float(batch["y"].sum()) for batch in context.data.batches(10))
    dist.init_process_group("gloo")
    total = torch.tensor(own)
    dist.all_reduce(total)
    dist.destroy_process_group()
    if context.rank == 0:
        (context.model_dir / "sum").write_text(str(float(total)))
    return float(total)


def test_a_killed_container_is_replaced_and_continues_from_the_checkpoint(
    spark: SparkSession, gpus_back: Callable[[], int], docker: Docker
) -> None:
    run = hopsgpu.submit(in_containers.count_steps, args=(40, 0.3), workers=2, retries=1, **SMALL)
    assert until(lambda: has_saved(run))
    docker("kill", containers(docker)[0])
    result = run.result()
    assert min(result.values) > 0
    assert any("attempt 0 failed (infrastructure)" in warning for warning in result.warnings)


def test_an_elastic_gang_shrinks_with_a_lost_container_and_grows_again(
    spark: SparkSession, gpus_back: Callable[[], int], docker: Docker
) -> None:
    run = hopsgpu.submit(in_containers.count_steps, args=(60, 0.3), workers=(1, 2), **SMALL)
    assert until(lambda: has_saved(run))
    docker("kill", containers(docker)[0])
    result = run.result()
    assert len(result.worlds) >= 2 and result.worlds[0].end == "lost"


def test_trials_run_side_by_side_in_containers(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    result = hopsgpu.search(
        in_containers.objective,
        {"x": optuna.distributions.FloatDistribution(0, 4)},
        trials=4,
        max_concurrent=2,
        seed=1,
        **SMALL,
    )
    assert len(result.trials) == 4 and 0 <= result.best.value < 4


def test_too_much_memory_is_named_as_such(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    with pytest.raises(RankFailed, match=r"(?i)memory"):
        hopsgpu.launch(in_containers.fill_memory, workers=1, **SMALL)


def test_a_cancelled_gang_leaves_no_container(
    spark: SparkSession, gpus_back: Callable[[], int], docker: Docker
) -> None:
    run = hopsgpu.submit(in_containers.wait_for_end, workers=2, **SMALL)
    assert until(lambda: run.status().state == "running")
    run.cancel()
    with pytest.raises(Cancelled):
        run.result()
    assert until(lambda: not containers(docker), 60)


def test_packages_of_python_env_come_before_those_of_the_image(
    spark: SparkSession, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "of_environment.py").write_text("WORD = 'shipped'\n")
    result = hopsgpu.launch(
        in_containers.import_shipped, workers=1, python_env=str(tmp_path), **SMALL
    )
    assert result.value == "shipped"


def test_another_image_than_the_sessions_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="all executors of a Spark application run in the same"):
        hopsgpu.launch(print, workers=1, image="local/other:1")


def test_two_gangs_at_once_never_share_a_gpu(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    values: list[dict[str, Any]] = []

    def launch() -> None:
        values.extend(hopsgpu.launch(in_containers.describe_container, workers=2, **SMALL).values)

    threads = [threading.Thread(target=launch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(values) == 4
