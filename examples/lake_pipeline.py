"""A pipeline on the lake, in one Spark application: from raw files to a table of predictions.

    raw CSV -> clean -> features (Spark ML) -> gang training -> comparison with the version in
    production -> promotion -> batch scoring -> table

Each step reads what the previous one left on the lake, and can be repeated. Run all of them, or one
as a task of an orchestrator, which needs only the exit code (not 0 on failure, with the reason on
stderr):

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/lake_pipeline.py hdfs:///tmp/wines --picture gpus.png
    python examples/lake_pipeline.py hdfs:///tmp/wines --step train --step compare --step promote

At the end a picture shows the ResourceManager's count of GPUs in use, zero except during the
training and the scoring, and how many CPU executors Spark started and stopped. Without a cluster it
runs on this machine, has no executors, and counts the machine's leased GPUs:

    python examples/lake_pipeline.py file:///tmp/wines

It also needs pandas and matplotlib (`pip install hopsgpu[pipeline]`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import requests
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.ml import Pipeline
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


class Places:
    """Where each step leaves what the next one reads."""

    def __init__(self, root: str) -> None:
        self.raw = f"{root}/raw"
        self.cleaned = f"{root}/cleaned"
        self.scaling = f"{root}/scaling"
        self.features = f"{root}/features"
        self.comparison = f"{root}/comparison"
        self.scored = f"{root}/scored"


# --- Before the training: CPU executors, which come and go by themselves -------------------


def collect(spark: SparkSession, places: Places) -> str:
    """Stand in for data that arrives on a lake: CSV files, some rows twice, some unreadable."""
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
    """Write labelled, complete, distinct rows, with types."""
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
    """Write one array of scaled floats per row, and hold out a quarter of the rows."""
    cleaned = spark.read.parquet(places.cleaned)
    inputs = [name for name in cleaned.columns if name not in ("bottle", "kind")]
    stages = [
        VectorAssembler(inputCols=inputs, outputCol="assembled"),
        StandardScaler(inputCol="assembled", outputCol="scaled", withMean=True),
    ]
    scaling = Pipeline(stages=stages).fit(cleaned)
    scaling.write().overwrite().save(places.scaling)  # for bottles that arrive later
    rows = scaling.transform(cleaned).select(
        "bottle",
        vector_to_array("scaled", "float32").alias("features"),
        "kind",
        (F.pmod(F.hash("bottle"), F.lit(4)) == 0).alias("held_out"),
    )
    rows.write.mode("overwrite").parquet(places.features)
    return f"{len(inputs)} features"


def shapes(features: DataFrame) -> dict[str, tuple[int]]:
    return {"features": (len(features.select("features").first()["features"]),)}


# --- The training: GPUs are held here, and while the new version scores, and nowhere else ----


def network(inputs: int):  # type: ignore[no-untyped-def]  # only ranks have torch
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 32), torch.nn.ReLU(), torch.nn.Linear(32, CLASSES)
    )


def fit(epochs: int) -> dict[str, float]:
    """Train in every rank: plain PyTorch, on the rank's own rows."""
    import torch
    import torch.distributed as dist

    ctx = hopsgpu.context()
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", ctx.local_rank) if has_gpu else torch.device("cpu")
    torch.manual_seed(0)
    width = len(ctx.data.to_arrow(["features"])["features"][0])
    model = torch.nn.parallel.DistributedDataParallel(network(width).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = ctx.data.torch(32, shuffle=True, seed=0, shapes={"features": (width,)})
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
        ctx.report(epoch, loss=loss.item(), accuracy=right / rows)
    if ctx.rank == 0:
        torch.save(model.module.cpu().state_dict(), ctx.model_dir / "weights.pt")
    dist.destroy_process_group()
    return {"accuracy": right / rows, "rows": rows}


def train(spark: SparkSession, places: Places) -> str:
    """Hold all GPUs or none, for as long as it trains; publish a new version on the lake."""
    features = spark.read.parquet(places.features)
    result = hopsgpu.launch(
        fit,
        args=(EPOCHS,),
        workers=WORKERS,
        gpus_per_worker=gpus_per_worker(),
        memory_per_worker="2g",
        data=features.where("not held_out"),
        model=MODEL,
    )
    assert result.model is not None
    models().tag(MODEL, result.model.version, "candidate")
    seconds = result.gpu_seconds
    return (
        f"version {result.model.version}, accuracy {result.value['accuracy']:.3f};"
        f" GPU seconds: held {seconds.held:.0f}, training {seconds.training:.0f},"
        f" publishing {seconds.publishing:.0f}, idle {seconds.idle:.0f}"
    )


# --- Is the new version better than the one in production? CPU executors answer --------------


class Classifier:
    """What scores: one object in each process, with the files of the version."""

    def __init__(self, model_dir: Path) -> None:
        import torch

        weights = torch.load(model_dir / "weights.pt", weights_only=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network = network(weights["0.weight"].shape[1]).to(self.device).eval()
        self.network.load_state_dict(weights)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        with torch.no_grad():
            features = torch.tensor(batch["features"]).to(self.device)
            probabilities = torch.softmax(self.network(features), dim=1)
        sure = probabilities.max(dim=1)
        return {"predicted": sure.indices.int(), "probability": sure.values}


def accuracy(spark: SparkSession, places: Places, version: int) -> float:
    """Return the share of held-out bottles that a version gets right."""
    rows = spark.read.parquet(places.features).where("held_out")
    result = hopsgpu.score(
        Classifier,
        rows,
        model=f"{MODEL}@{version}",
        columns=["features"],
        shapes=shapes(rows),
        keep=["kind"],
        gpus_per_worker=0,
        max_concurrent=1,
        memory_per_worker="2g",
    )
    right = F.avg((F.col("predicted") == F.col("kind")).cast("double")).alias("right")
    return float(result.df(spark).agg(right).first()["right"])


def compare(spark: SparkSession, places: Places) -> str:
    """Write how well the candidate and the version in production do on the same rows."""
    tags = models().tags(MODEL)
    # The first candidate has no rival.
    rivals = {tag: tags[tag] for tag in ("candidate", "production") if tag in tags}
    rows = [(tag, version, accuracy(spark, places, version)) for tag, version in rivals.items()]
    frame = spark.createDataFrame(rows, "tag string, version long, accuracy double")
    frame.coalesce(1).write.mode("overwrite").json(places.comparison)
    return ", ".join(f"{tag} {version}: {right:.3f}" for tag, version, right in rows)


def promote(spark: SparkSession, places: Places) -> str:
    """Move the tag to the candidate that was compared, unless production does better."""
    rows = spark.read.schema("tag string, version long, accuracy double").json(places.comparison)
    found = {row["tag"]: row for row in rows.collect()}
    candidate, production = found["candidate"], found.get("production")
    if production is not None and production["accuracy"] > candidate["accuracy"]:
        return f"version {production['version']} stays in production"
    models().tag(MODEL, candidate["version"], "production")
    return f"version {candidate['version']} is in production"


# --- The table: scored on GPUs, joined and written by Spark ----------------------------------


def score(spark: SparkSession, places: Places) -> str:
    """Write a table with the prediction of the version in production for every bottle."""
    # Resolved once: another version may go into production meanwhile.
    version = models().get(MODEL, "production").version
    features = spark.read.parquet(places.features)
    result = hopsgpu.score(
        Classifier,
        places.features,
        model=f"{MODEL}@{version}",
        columns=["features"],
        shapes=shapes(features),
        keep=["bottle"],
        gpus_per_worker=gpus_per_worker(),
        max_concurrent=WORKERS,
        memory_per_worker="2g",
    )
    bottles = spark.read.parquet(places.cleaned).select("bottle", "alcohol", "kind")
    table = bottles.join(result.df(spark), "bottle").withColumn("version", F.lit(version))
    table.write.mode("overwrite").parquet(places.scored)
    table = spark.read.parquet(places.scored)
    right = table.where("predicted = kind").count()
    return (
        f"version {version}: {right} of {table.count()} right;"
        f" GPU seconds: held {result.gpu_seconds.held:.0f}"
    )


def gpus_per_worker() -> int:
    return 1 if hopsgpu.inventory().total > 0 else 0


def models() -> hopsgpu.ModelStore:
    """Return the store in which the launches of this session publish."""
    root = hopsgpu.plan(fit, args=(1,), gpus_per_worker=0).paths["root"]
    return hopsgpu.ModelStore(f"{root}/models")


STEPS: dict[str, Callable[[SparkSession, Places], str]] = {
    "collect": collect,
    "clean": clean,
    "features": make_features,
    "train": train,
    "compare": compare,
    "promote": promote,
    "score": score,
}
# The others hold no GPU.
ON_GPUS = ("train", "score")


# --- What was in use: GPUs, and the application's CPU executors ------------------------------

# When each step began and ended; like all times below, in seconds since the epoch.
Span = tuple[str, float, float]


@contextlib.contextmanager
def gpus_counted() -> Iterator[list[tuple[float, int]]]:
    """While entered, count the GPUs in use, of YARN or this machine, twice a second."""
    seen: list[tuple[float, int]] = []
    over = threading.Event()

    def watch() -> None:
        while True:
            # A missing answer must not end the pipeline.
            with contextlib.suppress(hopsgpu.HopsGpuError):
                seen.append((time.time(), hopsgpu.inventory().used))
            if over.wait(0.5):
                return

    thread = threading.Thread(target=watch, name="gpu-count")
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def cpu_executors(context: SparkContext) -> list[tuple[float, float]]:
    """Return when each executor without a GPU came and went, from the REST API of Spark's UI.

    Of the executors that are gone, it lists the last hundred (spark.ui.retainedDeadExecutors).

    Raises:
        requests.RequestException: it does not answer, for example because spark.ui.enabled is
            false.
    """
    path = f"api/v1/applications/{context.applicationId}/allexecutors"
    # The first answer takes seconds, and many of them on a busy machine.
    answer = requests.get(f"{context.uiWebUrl}/{path}", timeout=60)
    answer.raise_for_status()
    return [
        (instant(one["addTime"]), instant(one["removeTime"]) if "removeTime" in one else math.inf)
        for one in answer.json()
        if one["id"] != "driver" and not one["resources"]
    ]


def instant(told: str) -> float:
    """Parse a time as Spark reports it: 2026-01-31T12:00:00.000GMT."""
    return datetime.fromisoformat(told.replace("GMT", "+00:00")).timestamp()


def count_of(gpus: Sequence[tuple[float, int]], context: SparkContext) -> dict[str, list[int]]:
    """Return what was in use at each count."""
    found = {"GPUs in use": [used for _, used in gpus]}
    try:
        lives = cpu_executors(context)
    except requests.RequestException as error:
        print(f"CPU executors are not counted: {error}", file=sys.stderr)
    else:
        found["CPU executors"] = [sum(came <= at < went for came, went in lives) for at, _ in gpus]
    return found


def summary(times: Sequence[float], numbers: Sequence[int], spans: Sequence[Span]) -> str:
    """Return the fewest and the most in each step that may hold GPUs, and outside these."""
    found: dict[str, set[int]] = {name: set() for name in (*ON_GPUS, "outside")}
    for at, number in zip(times, numbers, strict=True):
        during = [name for name, begin, end in spans if name in ON_GPUS and begin <= at <= end]
        found[during[0] if during else "outside"].add(number)
    return ", ".join(
        f"{' to '.join(map(str, sorted({min(some), max(some)})))} {'in ' * (name in ON_GPUS)}{name}"
        for name, some in found.items()
        if some
    )


def draw(
    times: Sequence[float],
    counts: Mapping[str, Sequence[int]],
    spans: Sequence[Span],
    told: str,
    path: Path,
) -> None:
    """Draw the counts over time, one below the other, with the steps behind them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.5 * len(counts)), layout="constrained")
    panels = figure.subplots(len(counts), sharex=True, squeeze=False)[:, 0]
    since = [at - times[0] for at in times]
    for axes, (what, numbers) in zip(panels, counts.items(), strict=True):
        top = max(numbers) + 1
        for number, (name, begin, end) in enumerate(spans):
            axes.axvspan(begin - times[0], end - times[0], color=f"C{number}", alpha=0.12)
            axes.text((begin + end) / 2 - times[0], 0.96 * top, name, ha="center", va="top")
        axes.step(since, numbers, where="post", color="black")
        axes.fill_between(since, numbers, step="post", color="black", alpha=0.25)
        axes.set(ylim=(0, top), ylabel=what)
        axes.yaxis.get_major_locator().set_params(integer=True)
    panels[0].set_title(told)
    panels[-1].set_xlabel("seconds")
    figure.savefig(path)


def run(root: str, steps: Sequence[str], picture: Path | None) -> None:
    """Run steps in order, in one Spark application.

    Raises:
        HopsGpuError, PySparkException: as the steps do.
    """
    places = Places(root.rstrip("/"))
    spark = hopsgpu.session("lake-pipeline", conf={"spark.sql.shuffle.partitions": 4})
    spans: list[Span] = []
    said = {}
    try:
        with gpus_counted() as gpus:
            for name in steps:
                begin = time.time()
                said[name] = STEPS[name](spark, places)
                spans.append((name, begin, time.time()))
                print(f"{name}: {said[name]} ({time.time() - begin:.1f} s)", flush=True)
        counts = count_of(gpus, spark.sparkContext)
    finally:
        spark.stop()
    times = [at for at, _ in gpus]
    if not times:  # no answer
        return
    for what, numbers in counts.items():
        print(f"{what}: {summary(times, numbers, spans)}")
    if picture is not None:
        draw(times, counts, spans, said.get("train", ""), picture)
        print(f"picture: {picture}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code for an orchestrator's task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", help="directory on the lake, as hdfs:///tmp/wines")
    parser.add_argument("--step", choices=STEPS, action="append", help="all of them by default")
    parser.add_argument("--picture", type=Path, default=None, help="PNG file to draw")
    given = parser.parse_args(arguments)
    try:
        run(given.root, given.step or list(STEPS), given.picture)
    except (hopsgpu.HopsGpuError, PySparkException) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
