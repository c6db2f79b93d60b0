"""TorchDistributor and a raw barrier stage, on two executors that are there.

They need an application without dynamic allocation, which Spark refuses beside barriers.
"""

from __future__ import annotations

import json

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

from benchmarks.warm import WORKERS, nothing, seconds_of, torch_all_reduce

BARRIERS = 20
DISTRIBUTED = 5


def main() -> None:
    """Prints the seconds of each as JSON."""
    spark = (
        SparkSession.builder.appName("rivals")
        .master("yarn")
        .config("spark.executor.instances", str(WORKERS))
        .config("spark.executor.cores", "2")
        .config("spark.task.cpus", "2")
        .config("spark.executor.memory", "512m")
        .config("spark.executor.memoryOverhead", "2g")
        .getOrCreate()
    )
    try:
        context = spark.sparkContext

        def barrier() -> None:
            stage = context.parallelize(range(WORKERS), WORKERS).barrier()
            assert len(stage.mapPartitions(lambda _: [nothing()]).collect()) == WORKERS

        distributor = TorchDistributor(num_processes=WORKERS, local_mode=False, use_gpu=False)
        barrier()
        taken = {"a raw barrier stage": [seconds_of(barrier) for _ in range(BARRIERS)]}
        distributor.run(torch_all_reduce)
        taken["TorchDistributor, gloo all-reduce"] = [
            seconds_of(lambda: distributor.run(torch_all_reduce)) for _ in range(DISTRIBUTED)
        ]
        print(json.dumps(taken))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
