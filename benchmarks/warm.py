"""A launch on a held gang, against TorchDistributor and a raw barrier stage on two executors."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession

import hopsgpu
from benchmarks.bare import bare_stage, release_bare
from benchmarks.table import heading, row

WORKERS = 2
HELD = 100
COLD = 5


def nothing() -> int:
    """A function that returns."""
    return os.getpid()


def torch_all_reduce() -> float:
    """The sum of the ranks + 1, by gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    dist.destroy_process_group()
    return float(number)


def tensorflow_all_reduce() -> float:
    """The sum of the ranks + 1, by TensorFlow's collectives."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = int(os.environ["RANK"])
    summed = strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, tf.constant(rank + 1.0)
        )
    )
    return float(summed)


def first_line() -> float:
    """When the function's first line ran, in seconds since the epoch."""
    return time.time()


def held(spark: SparkSession) -> dict[str, Sequence[float]]:
    """Seconds of launches on a held gang of 2 CPU ranks."""
    functions: dict[str, tuple[Callable[[], Any], int]] = {
        "a function that returns": (nothing, HELD),
        "a gloo all-reduce": (torch_all_reduce, HELD),
        "a TensorFlow all-reduce": (tensorflow_all_reduce, HELD // 10),
    }
    taken: dict[str, Sequence[float]] = {}
    with hopsgpu.hold(workers=WORKERS, gpus_per_worker=0, progress="off", spark=spark) as gang:
        for name, (function, times) in functions.items():
            gang.launch(function, progress="off")
            taken[name] = [
                seconds_of(lambda f=function: gang.launch(f, progress="off")) for _ in range(times)
            ]  # type: ignore[misc]
    return taken


def cold(spark: SparkSession) -> Mapping[str, Sequence[float]]:
    """Seconds from the call to the function's first line, and of a bare stage, taken in turns."""
    ours, bare = [], []
    for _ in range(COLD):
        with bare_stage(spark, WORKERS) as (took, profile):
            bare.append(took)
        release_bare(spark, profile)
        began = time.time()
        ours.append(max(hopsgpu.launch(first_line, workers=WORKERS, progress="off").values) - began)
    heading(f"from the call to the first line on {WORKERS} cold executors, {COLD} times, seconds")
    row("a bare stage", bare)
    row("launch()", ours)
    return {"bare": bare, "launch": ours}


def rivals() -> dict[str, Sequence[float]]:
    """Seconds of the same by others, in a process of their own (`benchmarks.rivals`)."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.rivals"], stdout=subprocess.PIPE, text=True, check=True
    )
    taken: dict[str, Sequence[float]] = json.loads(ran.stdout.splitlines()[-1])
    return taken


def show(ours: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]) -> None:
    """Prints both with their ratios."""
    heading(f"{WORKERS} ranks on executors that are there, seconds")
    for name, seconds in (*ours.items(), *others.items()):
        row(name, seconds)
        print(f"{'':36}{'99 %':>8}{_percentile(seconds):8.2f}")
    medians = {name: statistics.median(s) for name, s in (*ours.items(), *others.items())}
    against = medians["TorchDistributor, gloo all-reduce"] / medians["a gloo all-reduce"]
    barrier = medians["a raw barrier stage"] / medians["a function that returns"]
    print(f"\nthe all-reduce is {against:.0f} times faster than TorchDistributor's (50 are wanted)")
    print(f"a launch is {barrier:.0f} times faster than a raw barrier stage (5 are wanted)")


def seconds_of(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _percentile(seconds: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(seconds)[min(len(seconds) * 99 // 100, len(seconds) - 1)]
