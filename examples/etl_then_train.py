"""From raw rows on HDFS to a served model, in one Spark application.

ETL runs on CPU executors and holds no GPU. The training takes its GPUs from the cluster, all of
them or none, and gives them back when the function returns; the application then continues.

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/etl_then_train.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from hdfs_native.fsspec import HdfsFileSystem
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.datasets import load_digits
from torch import nn

import hopsgpu

WORKERS = 2
BEGIN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f} s] {text}", flush=True)


# --- ETL: plain Spark -------------------------------------------------------------------


def write_raw(spark: SparkSession, url: str) -> None:
    """Write the handwritten digits that scikit-learn ships, with flaws of raw data.

    Some scans are there twice, some have no label, some a broken pixel.
    """
    digits = load_digits()
    rows = [
        (i, [int(p) for p in image], int(label))
        for i, (image, label) in enumerate(zip(digits.data, digits.target, strict=True))
    ]
    twice = rows[:60]
    unlabelled = [(len(rows) + i, row[1], None) for i, row in enumerate(rows[:25])]
    broken = [(len(rows) + 25 + i, [255, *row[1][1:]], row[2]) for i, row in enumerate(rows[:15])]
    schema = "scan long, pixels array<int>, label int"
    frame = spark.createDataFrame([*rows, *twice, *unlabelled, *broken], schema)
    frame.repartition(4).write.mode("overwrite").parquet(url)


def clean(raw: DataFrame) -> DataFrame:
    """Return labelled, complete, distinct scans with pixels in [0, 1]."""
    whole = F.forall("pixels", lambda p: p.between(0, 16)) & (F.size("pixels") == 64)
    return (
        raw.where(F.col("label").isNotNull() & whole)
        .dropDuplicates(["scan"])
        .withColumn("pixels", F.transform("pixels", lambda p: (p / 16).cast("float")))
    )


# --- Training: plain PyTorch, run once in each rank --------------------------------------


class Net(nn.Module):
    """A small convolutional network for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 16, 64),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(64, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def read(url: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (rows, 1, 8, 8) and labels (rows,) of a Parquet directory on HDFS."""
    parts = urlsplit(url)
    # Not cached by fsspec: a cached one makes processes forked later hang (a DataLoader's).
    lake = HdfsFileSystem(host=parts.hostname, port=parts.port, skip_instance_cache=True)
    files = pafs.PyFileSystem(pafs.FSSpecHandler(lake))
    table: pa.Table = pq.read_table(parts.path, filesystem=files).sort_by("scan")
    pixels = np.array(table["pixels"].to_pylist(), dtype=np.float32)
    labels = table["label"].to_numpy().astype(np.int64)
    return torch.from_numpy(pixels).reshape(-1, 1, 8, 8), torch.from_numpy(labels)


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def train(train_url: str, test_url: str, epochs: int) -> dict[str, float]:
    ctx = hopsgpu.context()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", ctx.local_rank)
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    images, labels = (part.to(device) for part in read(train_url))
    even = len(images) - len(images) % ctx.world_size  # as many rows in every rank
    images, labels = (
        images[ctx.rank : even : ctx.world_size],
        labels[ctx.rank : even : ctx.world_size],
    )
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for batch in torch.randperm(len(images), device=device).split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        ctx.report(epoch + 1, loss=total / len(images))
        if ctx.rank == 0:
            print(f"epoch {epoch + 1}: loss {total / len(images):.4f}")
    tested = accuracy(model.module, *(part.to(device) for part in read(test_url)))
    if ctx.rank == 0:
        torch.save(model.module.cpu().state_dict(), ctx.model_dir / "digits.pt")
    dist.destroy_process_group()
    return {"accuracy": tested, "rows": len(images)}


# --- The pipeline ------------------------------------------------------------------------


class GpuCount:
    """The cluster manager's own count of GPUs in use, printed whenever it changes."""

    def __init__(self) -> None:
        self._said: tuple[int, int] | None = None

    def say(self, when: str) -> int:
        gpus = hopsgpu.inventory()
        if (gpus.used, gpus.total) != self._said:
            say(f"the cluster: {gpus.used} of {gpus.total} GPUs in use ({when})")
            self._said = (gpus.used, gpus.total)
        return gpus.used


def main() -> None:
    say("starting Spark")
    # Two CPU executors are enough for this ETL; without a limit Spark requests many, and they
    # block the gang until they have been idle for a minute.
    few = {"spark.dynamicAllocation.maxExecutors": 2, "spark.sql.shuffle.partitions": 4}
    spark = hopsgpu.session("etl-then-train", conf=few)
    count = GpuCount()
    context = spark.sparkContext
    files = context._jsc.hadoopConfiguration().get("fs.defaultFS")
    lake = f"{files}/user/{context.sparkUser()}/lake/digits"

    say("ETL: raw scans to HDFS, cleaned and split by Spark on CPU executors")
    write_raw(spark, f"{lake}/raw")
    raw = spark.read.parquet(f"{lake}/raw")
    cleaned = clean(raw).cache()
    training = F.abs(F.hash("scan")) % 5 > 0
    cleaned.where(training).write.mode("overwrite").parquet(f"{lake}/train")
    cleaned.where(~training).write.mode("overwrite").parquet(f"{lake}/test")
    say(f"ETL: {raw.count()} raw scans, {cleaned.count()} clean ones")
    cleaned.unpersist()
    count.say("before training")

    say(f"training on a gang of {WORKERS}")
    run = hopsgpu.submit(
        train,
        args=(f"{lake}/train", f"{lake}/test"),
        kwargs={"epochs": 12},
        workers=WORKERS,
        model="digits",
        name="digits",
    )
    while not run.wait(1):
        count.say(run.status().state)
    result = run.result()
    after = count.say("after training")

    assert result.model is not None
    with tempfile.TemporaryDirectory() as local:
        result.model.download(local)
        model = Net()
        model.load_state_dict(torch.load(Path(local) / "digits.pt"))
    images, labels = read(f"{lake}/test")
    say(f"model read back from HDFS: accuracy {accuracy(model, images, labels):.4f}")

    say("another Spark job in the same session: which digits are hard?")
    with torch.no_grad():
        predicted = model(images).argmax(1)
    pairs = list(zip(labels.tolist(), predicted.tolist(), strict=True))
    scored = spark.createDataFrame(pairs, "digit int, predicted int")
    wrong = F.sum((F.col("digit") != F.col("predicted")).cast("int"))
    scored.groupBy("digit").agg(F.count("*").alias("tests"), wrong.alias("wrong")).orderBy(
        F.desc("wrong"), "digit"
    ).show(3)
    spark.stop()

    times = result.timeline
    seconds = result.gpu_seconds
    print(f"\naccuracy on the test set   {result.value['accuracy']:.4f}")
    print(f"model                      {result.model.url}")
    print(f"waited for the gang        {times.granted - times.requested:6.1f} s")
    print(f"ranks started              {times.started - times.granted:6.1f} s")
    print(f"trained                    {times.returned - times.started:6.1f} s")
    print(f"published                  {times.published - times.returned:6.1f} s")
    back = f"{times.released - times.published:6.1f} s later" if times.released else "not confirmed"
    print(f"GPUs back                  {back}")
    print(f"GPU seconds held           {seconds.held:6.1f}, training {seconds.training:.1f}")
    print(f"GPUs in use now            {after}")
    if result.value["accuracy"] < 0.95 or after != 0:
        raise SystemExit("the demo did not end as it should")


if __name__ == "__main__":
    main()
