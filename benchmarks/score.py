"""A table scored by `hopsgpu.score`, by Spark's two ways for functions of batches, and by a launch.

Each way has the same executors, of one core, and the same model: a small MLP over 10 million rows
of 32 numbers, and a network of the size of ResNet-18 over 20,000 images. `score` runs once more on
simulated GPUs, for the share of the held GPU time in which they computed.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession

import hopsgpu
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.storage.lake import LakePath

EXECUTORS = 2
_MEMORY = "3g"
_TASKS = 64
# Targets: against the better of Spark's two ways, and of held GPU seconds to those of computing.
_MLP_TARGET, _IMAGES_TARGET, _HELD_TARGET = 1.5, 1.0, 1.1


@dataclass(frozen=True)
class Workload:
    """A table and a model.

    Attributes:
        name: "mlp" or "images".
        rows: number of rows.
        shape: shape of a row's numbers.
        batch: number of rows of a batch.
        target: how many times as fast as the better of Spark's ways `score` should be.
    """

    name: str
    rows: int
    shape: tuple[int, ...]
    batch: int
    target: float

    @property
    def size(self) -> int:
        """Return how many numbers a row has."""
        size = 1
        for one in self.shape:
            size *= one
        return size


WORKLOADS = (
    Workload("mlp", 10_000_000, (32,), 4096, _MLP_TARGET),
    Workload("images", 20_000, (3, 32, 32), 64, _IMAGES_TARGET),
)


def network(name: str) -> Any:
    """Return an untrained network: the same weights each time."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    if name == "mlp":
        layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
        return nn.Sequential(*layers).eval()
    blocks: list[Any] = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    # Two convolutions for each of ResNet-18's, without the sums: 11 million weights.
    for before, after in ((64, 64), (64, 128), (128, 256), (256, 512)):
        for number in range(4):
            first = before if number == 0 else after
            stride = 2 if number == 0 and after > 64 else 1
            blocks += [nn.Conv2d(first, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*blocks).eval()


class Classifier:
    """The network with published weights; what all ways call."""

    def __init__(self, model_dir: Path) -> None:
        import torch

        name = (model_dir / "name").read_text()
        self.network = network(name)
        self.network.load_state_dict(torch.load(model_dir / "weights.pt", weights_only=True))

    def classes(self, x: Any) -> Any:
        """Return the class of each row of an array."""
        import torch

        with torch.inference_mode():
            return self.network(torch.from_numpy(x)).argmax(dim=1).numpy()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        # Arrays are read-only, which torch warns about.
        return {"class": self.classes(batch["x"].copy())}


def measure(
    workloads: Sequence[Workload] = WORKLOADS, master: str | None = None
) -> Mapping[str, object]:
    """Print and return rows a second and GPU seconds of each way and workload.

    Args:
        workloads: what is scored.
        master: Spark's master; one without a cluster has no GPUs, and shows only that all works.
    """
    conf = {
        "spark.executor.cores": "1",
        "spark.executor.memory": _MEMORY,
        "spark.dynamicAllocation.maxExecutors": str(EXECUTORS),
    }
    spark = hopsgpu.session("bench score", master=master, conf=conf)
    try:
        return {work.name: _measure(spark, work, has_gpus=master is None) for work in workloads}
    finally:
        spark.stop()


def _measure(spark: SparkSession, work: Workload, *, has_gpus: bool) -> Mapping[str, object]:
    root = application_of(spark).root
    table, model = f"{root}/bench/{work.name}", _published(root, work.name)
    _write(spark, work, table)
    print(f"\n{work.name}: {work.rows:,} rows of {work.size} numbers, {EXECUTORS} executors")
    figures: dict[str, object] = {}
    rates: dict[str, float] = {}
    ways: Mapping[str, Callable[[str], float]] = {
        "predict_batch_udf": lambda out: _batch_udf(spark, work, table, model, out),
        "mapInPandas": lambda out: _in_pandas(spark, work, table, model, out),
        "launch": lambda out: _launch(work, table, model, out),
        "score": lambda out: _score(work, table, model, out, 0)[0],
    }
    for name, way in ways.items():
        output, began = f"{table}-{name}", time.monotonic()
        seconds = way(output)
        whole = time.monotonic() - began
        _check(spark, work, output)
        rates[name] = work.rows / seconds
        figures[name] = {"rows a second": rates[name], "seconds of the call": whole}
        print(f"  {name:18} {rates[name]:12,.0f} rows/s; the call took {whole:.1f} s", flush=True)
    best = max(rates["predict_batch_udf"], rates["mapInPandas"])
    print(f"  score: {rates['score'] / best:.2f} times the better of Spark's ways (target:", end="")
    print(f" {work.target:g})", flush=True)
    if not has_gpus:
        return figures
    seconds, result = _score(work, table, model, f"{table}-gpus", 1)
    spent = result.gpu_seconds
    computed = spent.training - spent.waiting_for_data
    print(f"  score on GPUs: held {spent.held:.1f} GPU seconds, computed {computed:.1f}:", end="")
    print(f" {spent.held / computed:.2f} times (target: {_HELD_TARGET:g})", flush=True)
    figures["gpus"] = {"held": spent.held, "computed": computed, "seconds": seconds}
    return figures


def _published(root: str, name: str) -> hopsgpu.ModelVersion:
    import torch

    with tempfile.TemporaryDirectory() as directory:
        torch.save(network(name).state_dict(), Path(directory, "weights.pt"))
        Path(directory, "name").write_text(name)
        return hopsgpu.ModelStore(f"{root}/models").publish(directory, f"bench-{name}")


def _write(spark: SparkSession, work: Workload, table: str) -> None:
    numbers = f"transform(sequence(1, {work.size}), n -> cast(hash(id, n) / 2e9 AS float))"
    frame = spark.range(0, work.rows, 1, _TASKS).selectExpr("id", f"{numbers} AS x")
    frame.write.option("parquet.block.size", str(8 * 2**20)).parquet(table)


def _check(spark: SparkSession, work: Workload, output: str) -> None:
    rows = spark.read.parquet(output).selectExpr("count(DISTINCT id)").first()
    assert rows is not None and rows[0] == work.rows, rows


def _downloaded(model: hopsgpu.ModelVersion) -> Classifier:
    with tempfile.TemporaryDirectory() as directory:
        return Classifier(model.download(directory))


def _timed(frame: DataFrame, output: str) -> float:
    # The executors are there: what starting them takes is not Spark's way of scoring.
    frame.sparkSession.range(EXECUTORS * 8).repartition(EXECUTORS * 4).count()
    began = time.monotonic()
    frame.write.parquet(output)
    return time.monotonic() - began


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """Have Spark send this module's functions whole: executors have hopsgpu, and not benchmarks."""
    this = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(this)


def _batch_udf(
    spark: SparkSession, work: Workload, table: str, model: hopsgpu.ModelVersion, output: str
) -> float:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import LongType

    def make() -> Callable[[Any], Any]:
        return _downloaded(model).classes

    predict = predict_batch_udf(
        make,
        return_type=LongType(),
        batch_size=work.batch,
        input_tensor_shapes=[list(work.shape)],
    )
    frame = spark.read.parquet(table)
    with _by_value():
        return _timed(frame.select("id", predict("x").alias("class")), output)


def _in_pandas(
    spark: SparkSession, work: Workload, table: str, model: hopsgpu.ModelVersion, output: str
) -> float:
    def score(batches: Iterator[Any]) -> Iterator[Any]:
        import numpy as np

        classifier = _downloaded(model)
        for batch in batches:
            x = np.stack(batch["x"].to_numpy()).reshape(-1, *work.shape)
            batch["class"] = classifier.classes(x)
            yield batch[["id", "class"]]

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(work.batch))
    frame = spark.read.parquet(table)
    with _by_value():
        return _timed(frame.mapInPandas(score, "id long, class long"), output)


