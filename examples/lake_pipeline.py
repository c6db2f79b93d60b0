"""A pipeline on the lake, in one Spark application: from raw files to a table of predictions.

    raw CSV -> clean -> features (Spark ML) -> gang training -> model version -> batch scoring

Each step reads what the one before left on the lake, and can be repeated. Run all of them, or one
as a task of an orchestrator, which needs the exit code alone (not 0, with the reason on stderr):

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/lake_pipeline.py hdfs:///tmp/wines --picture gpus.png
    python examples/lake_pipeline.py hdfs:///tmp/wines --step train

At the end a picture shows the ResourceManager's count of GPUs in use: zero but for the training.
pandas and matplotlib are wanted besides (`pip install hopsgpu[pipeline]`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pyarrow as pa
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import StandardScaler, VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.datasets import load_wine

import hopsgpu

WORKERS = 2
EPOCHS = 60
MODEL = "wines"
CLASSES = 3


@dataclass(frozen=True)
class Places:
    """Where each step leaves what the next one reads."""

    root: str

    @property
    def raw(self) -> str:
        return f"{self.root}/raw"

    @property
    def cleaned(self) -> str:
        return f"{self.root}/cleaned"

    @property
    def scaling(self) -> str:
        return f"{self.root}/scaling"

    @property
    def features(self) -> str:
        return f"{self.root}/features"

    @property
    def scored(self) -> str:
        return f"{self.root}/scored"


# --- Before the training: CPU executors, which come and go by themselves -------------------


def collect(spark: SparkSession, places: Places) -> str:
    """Stands for what arrives on a lake: CSV files, some rows twice, some unreadable."""
    wines = load_wine()
    names = [name.replace("/", "_") for name in wines.feature_names]
    rows = [
        [str(number), *(f"{value:g}" for value in values), str(kind)]
        for number, (values, kind) in enumerate(zip(wines.data, wines.target, strict=True))
    ]
    twice = rows[:20]
    broken = [[str(1000 + n), "n/a", *row[2:]] for n, row in enumerate(rows[:10])]
    unlabelled = [[str(2000 + n), *row[1:-1], ""] for n, row in enumerate(rows[:10])]
    columns = ["bottle", *names, "kind"]
    frame = spark.createDataFrame([*rows, *twice, *broken, *unlabelled], columns)
    frame.repartition(4).write.mode("overwrite").csv(places.raw, header=True)
    return f"{frame.count()} rows"


def clean(spark: SparkSession, places: Places) -> str:
    """Labelled, whole, distinct rows, with types."""
    raw = spark.read.csv(places.raw, header=True)
    typed = raw.select(
        F.col("bottle").cast("long"),
        *(
            F.expr(f"try_cast(`{name}` as double)").alias(name)
            for name in raw.columns
            if name not in ("bottle", "kind")
        ),
        F.expr("try_cast(kind as int)").alias("kind"),
    )
    typed.dropna().dropDuplicates(["bottle"]).write.mode("overwrite").parquet(places.cleaned)
    return f"{spark.read.parquet(places.cleaned).count()} of {raw.count()} rows"


def make_features(spark: SparkSession, places: Places) -> str:
    """One array of scaled floats in a row. The scaling is kept: scoring needs the same."""
    cleaned = spark.read.parquet(places.cleaned)
    inputs = [name for name in cleaned.columns if name not in ("bottle", "kind")]
    stages = [
        VectorAssembler(inputCols=inputs, outputCol="assembled"),
        StandardScaler(inputCol="assembled", outputCol="scaled", withMean=True),
    ]
    scaling = Pipeline(stages=stages).fit(cleaned)
    scaling.write().overwrite().save(places.scaling)
    featured(scaling, cleaned).write.mode("overwrite").parquet(places.features)
    return f"{len(inputs)} features"


def featured(scaling: PipelineModel, cleaned: DataFrame) -> DataFrame:
    return scaling.transform(cleaned).select(
        "bottle", vector_to_array("scaled", "float32").alias("features"), "kind"
    )


# --- The training: GPUs are held here and nowhere else --------------------------------------


def network(inputs: int):  # type: ignore[no-untyped-def]  # torch is the ranks' alone
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 32), torch.nn.ReLU(), torch.nn.Linear(32, CLASSES)
    )


def fit(epochs: int) -> dict[str, float]:
    """Runs in every rank: plain PyTorch, on the rank's own rows."""
    import torch
    import torch.distributed as dist

    gang = hopsgpu.context()
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", gang.local_rank) if has_gpu else torch.device("cpu")
    torch.manual_seed(0)
    width = len(gang.data.to_arrow(["features"])["features"][0])
    model = torch.nn.parallel.DistributedDataParallel(network(width).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = gang.data.torch(32, shuffle=True, seed=0, shapes={"features": (width,)})
    loss = torch.tensor(0.0)
    for epoch in range(epochs):
        right = rows = 0
        for batch in batches:
            x, kind = batch["features"].to(device), batch["kind"].long().to(device)
            said = model(x)
            loss = torch.nn.functional.cross_entropy(said, kind)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((said.argmax(1) == kind).sum())
            rows += len(kind)
        gang.report(epoch, loss=loss.item(), accuracy=right / rows)
    if gang.rank == 0:
        torch.save(model.module.cpu().state_dict(), gang.model_dir / "weights.pt")
    dist.destroy_process_group()
    return {"accuracy": right / rows, "rows": rows}


def train(spark: SparkSession, places: Places) -> str:
    """All GPUs or none, for as long as it trains; the model is a new version on the lake."""
    has_gpus = hopsgpu.inventory().total > 0
    result = hopsgpu.launch(
        fit,
        args=(EPOCHS,),
        workers=WORKERS,
        gpus_per_worker=1 if has_gpus else 0,
        memory_per_worker="2g",
        data=places.features,
        model=MODEL,
    )
    assert result.model is not None
    seconds = result.gpu_seconds
    return (
        f"version {result.model.version}, accuracy {result.value['accuracy']:.3f};"
        f" GPU seconds: held {seconds.held:.0f}, training {seconds.training:.0f},"
        f" publishing {seconds.publishing:.0f}, idle {seconds.idle:.0f}"
    )


# --- After it: CPU executors again ----------------------------------------------------------


def predict(
    models: str, version: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Scores the rows of one Spark task; the model is fetched once for all of them."""
    import torch

    with tempfile.TemporaryDirectory() as directory:
        hopsgpu.ModelStore(models).get(MODEL, version).download(f"{directory}/model")
        weights = torch.load(f"{directory}/model/weights.pt", weights_only=True)
    model = network(weights["0.weight"].shape[1])
    model.load_state_dict(weights)
    model.eval()
    for batch in batches:
        with torch.no_grad():
            x = torch.tensor(batch["features"].to_pylist(), dtype=torch.float32)
            said = torch.softmax(model(x), dim=1)
        columns = [
            batch["bottle"],
            pa.array(said.argmax(1).int().numpy()),
            pa.array(said.max(1).values.numpy()),
            batch["kind"],
        ]
        yield pa.RecordBatch.from_arrays(columns, ["bottle", "said", "sure", "kind"])


def score(spark: SparkSession, places: Places) -> str:
    """A table of what the newest model says of every row."""
    models = f"{hopsgpu.plan(fit, args=(1,), gpus_per_worker=0).paths['root']}/models"
    # Named once, so that all tasks use the same, whatever is published meanwhile.
    version = hopsgpu.ModelStore(models).get(MODEL).version
    rows = featured(PipelineModel.load(places.scaling), spark.read.parquet(places.cleaned))
    told = rows.mapInArrow(
        functools.partial(predict, models, version),
        "bottle long, said int, sure float, kind int",
    )
    told.withColumn("version", F.lit(version)).write.mode("overwrite").parquet(places.scored)
    table = spark.read.parquet(places.scored)
    right = table.where("said = kind").count()
    return f"version {version}: {right} of {table.count()} right"


STEPS: dict[str, Callable[[SparkSession, Places], str]] = {
    "collect": collect,
    "clean": clean,
    "features": make_features,
    "train": train,
    "score": score,
}


# --- What the ResourceManager counted -------------------------------------------------------


@dataclass
class GpuCount:
    """Asks the ResourceManager for its count of GPUs in use, twice a second, while entered."""

    began: float = field(default_factory=time.monotonic)
    seen: list[tuple[float, int]] = field(default_factory=list)
    total: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> GpuCount:
        self._thread = threading.Thread(target=self._watch, name="gpu-count")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def now(self) -> float:
        return time.monotonic() - self.began

    def _watch(self) -> None:
        while True:
            # A ResourceManager that does not answer for a moment ends no pipeline.
            with contextlib.suppress(hopsgpu.HopsGpuError):
                gpus = hopsgpu.inventory()
                self.total = gpus.total
                self.seen.append((self.now(), gpus.used))
            if self._over.wait(0.5):
                return


def draw(count: GpuCount, spans: Sequence[tuple[str, float, float]], told: str, path: Path) -> None:
    """The count over time, with the steps behind it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, begin, end) in enumerate(spans):
        axes.axvspan(begin, end, color=f"C{number}", alpha=0.12)
        axes.text((begin + end) / 2, count.total + 0.15, name, ha="center", va="bottom")
    times, used = zip(*count.seen, strict=True)
    axes.step(times, used, where="post", color="black", label="GPUs in use (ResourceManager)")
    axes.fill_between(times, used, step="post", color="black", alpha=0.25)
    axes.set(ylim=(0, count.total + 0.7), xlabel="seconds", ylabel="GPUs", title=told)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="center left")
    figure.savefig(path)


