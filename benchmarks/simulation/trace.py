"""The jobs of Microsoft's Philly cluster: a reader of the trace, and a generator of jobs like them.

The generator draws from distributions that were fitted to the trace and are kept in fitted.json;
`python -m benchmarks.simulation.trace TRACE` fits them again. They are, for each virtual cluster,
the sizes of jobs and their durations by size. Jobs are submitted in batches: the times of batches
follow the rate by week, day of the week and hour; the jobs of a batch mostly have the same size.

Source of the trace: M. Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN
Training Workloads", USENIX ATC 2019; here in the form timestamp, duration, num_gpus, gpu_time,
cluster.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

_FITTED = Path(__file__).with_name("fitted.json")
_HOUR, _WEEK = 3600, 7 * 24 * 3600
# Jobs of one virtual cluster that follow each other within this time are a batch.
_BATCH_SECONDS = 60.0
# Virtual clusters with fewer jobs are one.
_LEAST_JOBS = 50
_OTHERS = "others"
# So probably a job of a batch has the size of the one before it, other than by chance.
_SAME_SIZE = 0.8
# Fewer jobs than this do not tell the durations of a size; those of gangs together do.
_LEAST_SAMPLE = 40
# Of the cumulative distributions; between them, the logarithm is linear.
_QUANTILES = (0.0, 0.02, 0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.95, 0.98, 0.995, 1.0)
# Sizes of which the trace has hundreds of jobs; larger ones are one class.
_SIZES = (1, 2, 4, 8)
_LARGE = 16


@dataclass(frozen=True)
class Job:
    """A training of the trace.

    Attributes:
        submitted: seconds since the first job.
        seconds: how long it trains on all of its GPUs.
        gpus: number of its GPUs.
        cluster: its virtual cluster, which is a queue of YARN here.
    """

    submitted: float
    seconds: float
    gpus: int
    cluster: str


def read_trace(path: str) -> list[Job]:
    """Return the jobs of a trace, in the order of their submission.

    Args:
        path: of a CSV file with the columns timestamp, duration, num_gpus and cluster, as it is or
            compressed by gzip.
    """
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", newline="") as file:
        jobs = [
            Job(
                # As if in UTC: no hour is there twice.
                datetime.fromisoformat(row["timestamp"] + "+00:00").timestamp(),
                float(row["duration"]),
                int(row["num_gpus"]),
                row["cluster"],
            )
            for row in csv.DictReader(file)
        ]
    first = min(job.submitted for job in jobs)
    jobs = [replace(job, submitted=job.submitted - first) for job in jobs]
    return sorted(jobs, key=lambda job: job.submitted)


@dataclass(frozen=True)
class Population:
    """The jobs of one virtual cluster.

    Attributes:
        jobs: their number.
        batch_sizes: quantiles of the number of jobs of a batch.
        gaps: quantiles of the seconds between the jobs of a batch.
        sizes: share of the jobs with so many GPUs, by number of GPUs.
        seconds: quantiles of the duration, by class of size.
    """

    jobs: int
    batch_sizes: tuple[float, ...]
    gaps: tuple[float, ...]
    sizes: Mapping[int, float]
    seconds: Mapping[int, tuple[float, ...]]


@dataclass(frozen=True)
class TraceModel:
    """Distributions of jobs.

    Attributes:
        weeks: share of the batches in each week.
        hours: share of the batches in each hour of a week.
        populations: the jobs of each virtual cluster.
    """

    weeks: tuple[float, ...]
    hours: tuple[float, ...]
    populations: Mapping[str, Population]


def size_class(gpus: int) -> int:
    """Return the class of sizes to which a number of GPUs belongs."""
    return max(size for size in (*_SIZES, _LARGE) if size <= max(gpus, 1)) if gpus < 12 else _LARGE


def fit(jobs: Sequence[Job]) -> TraceModel:
    """Return distributions from which jobs like the given ones can be drawn."""
    counts = Counter(job.cluster for job in jobs)
    by_cluster: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        name = job.cluster if counts[job.cluster] >= _LEAST_JOBS else _OTHERS
        by_cluster[name].append(job)
    starts: list[float] = []
    populations = {}
    for name, own in sorted(by_cluster.items()):
        batches = list(_batches(own))
        starts += [batch[0].submitted for batch in batches]
        populations[name] = _population(own, batches)
    weeks = Counter(int(at // _WEEK) for at in starts)
    hours = Counter(int(at % _WEEK // _HOUR) for at in starts)
    return TraceModel(
        tuple(_share(weeks[n], len(starts)) for n in range(max(weeks) + 1)),
        tuple(_share(hours[n], len(starts)) for n in range(7 * 24)),
        populations,
    )


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    batch: list[Job] = []
    for job in jobs:
        if batch and job.submitted - batch[-1].submitted > _BATCH_SECONDS:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def _population(jobs: Sequence[Job], batches: Sequence[Sequence[Job]]) -> Population:
    gaps = [
        after.submitted - before.submitted
        for batch in batches
        for before, after in zip(batch, batch[1:], strict=False)
    ]
    sizes = Counter(job.gpus for job in jobs)
    seconds = {}
    for wanted in {size_class(job.gpus) for job in jobs}:
        sample = [job.seconds for job in jobs if size_class(job.gpus) == wanted]
        if len(sample) < _LEAST_SAMPLE and wanted > 1:
            sample = [job.seconds for job in jobs if job.gpus > 1]
        seconds[wanted] = _quantiles(sample)
    return Population(
        len(jobs),
        _quantiles([len(batch) for batch in batches]),
        _quantiles(gaps or [_BATCH_SECONDS]),
        {size: _share(count, len(jobs)) for size, count in sorted(sizes.items())},
        dict(sorted(seconds.items())),
    )


def _share(count: int, whole: int) -> float:
    return round(count / whole, 6)


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in np.quantile(values, _QUANTILES))


def fitted() -> TraceModel:
    """Return the distributions that were fitted to the Philly trace."""
    fields: dict[str, Any] = json.loads(_FITTED.read_text())
    populations = {
        name: Population(
            given["jobs"],
            tuple(given["batch_sizes"]),
            tuple(given["gaps"]),
            {int(size): share for size, share in given["sizes"].items()},
            {int(size): tuple(values) for size, values in given["seconds"].items()},
        )
        for name, given in fields["populations"].items()
    }
    return TraceModel(tuple(fields["weeks"]), tuple(fields["hours"]), populations)


def generate(model: TraceModel, seed: int, share: float = 1.0) -> list[Job]:
    """Return jobs drawn from distributions, in the order of their submission.

    Args:
        model: the distributions.
        seed: the same seed gives the same jobs.
        share: number of jobs, as a share of those to which the distributions were fitted; the time
            in which they are submitted is the same.
    """
    chance = random.Random(seed)
    jobs: list[Job] = []
    for name, population in model.populations.items():
        left = max(round(share * population.jobs), 1)
        while left:
            count = min(max(round(_drawn(population.batch_sizes, chance)), 1), left)
            jobs += _batch(model, name, count, chance)
            left -= count
    return sorted(jobs, key=lambda job: job.submitted)


def _batch(model: TraceModel, name: str, count: int, chance: random.Random) -> Iterator[Job]:
    population = model.populations[name]
    sizes, weights = list(population.sizes), list(population.sizes.values())
    at, gpus = _batch_time(model, chance), 0
    for number in range(count):
        if number:
            at += _drawn(population.gaps, chance)
        if not gpus or chance.random() >= _SAME_SIZE:
            gpus = chance.choices(sizes, weights)[0]
        seconds = _drawn(population.seconds[size_class(gpus)], chance)
        yield Job(float(round(at)), float(max(round(seconds), 1)), gpus, name)


def _batch_time(model: TraceModel, chance: random.Random) -> float:
    week = chance.choices(range(len(model.weeks)), model.weeks)[0]
    hour = chance.choices(range(len(model.hours)), model.hours)[0]
    return week * _WEEK + (hour + chance.random()) * _HOUR


def _drawn(quantiles: Sequence[float], chance: random.Random) -> float:
    """Return a number drawn from a distribution of which quantiles are known."""
    logarithms = np.log1p(quantiles)
    return float(np.expm1(np.interp(chance.random(), _QUANTILES, logarithms)))


def compare(real: Sequence[Job], drawn: Sequence[Job]) -> str:
    """Return a table of the quantiles of two lists of jobs."""
    lines = [f"{'quantiles of a trace | of generated jobs':36}{'50 %':>20}{'90 %':>20}{'99 %':>20}"]
    lines.append(f"{'number of jobs':36}{len(real):>9} |{len(drawn):>9}")
    for name, own, other in _compared(real, drawn):
        row = f"{name:36}"
        for quantile in (0.5, 0.9, 0.99):
            row += f"{np.quantile(own, quantile):>9.0f} |{np.quantile(other, quantile):>9.0f}"
        lines.append(row)
    return "\n".join(lines)


def _compared(
    real: Sequence[Job], drawn: Sequence[Job]
) -> Iterator[tuple[str, Sequence[float], Sequence[float]]]:
    for size in (*_SIZES, _LARGE):
        own, other = (
            [job.seconds for job in jobs if size_class(job.gpus) == size] for jobs in (real, drawn)
        )
        if own and other:
            more = " or more" * (size == _LARGE)
            yield f"seconds, {size} GPU{'s' * (size > 1)}{more}", own, other
    yield "GPUs", [job.gpus for job in real], [job.gpus for job in drawn]
    yield "seconds between two jobs", _gaps(real), _gaps(drawn)
    yield "jobs in an hour", _per_hour(real), _per_hour(drawn)
    yield "jobs of a virtual cluster", _per_cluster(real), _per_cluster(drawn)


def _gaps(jobs: Sequence[Job]) -> list[float]:
    return list(np.diff([job.submitted for job in jobs]))


def _per_hour(jobs: Sequence[Job]) -> list[float]:
    hours = Counter(int(job.submitted // _HOUR) for job in jobs)
    return [hours[hour] for hour in range(max(hours) + 1)]


def _per_cluster(jobs: Sequence[Job]) -> list[float]:
    return list(Counter(job.cluster for job in jobs).values())


if __name__ == "__main__":
    _FITTED.write_text(json.dumps(asdict(fit(read_trace(sys.argv[1])))) + "\n")