def _launch(work: Workload, table: str, model: hopsgpu.ModelVersion, output: str) -> float:
    def score_shard() -> None:
        import pyarrow as pa
        from pyarrow import parquet

        ctx = hopsgpu.context()
        classifier = _downloaded(model)
        path = Path(f"part-{ctx.rank}.parquet")
        schema = pa.schema([("id", pa.int64()), ("class", pa.int64())])
        with parquet.ParquetWriter(path, schema) as writer:
            assert ctx.data is not None and not isinstance(ctx.data, dict)
            batches = ctx.data.batches(work.batch, shapes={"x": work.shape})
            for batch in batches:
                found = {"id": batch["id"], **classifier(batch)}
                writer.write_batch(pa.record_batch(found, schema=schema))
        (LakePath(output) / path.name).upload(path)

    LakePath(output).make()
    data = hopsgpu.Data(table, remainder="keep")
    result = hopsgpu.launch(
        score_shard,
        workers=EXECUTORS,
        gpus_per_worker=0,
        cores_per_worker=1,
        memory_per_worker=_MEMORY,
        data=data,
        progress="off",
    )
    return _worked(result.timeline)


def _score(
    work: Workload, table: str, model: hopsgpu.ModelVersion, output: str, gpus: int
) -> tuple[float, hopsgpu.types.ScoreResult]:
    result = hopsgpu.score(
        Classifier,
        table,
        model=model,
        output=output,
        columns=["x"],
        shapes={"x": work.shape},
        keep=["id"],
        batch_size=work.batch,
        max_concurrent=EXECUTORS,
        gpus_per_worker=gpus,
        cores_per_worker=1,
        memory_per_worker=_MEMORY,
        progress="off",
    )
    return _worked(result.timeline), result


def _worked(timeline: hopsgpu.types.Timeline) -> float:
    """Return the seconds from the first process's start until the output was complete."""
    ended = timeline.returned if timeline.published is None else timeline.published
    assert timeline.started is not None and ended is not None
    return ended - timeline.started
