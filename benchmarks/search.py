"""A search of 60 uneven trials on one GPU that become four: the time lost between trials.

For comparison, the same trials run in rounds on a held gang, and in a plain Spark map.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import optuna
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import hopsgpu
from benchmarks import functions
from hopsgpu.backends.spark.attachment import application_of
from hopsgpu.backends.spark.resource_profiles import build_profile
from hopsgpu.core.spec import GangSpec
from hopsgpu.core.trials import SearchStatus

TRIALS = 60
GPUS = 4
_SHORTEST, _LONGEST = 0.5, 5.0
# So long there is one GPU.
_ALONE_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_WAIT_SECONDS = 600.0


def lengths() -> list[float]:
    """Return seconds of each trial."""
    chance = random.Random(7)
    return [chance.uniform(_SHORTEST, _LONGEST) for _ in range(TRIALS)]


def measure(spark: SparkSession) -> Mapping[str, object]:
    """Print and return the figures of a search, rounds and a map of the same trials."""
    print(f"\n{TRIALS} trials of {_SHORTEST} to {_LONGEST} s on 1, then {GPUS} GPUs")
    figures = {}
    for name, way in {"search": _search, "rounds": _rounds, "map": lambda: _map(spark)}.items():
        told = figures[name] = way()
        print(
            f"  {name:8} {told['seconds']:6.1f} s; a trial ran in {told['share']:.1%} of the held"
            " GPU time (target for the search: 95 %)",
            flush=True,
        )
    told = figures["search"]
    print(f"  from the call to the first trial {told['first']:.1f} s, to {GPUS} GPUs ", end="")
    print(f"{told['whole']:.1f} s ({_ALONE_SECONDS:g} s of them after the first trial)")
    print(
        f"  from a trial's end to the next on its GPU: {told['gap']:.0f} ms,"
        f" 99 %: {told['gap 99']:.0f} ms (target: under 50), and {told['calm gap 99']:.0f} ms while"
        " no executor starts on the same cores"
    )
    return figures


def _search() -> dict[str, float]:
    seconds = lengths()
    seen = _Seen()
    found: list[hopsgpu.types.SearchResult] = []
    began = time.time()

    def work() -> None:
        found.append(
            hopsgpu.search(
                functions.trial,
                {"index": optuna.distributions.IntDistribution(0, TRIALS - 1)},
                trials=TRIALS,
                max_concurrent=GPUS,
                kwargs={"seconds": seconds},
                sampler="grid",
                metric="loss",
                cores_per_worker=1,
                memory_per_worker="1g",
                progress=seen,
            )
        )

    with hopsgpu.hold(workers=GPUS - 1, cores_per_worker=1, progress="off"):
        thread = threading.Thread(target=work, daemon=True)
        began = time.time()
        thread.start()
        assert seen.first.wait(_WAIT_SECONDS), "no trial has run"
        time.sleep(_ALONE_SECONDS)
    others_start = time.time()
    thread.join(_WAIT_SECONDS)
    (result,) = found
    ran = [(t.gpu, t.metrics["began"], t.metrics["ended"]) for t in result.trials]
    gaps = _gaps(ran)
    busy = sum(ended - start for _, start, ended in ran)
    assert seen.whole_at is not None, "all GPUs were never there"
    calm = [ms for at, ms in gaps if not others_start <= at <= seen.whole_at]
    return {
        "seconds": max(ended for _, _, ended in ran) - began,
        "share": busy / result.gpu_seconds.held,
        "first": min(start for _, start, _ in ran) - began,
        "whole": seen.whole_at - began,
        "gap": statistics.median(ms for _, ms in gaps),
        "gap 99": _percentile([ms for _, ms in gaps]),
        "calm gap 99": _percentile(calm),
    }


class _Seen:
    """When a search had its first trial, and all GPUs."""

    def __init__(self) -> None:
        self.first = threading.Event()
        self.whole_at: float | None = None

    def __call__(self, status: SearchStatus) -> None:
        if status.running:
            self.first.set()
        if status.executors == GPUS and self.whole_at is None:
            self.whole_at = time.time()


def _percentile(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _gaps(ran: Sequence[tuple[str, float, float]]) -> list[tuple[float, float]]:
    """Return when each trial ended, and the milliseconds until the next one on its GPU."""
    by_gpu: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for gpu, began, ended in ran:
        by_gpu[gpu].append((began, ended))
    return [
        (earlier[1], 1000 * (later[0] - earlier[1]))
        for spans in by_gpu.values()
        for earlier, later in zip(sorted(spans), sorted(spans)[1:], strict=False)
    ]


def _rounds() -> dict[str, float]:
    """Measure rounds, from the moment when all GPUs are there."""
    seconds, ran = lengths(), []
    with hopsgpu.hold(workers=GPUS, cores_per_worker=1, progress="off") as gang:
        granted = time.time()
        for first in range(0, TRIALS, GPUS):
            result = gang.launch(functions.own_trial, (first, seconds), progress="off")
            ran += [(value["began"], value["ended"]) for value in result.values]
        return _told(ran, GPUS * (time.time() - granted))


def _map(spark: SparkSession) -> dict[str, float]:
    """Measure a map, from each executor's first trial to the end of all."""
    seconds = lengths()
    site = application_of(spark)
    shape = site.fit(GangSpec("map", cores_per_worker=1, memory_per_worker=2**30)).shape
    numbers = spark.sparkContext.parallelize(range(TRIALS), TRIALS)
    # The executors do not have the module.
    cloudpickle.register_pickle_by_value(functions)
    try:
        found = (
            numbers.withResources(build_profile(shape))
            .map(
                lambda index: {
                    **functions.trial(index, seconds),
                    "executor": os.environ["CONTAINER_ID"],
                }
            )
            .collect()
        )
    finally:
        cloudpickle.unregister_pickle_by_value(functions)
    until = time.monotonic() + _WAIT_SECONDS
    while hopsgpu.inventory().used and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    ran = [(value["began"], value["ended"]) for value in found]
    last = max(ended for _, ended in ran)
    firsts: dict[str, float] = {}
    for value in sorted(found, key=lambda value: float(value["began"])):
        firsts.setdefault(value["executor"], value["began"])
    return _told(ran, sum(last - first for first in firsts.values()))


def _told(ran: Sequence[tuple[float, float]], held: float) -> dict[str, float]:
    busy = sum(ended - began for began, ended in ran)
    return {
        "seconds": max(ended for _, ended in ran) - min(began for began, _ in ran),
        "share": busy / held,
    }
