"""Elastic gangs on a real cluster: they lose executors, grow, give way, and train each row once."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.core.run_values import RunStatus
from tests.conftest import gpus_become, until
from tests.in_ranks import lose_executors_of_one_node, train_epochs

pytestmark = pytest.mark.usefixtures("nothing_warmed")
# Of an even number, two ranks have equally many, whatever one or both were handed before.
ROWS, EPOCHS = 3000, 2


@pytest.fixture(autouse=True)
def at_any_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let gangs grow as often as they can."""
    monkeypatch.setenv("HOPSGPU_ELASTIC_INTERVAL", "1s")
    yield


@pytest.mark.parametrize("kind", ["elastic gang", "search"])
def test_a_port_that_is_taken_is_named(
    kind: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"x": FloatDistribution(0.0, 1.0)}
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("HOPSGPU_PORTS", f"{port}-{port}")
        with pytest.raises(hopsgpu.ConfigError, match=r"spark\.hopsgpu\.ports"):
            if kind == "search":
                hopsgpu.search(lambda x: x, space, trials=1, max_concurrent=1, progress="off")
            else:
                hopsgpu.launch(os.getpid, workers=(1, 2), progress="off")


@pytest.fixture
def ids(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    path = f"{tmp_path}/ids.parquet"
    spark.range(0, ROWS, 1, 3).write.option("parquet.block.size", 4096).parquet(f"file://{path}")
    yield f"file://{path}"


def noted(directory: Path) -> list[list[list[dict[str, object]]]]:
    """Return what the ranks have noted: by world, by rank."""
    names = [tuple(map(int, path.stem.split("-"))) for path in directory.glob("*-*.jsonl")]
    found = []
    for world in sorted({world for world, _ in names}):
        ranks = sorted(rank for other, rank in names if other == world)
        texts = ((directory / f"{world}-{rank}.jsonl").read_text() for rank in ranks)
        found.append([[json.loads(line) for line in text.splitlines()] for text in texts])
    return found


def trained(worlds: list[list[list[dict[str, object]]]]) -> dict[int, Counter[int]]:
    """Return how often each row was trained in each epoch, as the last checkpoints have it.

    What a world trained after the checkpoint with which the next one begins does not count.
    """
    rows: dict[int, Counter[int]] = {}
    for number, ranks in enumerate(worlds):
        following = worlds[number + 1 :]
        end = min((int(str(later[0][0]["begins"])) for later in following), default=10**9)
        for _, *steps in ranks:
            for note in steps:
                if int(str(note["step"])) < end:
                    of = rows.setdefault(int(str(note["epoch"])), Counter())
                    of.update(note["ids"])  # type: ignore[arg-type]
    return rows


@pytest.mark.soak
def test_a_lost_executor_shrinks_it_another_lets_it_grow_and_each_row_is_trained_once(
    spark: SparkSession, gpus_back: Callable[[], int], ids: str, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    seen: list[RunStatus] = []
    result = hopsgpu.launch(
        train_epochs,
        args=(str(notes), EPOCHS, 30, 20, 0.15),
        workers=(1, 2),
        data=hopsgpu.Data(ids, remainder="keep", seed=7),
        memory_per_worker="1g",
        progress=seen.append,
    )
    worlds = noted(notes)
    assert [len(ranks) for ranks in worlds] == [2, 1, 2]
    assert [(world.ranks, world.end) for world in result.worlds] == [
        (2, "lost"),
        (1, "grew"),
        (2, "returned"),
    ]
    begins = [int(str(ranks[0][0]["begins"])) for ranks in worlds]
    assert begins[0] == 0 and begins[1] == 20 < begins[2]
    rows = trained(worlds)
    assert set(rows) == set(range(EPOCHS))
    for epoch in range(EPOCHS):
        assert rows[epoch] == Counter(range(ROWS)), f"epoch {epoch}"
    assert len(set(result.values)) == 1 and len(result.values) == 2
    assert "the executor of rank 1 on node" in result.worlds[0].why
    assert all(world.resize_seconds is not None for world in result.worlds[1:])
    assert sum(world.gpu_seconds for world in result.worlds) <= result.gpu_seconds.held
    assert {len(status.worlds) for status in seen} >= {1, 2, 3}


def test_it_starts_with_what_is_free_grows_and_gives_way_to_a_gang_that_waits(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    stop = tmp_path / "stop"

    def trains(stop: str) -> list[int]:
        import tempfile
        import time

        context = hopsgpu.context()
        path, step = Path(tempfile.gettempdir()) / "state", 0
        if (saved := context.latest_checkpoint()) is not None:
            step = int(saved.read_text())
        while not Path(stop).exists():
            time.sleep(0.1)
            step += 1
            if context.should_checkpoint(step) and context.rank == 0:
                path.write_text(str(step))
                context.save_checkpoint(path, step)
        return [context.world_size, step]

    waiting = threading.Event()

    def note(status: RunStatus) -> None:
        if any("come from" in detail for detail in status.waiting_details):
            waiting.set()

    with hopsgpu.hold(workers=2, placement="pack", memory_per_worker="1g", progress="off"):
        run = hopsgpu.submit(
            trains, args=(str(stop),), workers=(1, 4), memory_per_worker="1g", progress="off"
        )
        assert until(lambda: len(run.status().worlds) == 1)
        assert until(lambda: run.status().state == "running")
        assert run.status().worlds[-1].ranks <= 2
    assert until(lambda: run.status().worlds[-1].ranks == 4), run.status()
    other = hopsgpu.launch(os.getpid, workers=2, memory_per_worker="1g", progress=note)
    assert len(other.values) == 2
    assert waiting.is_set(), "the gang that waited was told from whom GPUs come"
    gave = [world for world in run.status().worlds if world.end == "gave way"]
    assert len(gave) == 1 and gave[0].ranks == 4
    stop.touch()
    values = run.result().values
    assert len(values) == run.status().worlds[-1].ranks >= 2, "what it gave was enough"
    assert gpus_become(manager, 0)


def test_an_error_of_the_code_counts_as_a_retry_and_ends_it(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    def fails() -> None:
        if hopsgpu.context().rank == 1:
            raise ValueError(f"in world {hopsgpu.context().generation}")

    with pytest.raises(hopsgpu.RankFailed, match="in world 1") as raised:
        hopsgpu.launch(
            fails,
            workers=(2, 2),
            placement="pack",
            retries=1,
            memory_per_worker="1g",
            progress="off",
        )
    assert [world.end for world in raised.value.result.worlds] == ["failed", "failed"]


def test_only_a_smallest_world_that_can_never_fit_is_refused(spark: SparkSession) -> None:
    plan = hopsgpu.plan(os.getpid, workers=(2, 64), memory_per_worker="1g")
    assert (plan.spec.least, plan.spec.workers, plan.executors) == (2, 4, 4)
    assert "2 to 4 ranks in 2 to 4 executors" in str(plan)
    assert "at most 4 of the 64 ranks can run here" in str(plan)
    with pytest.raises(hopsgpu.CapacityError):
        hopsgpu.plan(os.getpid, workers=(5, 64), memory_per_worker="1g")


@pytest.mark.soak
def test_a_node_that_loses_executors_again_and_again_is_kept_if_the_gang_needs_it(
    spark: SparkSession, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    result = hopsgpu.launch(
        lose_executors_of_one_node,
        args=(str(tmp_path),),
        workers=(3, 3),
        memory_per_worker="1g",
        progress="off",
    )
    assert result.values == (2, 2, 2)
    assert [world.end for world in result.worlds] == ["lost", "lost", "returned"]
    node = (tmp_path / "node").read_text()
    assert all(f"on {node} was lost" in world.why for world in result.worlds[:2])
