"""A launch on a held gang, compared with other launchers and a raw barrier stage."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import SparkSession

import hopsgpu
from benchmarks.bare import bare_stage, release_bare
from benchmarks.functions import first_line, nothing, tensorflow_all_reduce, torch_all_reduce
from benchmarks.rivals import (
    BARRIER,
    STAGE,
    TENSORFLOW_RIVAL,
    TORCH_GPU_RIVAL,
    TORCH_RIVAL,
    WORKERS,
    times,
)
from benchmarks.table import heading, row

HELD = 100
HELD_TENSORFLOW = 20
COLD = 5
FUNCTION = "a function that returns"
TORCH = "a gloo all-reduce"
TENSORFLOW = "a TensorFlow all-reduce"
# What is compared with what, and how many times faster it is to be.
RATIOS = (
    (TORCH, TORCH_RIVAL, "target: 50"),
    (TORCH, TORCH_GPU_RIVAL, "measured; only on a standalone master"),
    (TENSORFLOW, TENSORFLOW_RIVAL, "measured"),
    (FUNCTION, BARRIER, "target: 5"),
    (FUNCTION, STAGE, "measured; it starts tasks, and none knows of another"),
)


def measure() -> Mapping[str, Sequence[float]]:
    """Return seconds of launches on a held gang, of other launchers' and of barrier stages."""
    spark = hopsgpu.session("bench")
    try:
        ours = held(spark)
    finally:
        spark.stop()
    others, failures = rivals()
    show(ours, others)
    for name, cause in failures.items():
        print(f"{name} could not run: {cause}")
    return {**ours, **others}


def held(spark: SparkSession) -> dict[str, Sequence[float]]:
    """Return seconds of launches on a held gang of 2 CPU ranks."""
    functions: dict[str, tuple[Callable[[], Any], int]] = {
        FUNCTION: (nothing, HELD),
        TORCH: (torch_all_reduce, HELD),
        TENSORFLOW: (tensorflow_all_reduce, HELD_TENSORFLOW),
    }
    with hopsgpu.hold(workers=WORKERS, gpus_per_worker=0, progress="off", spark=spark) as gang:
        return {
            name: times(functools.partial(gang.launch, function, progress="off"), count)
            for name, (function, count) in functions.items()
        }


def cold(spark: SparkSession) -> Mapping[str, Sequence[float]]:
    """Measure the seconds to the function's first line, and to a bare stage, in turn."""
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


def rivals() -> tuple[dict[str, Sequence[float]], dict[str, str]]:
    """Return the seconds of the same by others, and why some could not run.

    They have a process of their own (`benchmarks.rivals`).
    """
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.rivals"], stdout=subprocess.PIPE, text=True, check=True
    )
    answer = json.loads(ran.stdout.splitlines()[-1])
    return answer["seconds"], answer["failures"]


def show(ours: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]) -> None:
    """Print both with their ratios."""
    heading(f"{WORKERS} ranks on executors that are there, seconds")
    for name, seconds in (*ours.items(), *others.items()):
        row(name, seconds)
        print(f"{'':36}{'99 %':>8}{_percentile(seconds):8.2f}")
    print()
    for own, other, wanted in RATIOS:
        if other not in others:
            continue
        ratio = statistics.median(others[other]) / statistics.median(ours[own])
        print(f"{own} is {ratio:.1f} times faster than {other} ({wanted})")


def _percentile(seconds: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return sorted(seconds)[min(len(seconds) * 99 // 100, len(seconds) - 1)]