def run(root: str, steps: Sequence[str], picture: Path | None) -> None:
    """Runs steps in order, in one Spark application.

    Raises:
        HopsGpuError: as the steps do.
    """
    places = Places(root.rstrip("/"))
    spark = hopsgpu.session("lake-pipeline", conf={"spark.sql.shuffle.partitions": 4})
    spans, said = [], {}
    try:
        with GpuCount() as count:
            for name in steps:
                begin = count.now()
                said[name] = STEPS[name](spark, places)
                spans.append((name, begin, count.now()))
                print(f"{name}: {said[name]} ({count.now() - begin:.1f} s)", flush=True)
    finally:
        spark.stop()
    trained = [(begin, end) for name, begin, end in spans if name == "train"]
    outside = [
        used for at, used in count.seen if not any(begin <= at <= end for begin, end in trained)
    ]
    most = max((used for _, used in count.seen), default=0)
    print(f"GPUs in use: at most {most}; outside of the training at most {max(outside, default=0)}")
    if picture is not None and count.seen:
        draw(count, spans, said.get("train", ""), picture)
        print(f"picture: {picture}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code that an orchestrator's task wants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", help="directory on the lake, as hdfs:///tmp/wines")
    parser.add_argument("--step", choices=STEPS, action="append", help="all of them by default")
    parser.add_argument("--picture", type=Path, default=None, help="PNG file to draw")
    given = parser.parse_args(arguments)
    try:
        run(given.root, given.step or list(STEPS), given.picture)
    except hopsgpu.HopsGpuError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
