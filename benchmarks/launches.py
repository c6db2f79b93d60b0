"""How the time of a launch is spent, and how the GPUs' release compares with Spark's own."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from unittest import mock

from pyspark.sql import SparkSession

import hopsgpu
from benchmarks.bare import bare_stage, floor_of_release, idle_release, release_bare
from benchmarks.table import heading, row
from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.units import count_of

WORKERS = 2
LAUNCHES = 10
FLOORS = 5
COLD_WORKERS = 3
COLD = 7
_BACK = "returned to GPUs free"


def release(spark: SparkSession) -> Mapping[str, object]:
    """Return seconds of 10 launches of 1 rank and of 2, of the floor, and of the idle timeout."""
    flips: list[float] = []
    with timed_flips(flips):
        steps = {workers: _steps(workers) for workers in (1, WORKERS)}
    others = {
        "the flag was off": flips,
        "floor: one kill to GPUs free": [floor_of_release(spark, WORKERS) for _ in range(FLOORS)],
        "Spark's idle timeout, default": [idle_release(spark, WORKERS)],
    }
    for workers, those in steps.items():
        heading(f"{LAUNCHES} cold launches of {count_of(workers, 'rank')}, seconds")
        for name, seconds in those.items():
            row(name, seconds)
    heading("for comparison, seconds")
    for name, seconds in others.items():
        row(name, seconds)
    back = statistics.median(steps[WORKERS][_BACK])
    ratio = others["Spark's idle timeout, default"][0] / back
    print(f"\nGPUs are back after {back:.2f} s (target: at most 1),")
    print(f"{ratio:.0f} times sooner than by Spark's idle timeout (target: at least 50)")
    return {"launches": steps, **others, "ratio": ratio}


def _steps(workers: int) -> dict[str, list[float]]:
    times = [
        hopsgpu.launch(os.getpid, workers=workers, progress="off").timeline for _ in range(LAUNCHES)
    ]
    return {
        "asked to granted": [t.granted - t.requested for t in times],
        "granted to started": [t.started - t.granted for t in times],
        # The costs in `replay`, with the release.
        "asked to started": [t.started - t.requested for t in times],
        "started to returned": [t.returned - t.started for t in times],
        _BACK: [t.released - t.returned for t in times],
    }


@contextlib.contextmanager
def timed_flips(seconds: list[float]) -> Iterator[None]:
    """Record for how long each launch had dynamic allocation's flag changed."""
    flip = Jvm.barriers_allowed

    @contextlib.contextmanager
    def timed(jvm: Jvm) -> Iterator[None]:
        with flip(jvm):
            began = time.monotonic()
            yield
            seconds.append(time.monotonic() - began)

    with mock.patch.object(Jvm, "barriers_allowed", timed):
        yield


def acquisition(spark: SparkSession) -> Mapping[str, object]:
    """Measure the seconds until 3 executors are there, for a gang and a bare stage in turn."""
    bare, ours = [], []
    for _ in range(COLD):
        with bare_stage(spark, COLD_WORKERS) as (took, profile):
            bare.append(took)
        release_bare(spark, profile)
        times = hopsgpu.launch(os.getpid, workers=COLD_WORKERS, progress="off").timeline
        ours.append(times.granted - times.requested)
    heading(f"{COLD_WORKERS} executors, asked for until all are there, {COLD} times each, seconds")
    row("a bare stage of the same profile", bare)
    row("a gang", ours)
    above = statistics.median(ours) - statistics.median(bare)
    print(f"\na gang takes {above:.2f} s more (target: at most 1.5)")
    return {"bare": bare, "gang": ours, "above": above}
