"""Other launchers and raw barrier stages, on two executors that are there.

They need an application without dynamic allocation, which Spark refuses beside barriers.
spark-tensorflow-distributor is not measured yet: its first stage had not ended when a run was cut
off after 170 s, for a cause that was not looked for. It gives its tasks the names of nodes, which
on the development cluster only JVMs resolve.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from pyspark import BarrierTaskContext, cloudpickle
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

from benchmarks import functions
from benchmarks.functions import nothing, torch_all_reduce

WORKERS = 2
BARRIERS = 20
DISTRIBUTED = 5
BARRIER = "a raw barrier stage"
STAGE = "the same without its barrier()"
TORCH_RIVAL = "TorchDistributor, gloo"


def main() -> None:
    """Prints the seconds of each as JSON."""
    spark = (
        SparkSession.builder.appName("rivals")
        .master("yarn")
        .config("spark.dynamicAllocation.enabled", "false")
        .config("spark.executor.instances", str(WORKERS))
        .config("spark.executor.cores", "2")
        .config("spark.task.cpus", "2")
        .config("spark.executor.memory", "512m")
        .config("spark.executor.memoryOverhead", "3g")
        .getOrCreate()
    )
    # The executors have no such module.
    cloudpickle.register_pickle_by_value(functions)
    try:
        torch = TorchDistributor(num_processes=WORKERS, local_mode=False, use_gpu=False)
        works: dict[str, tuple[Callable[[], object], int]] = {
            BARRIER: (lambda: barrier_stage(spark, meets=True), BARRIERS),
            STAGE: (lambda: barrier_stage(spark, meets=False), BARRIERS),
            TORCH_RIVAL: (lambda: torch.run(torch_all_reduce), DISTRIBUTED),
        }
        print(json.dumps({name: times(*work) for name, work in works.items()}))
    finally:
        spark.stop()


def barrier_stage(spark: SparkSession, *, meets: bool) -> None:
    """A function that returns, on all executors; its tasks wait for each other where they meet."""

    def task(_: object) -> list[int]:
        if meets:
            BarrierTaskContext.get().barrier()
        return [nothing()]

    stage = spark.sparkContext.parallelize(range(WORKERS), WORKERS).barrier()
    assert len(stage.mapPartitions(task).collect()) == WORKERS


def times(work: Callable[[], object], count: int) -> list[float]:
    """Seconds of each time, after one that is not counted."""
    work()
    return [seconds_of(work) for _ in range(count)]


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that something takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


if __name__ == "__main__":
    main()
