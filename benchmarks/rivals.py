"""Other launchers and raw barrier stages, on two running executors.

They need an application without dynamic allocation, because Spark does not combine it with
barriers. On a standalone master, each executor also has a GPU, for which TorchDistributor asks with
`use_gpu=True`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pyspark import BarrierTaskContext, cloudpickle
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
from spark_tensorflow_distributor import MirroredStrategyRunner

from benchmarks import functions
from benchmarks.functions import nothing, tensorflow_all_reduce, torch_all_reduce
from hopsgpu.cluster_managers.standalone.master_url import is_standalone
from hopsgpu.storage.spark_defaults import spark_defaults

WORKERS = 2
CORES = 2
BARRIERS = 20
DISTRIBUTED = 5
BARRIER = "a raw barrier stage"
STAGE = "the same without its barrier()"
TORCH_RIVAL = "TorchDistributor, gloo"
TORCH_GPU_RIVAL = "TorchDistributor, gloo, use_gpu"
TENSORFLOW_RIVAL = "spark-tensorflow-distributor"
_PYTHON_ERROR = re.compile(r"\w*(Error|Exception): ")


def main() -> None:
    """Print the seconds of each, and why others could not run, as JSON."""
    master = configured_master()
    builder = (
        SparkSession.builder.appName("rivals")
        .master(master)
        .config("spark.dynamicAllocation.enabled", "false")
        .config("spark.executor.instances", str(WORKERS))
        .config("spark.executor.cores", str(CORES))
        .config("spark.task.cpus", str(CORES))
        .config("spark.executor.memory", "512m")
        .config("spark.executor.memoryOverhead", "3g")
    )
    if is_standalone(master):
        builder = (
            builder
            # The master ignores the number of executors.
            .config("spark.cores.max", str(WORKERS * CORES))
            .config("spark.executor.resource.gpu.amount", "1")
            .config("spark.task.resource.gpu.amount", "1")
        )
    spark = builder.getOrCreate()
    # The executors have no such module.
    cloudpickle.register_pickle_by_value(functions)
    try:
        torch = TorchDistributor(num_processes=WORKERS, local_mode=False, use_gpu=False)
        works: dict[str, tuple[Callable[[], object], int]] = {
            BARRIER: (lambda: barrier_stage(spark, meets=True), BARRIERS),
            STAGE: (lambda: barrier_stage(spark, meets=False), BARRIERS),
            TORCH_RIVAL: (lambda: torch.run(torch_all_reduce), DISTRIBUTED),
            TENSORFLOW_RIVAL: (tensorflow_distributor(spark), DISTRIBUTED),
        }
        if is_standalone(master):
            works[TORCH_GPU_RIVAL] = (run_on_gpus, DISTRIBUTED)
        taken, failures = {}, {}
        for name, work in works.items():
            print(f"{name} …", file=sys.stderr, flush=True)
            try:
                taken[name] = times(*work)
            except Exception as error:
                if master == "yarn":
                    raise
                failures[name] = cause_of(error)
        print(json.dumps({"seconds": taken, "failures": failures}))
    finally:
        spark.stop()


def configured_master() -> str:
    """Return the master of the cluster's configuration; YARN if it names none."""
    return spark_defaults(os.environ).get("spark.master", "yarn")


def run_on_gpus() -> object:
    """Run PyTorch's all-reduce by TorchDistributor on executors with a GPU."""
    torch = TorchDistributor(num_processes=WORKERS, local_mode=False, use_gpu=True)
    return torch.run(torch_all_reduce)


def cause_of(error: Exception) -> str:
    """Return the last line of Python's error in a task, or the first line of another error."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in reversed(lines) if _PYTHON_ERROR.match(line)), lines[0])


def barrier_stage(spark: SparkSession, *, meets: bool) -> None:
    """Run a function that returns, on all executors; its tasks wait for each other."""

    def task(_: object) -> list[int]:
        if meets:
            BarrierTaskContext.get().barrier()
        return [nothing()]

    stage = spark.sparkContext.parallelize(range(WORKERS), WORKERS).barrier()
    assert len(stage.mapPartitions(task).collect()) == WORKERS


def tensorflow_distributor(spark: SparkSession) -> Callable[[], object]:
    """TensorFlow's collectives as spark-tensorflow-distributor starts them.

    It sends its tasks the names of nodes, which only the JVMs of a development cluster know: the
    function replaces them by their addresses.
    """
    file = spark.sparkContext._jsc.hadoopConfiguration().get("hopsgpu.hosts")
    rows = [line.split() for line in Path(file).read_text().splitlines()] if file else []
    addresses = {name: row[0] for row in rows for name in row[1:]}

    def all_reduce() -> float:
        config = json.loads(os.environ["TF_CONFIG"])
        workers = [worker.rpartition(":") for worker in config["cluster"]["worker"]]
        config["cluster"]["worker"] = [f"{addresses.get(h, h)}:{port}" for h, _, port in workers]
        os.environ["TF_CONFIG"] = json.dumps(config)
        from tensorflow.python.eager import context

        # Tasks share a Python process; the distributor does so for a strategy of its own.
        context._reset_context()
        return tensorflow_all_reduce()

    runner = MirroredStrategyRunner(num_slots=WORKERS, use_gpu=False, use_custom_strategy=True)
    return lambda: runner.run(all_reduce)


def times(work: Callable[[], object], count: int) -> list[float]:
    """Return seconds of each time, after one that is not counted."""
    work()
    return [seconds_of(work) for _ in range(count)]


def seconds_of(work: Callable[[], object]) -> float:
    """Return seconds that something takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


if __name__ == "__main__":
    main()
