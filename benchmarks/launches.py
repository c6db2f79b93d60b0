"""Where the time of a cold launch goes, and the GPUs' way back against Spark's own."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence

from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.spark.application import application_of
from hopsgpu.spark.profiles import build_profile
from hopsgpu.spec import GangSpec, shape_of

WORKERS = 2
LAUNCHES = 10


def measure(spark: SparkSession) -> Mapping[str, object]:
    """Seconds of 10 cold launches of 2 ranks, and of one release by Spark's idle timeout."""
    times = [
        hopsgpu.launch(os.getpid, workers=WORKERS, progress="off").timeline for _ in range(LAUNCHES)
    ]
    steps = {
        "asked to granted": [t.granted - t.requested for t in times],
        "granted to started": [t.started - t.granted for t in times],
        "started to returned": [t.returned - t.started for t in times],
        "returned to GPUs free": [t.released - t.returned for t in times],
    }
    idle = release_by_idle_timeout(spark)
    print(f"\n{LAUNCHES} cold launches of {WORKERS} ranks, seconds\n")
    print(f"{'':32}{'median':>8}{'least':>8}{'most':>8}")
    for name, seconds in steps.items():
        print(row(name, seconds))
    print(row("Spark's idle timeout, default", [idle]))
    ratio = idle / statistics.median(steps["returned to GPUs free"])
    print(f"\nGPUs are back {ratio:.0f} times sooner than by Spark's idle timeout")
    return {**steps, "idle timeout": idle, "ratio": ratio}


def row(name: str, seconds: Sequence[float]) -> str:
    middle = statistics.median(seconds)
    return f"{name:32}{middle:8.2f}{min(seconds):8.2f}{max(seconds):8.2f}"


def release_by_idle_timeout(spark: SparkSession) -> float:
    """Seconds from the end of a plain stage under the same profile until its GPUs are free."""
    manager = application_of(spark).manager
    shape = shape_of(GangSpec("idle", workers=WORKERS), cores_per_gpu=1)
    rows = spark.sparkContext.parallelize(range(WORKERS), WORKERS)
    rows.withResources(build_profile(shape)).map(lambda number: number).collect()
    ended = time.time()
    while manager.gpus()[0]:
        time.sleep(0.1)  # between two questions to the ResourceManager
    return time.time() - ended
