"""`launch(data=...)` on the cluster: from a DataFrame to the rows of each rank, and away again."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import array_repeat, col, udf

import hopsgpu
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.core.run_record import fields_of
from hopsgpu.data.cache import default_budget
from hopsgpu.launcher import arguments
from hopsgpu.runs.run import Run
from hopsgpu.storage.lake import LakePath
from tests.conftest import until

MEMORY = "288m"
MEMORY_BYTES = 288 * 2**20
# Numbers of a row: 1 KiB.
WIDTH = 128


@pytest.fixture(autouse=True)
def root(hdfs_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LakePath]:
    """A root of each test's own on the lake."""
    lake = LakePath(f"{hdfs_url}/tmp/data-{uuid.uuid4().hex}")
    monkeypatch.setenv("HOPSGPU_ROOT", lake.url)
    yield lake
    lake.remove()


@pytest.fixture(scope="module")
def gang(spark: SparkSession, hdfs_url: str) -> Iterator[hopsgpu.Gang]:
    """Two ranks in a container, for the tests below that need no gang of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOPSGPU_ROOT", f"{hdfs_url}/tmp/data-held-{uuid.uuid4().hex}")
        patch.setattr(arguments, "likely_imports", tuple)
        held = hopsgpu.hold(workers=2, placement="pack", progress="off")
    with held:
        yield held


def written(run_id: str, root: str) -> bool:
    return (LakePath(root) / "runs" / run_id / "data").exists()


def root_of(gang: hopsgpu.Gang) -> str:
    return gang._plan.paths["root"]


def numbers(fail: bool = False) -> list[int]:
    """All rows of this rank, twice over: from the lake and from the disk."""
    context = hopsgpu.context()
    (context.model_dir / str(context.rank)).write_text("x")
    assert context.data is not None and not isinstance(context.data, dict)
    read = [int(n) for batch in context.data.batches(1000, ["id"], epochs=2) for n in batch["id"]]
    half = len(read) // 2
    assert read[:half] == read[half:] and half == context.data.num_rows
    if fail:
        raise ValueError("it did not converge")
    return read[:half]


class Watch(threading.Thread):
    """Counts GPUs in use, by the ResourceManager, while a run prepares its data."""

    def __init__(self, run: Run, manager: ClusterManager) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._manager = manager
        self.gpus: list[int] = []
        self.told: set[str] = set()
        self.start()

    def run(self) -> None:
        while not self._run.wait(0.05):
            gpus, status = self._manager.gpus()[0], self._run.status()
            # In this order: it still prepared when they had been counted.
            if status.state == "preparing":
                self.gpus.append(gpus)
                self.told.add(status.waiting_for.partition(":")[0])


def test_a_dataframe_is_written_without_gpus_and_each_row_read_once(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int], root: LakePath
) -> None:
    before = gpus_back()
    frame = spark.range(0, 100_003, 1, 4)
    run = hopsgpu.submit(
        numbers, workers=2, data=hopsgpu.Data(frame, "keep"), model="net", progress="off"
    )
    watch = Watch(run, manager)
    result = run.result()
    watch.join()
    assert watch.gpus and set(watch.gpus) == {before}
    assert "Writing data" in watch.told
    one, other = map(set, result.values)
    assert one | other == set(range(100_003)) and not one & other
    assert sorted(map(len, result.values)) == [50_001, 50_002]
    assert not written(result.run_id, root.url)
    store = RunStore(root.url)
    told = fields_of(store.record(result.run_id))["data"]["data"]
    assert (told["rows"], told["schema"], told["remainder"]) == (100_003, {"id": "int64"}, "keep")
    assert told["url"] == f"{store.url}/{result.run_id}/data/data" and not told["kept"]
    assert result.model is not None and result.model.manifest["data"]["data"] == told
    assert result.timeline.granted is not None and result.timeline.requested is not None
    # What is held begins with the grant, and not with the request.
    assert result.gpu_seconds.held < 2 * (time.time() - result.timeline.requested)


def test_fewer_rows_than_ranks_takes_no_gpu(
    spark: SparkSession, manager: ClusterManager, gpus_back: Callable[[], int], root: LakePath
) -> None:
    run = hopsgpu.submit(numbers, workers=3, data=spark.range(2), progress="off")
    watch = Watch(run, manager)
    with pytest.raises(
        hopsgpu.ConfigError, match="2 rows for 3 ranks: each rank needs at least one"
    ):
        run.result()
    watch.join()
    assert set(watch.gpus) <= {gpus_back()}
    assert run.status().state == "failed" and not run.status().granted_hosts
    assert not written(run.run_id, root.url)


def test_a_run_that_is_cancelled_while_it_writes_ends_its_spark_job(
    spark: SparkSession, gpus_back: Callable[[], int], root: LakePath
) -> None:
    slowly = udf(lambda number: (time.sleep(1), number)[1], "long")
    frame = spark.range(0, 1000, 1, 2).select(slowly("id").alias("id"))
    run = hopsgpu.submit(numbers, workers=2, data=frame, progress="off")
    tracker = spark.sparkContext.statusTracker()
    tag = f"{run.run_id}-data"

    def tasks() -> int:
        infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(tag)]
        stages = [tracker.getStageInfo(s) for info in infos if info for s in info.stageIds]
        return sum(stage.numActiveTasks for stage in stages if stage)

    assert until(lambda: tasks() > 0)
    run.cancel()
    with pytest.raises(hopsgpu.Cancelled, match="while Spark wrote data"):
        run.result()
    assert until(lambda: tasks() == 0)
    assert not written(run.run_id, root.url)


def test_what_cannot_be_read_is_found_at_the_call(spark: SparkSession, root: LakePath) -> None:
    for data, error, words in (
        (f"{root.url}/nothing", hopsgpu.StoreError, "data cannot be read: .* does not exist"),
        ("oss://bucket/x", hopsgpu.ConfigError, "otherwise read it with Spark"),
        (spark.readStream.format("rate").load(), hopsgpu.ConfigError, "data is a stream"),
    ):
        with pytest.raises(error, match=words):
            hopsgpu.plan(numbers, data=data)
    assert not root.exists()


def features(spark: SparkSession, rows: int) -> DataFrame:
    """Rows of 1 KiB in memory, that are quickly written and few bytes of Parquet."""
    numbers = array_repeat((col("id") % 1000).cast("double"), WIDTH)
    return spark.range(0, rows, 1, 2).select(numbers.alias("x"))


def epochs() -> tuple[int, int, int, int]:
    """Trains twice over a shard; rows, bytes, and of the disk what was kept and could have been."""
    data: Any = hopsgpu.context().data
    rows = size = 0
    room = default_budget(Path(os.environ["HOPSGPU_CONTEXT"]).parent, 1)
    for batch in data.batches(4096, epochs=2, shapes={"x": (WIDTH,)}):
        rows += len(batch["x"])
        size += batch["x"].nbytes
    kept = Path(os.environ["HOPSGPU_CONTEXT"]).with_name("data")
    return rows, size, sum(f.stat().st_size for f in kept.rglob("*") if f.is_file()), room


@pytest.mark.soak
def test_a_shard_of_three_times_the_memory_trains(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    rows = 3 * MEMORY_BYTES // (8 * WIDTH) + 1
    # Not on the gang that is held: its ranks have more memory.
    result = hopsgpu.launch(
        epochs, memory_per_worker=MEMORY, data=features(spark, rows), progress="off"
    )
    read, size, kept, room = result.value
    assert read == 2 * rows and size >= 6 * MEMORY_BYTES
    # The second epoch came from the disk, but for what a full one has no room for. What others
    # write meanwhile is allowed for.
    assert kept >= min(3 * MEMORY_BYTES, room - 2**30)
    peak = result.ranks[0].peak_memory
    assert peak is not None and peak < MEMORY_BYTES


def read_both() -> tuple[int, list[int], list[int]]:
    context = hopsgpu.context()
    if context.attempt == 0:
        raise ConnectionError(f"rank {context.rank} of the first attempt" if context.rank else "x")
    data: Any = context.data
    train = [int(n) for batch in data["train"].batches(64, shuffle=True) for n in batch["id"]]
    test = data["test"].to_arrow()["id"].to_pylist()
    return context.attempt, train, test


def test_named_data_is_there_in_each_attempt_and_goes_with_the_last(
    spark: SparkSession, gang: hopsgpu.Gang, root: LakePath
) -> None:
    spark.range(100, 140, 1, 2).write.parquet(f"{root.url}/lake/test")
    path = f"{root.url}/lake/test".partition("://")[2].partition("/")[2]
    result = gang.launch(
        read_both, data={"train": spark.range(1000), "test": f"/{path}"}, retries=1, progress="off"
    )
    assert [attempt for attempt, _, _ in result.values] == [1, 1]
    assert sorted(n for _, train, _ in result.values for n in train) == [*range(1000)]
    assert sorted(n for _, _, test in result.values for n in test) == [*range(100, 140)]
    assert not written(result.run_id, root_of(gang))
    assert len((root / "lake" / "test").names()) > 1


def test_a_failed_run_takes_its_data_along_unless_it_is_to_stay(
    spark: SparkSession, gang: hopsgpu.Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = []
    for keep in ("false", "true"):
        monkeypatch.setenv("HOPSGPU_KEEP_DATA", keep)
        with pytest.raises(hopsgpu.RankFailed, match="it did not converge") as raised:
            gang.launch(numbers, args=(True,), data=spark.range(10), progress="off")
        assert raised.value.result is not None
        failed.append(raised.value.result.run_id)
    assert [written(run_id, root_of(gang)) for run_id in failed] == [False, True]
    RunStore(root_of(gang)).remove(failed[1])


def dates(kinds: list[str]) -> dict[str, list[str]]:
    """What a rank has of its dates and timestamps, as text; of what is refused the error."""
    data = hopsgpu.context().data
    assert isinstance(data, dict)
    found = {}
    for name in kinds:
        (batch,) = data[name].batches(9, ["d", "t"])
        found[name] = [str(batch["d"][0]), str(batch["t"][0])]
    with pytest.raises(hopsgpu.ConfigError) as refused:
        next(iter(data["zone"].batches(9)))
    (batch,) = data["zone"].batches(9, ["d"])
    found["zone"] = [str(batch["d"][0]), str(refused.value)]
    return found


def test_old_dates_that_spark_wrote_in_its_legacy_calendar_are_those_that_it_was_given(
    spark: SparkSession, gang: hopsgpu.Gang, root: LakePath
) -> None:
    query = "select date'1000-02-28' d, timestamp'1500-03-01 01:02:03.456789' t"
    legacy = ("datetimeRebaseModeInWrite", "int96RebaseModeInWrite")
    settings = {f"spark.sql.parquet.{name}": "LEGACY" for name in legacy}
    zone, kind = "spark.sql.session.timeZone", "spark.sql.parquet.outputTimestampType"
    written = {
        "micros": {zone: "UTC", kind: "TIMESTAMP_MICROS"},
        "int96": {zone: "UTC", kind: "INT96"},
        "zone": {zone: "America/Los_Angeles", kind: "TIMESTAMP_MICROS"},
    }
    session = spark.newSession()
    for name, own in written.items():
        for key, value in {**settings, **own}.items():
            session.conf.set(key, value)
        # Each rank has a row.
        session.sql(f"{query} from range(2)").coalesce(1).write.parquet((root / name).url)
    paths = {name: (root / name).url for name in written}
    result = gang.launch(dates, args=(["micros", "int96"],), data=paths, progress="off")
    for value in result.values:
        right = ["1000-02-28", "1500-03-01T01:02:03.456789"]
        assert (value["micros"], value["int96"]) == (right, right)
        day, refused = value["zone"]
        assert day == "1000-02-28"
        assert f"column 't' of {paths['zone']}/part-" in refused
        assert "in the legacy calendar of the time zone America/Los_Angeles" in refused
