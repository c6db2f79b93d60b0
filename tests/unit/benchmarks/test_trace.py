"""Generated jobs are like those that their distributions were fitted to, and reading a trace."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.trace import (
    Job,
    TraceModel,
    compare,
    fit,
    fitted,
    generate,
    read_trace,
    size_class,
)

DAY = 24 * 3600


def model() -> TraceModel:
    chance = random.Random(5)
    jobs = [
        Job(
            7 * DAY * (number % 3) + DAY + chance.random() * DAY,
            chance.lognormvariate(5, 1),
            chance.choice((1, 1, 1, 4)),
            "a" if number % 10 else "b",
        )
        for number in range(4000)
    ]
    return fit(sorted(jobs, key=lambda job: job.submitted))


def test_a_seed_gives_the_same_jobs_and_another_one_others() -> None:
    assert generate(model(), 1) == generate(model(), 1) != generate(model(), 2)


def test_generated_jobs_have_the_distributions() -> None:
    jobs = generate(model(), 3)
    assert len(jobs) == 4000
    assert Counter(job.cluster for job in jobs) == {"a": 3600, "b": 400}
    assert Counter(job.gpus for job in jobs)[4] == pytest.approx(1000, rel=0.1)
    seconds = [job.seconds for job in jobs]
    for quantile, of_normal in ((0.25, -0.6745), (0.5, 0.0), (0.75, 0.6745)):
        assert np.quantile(seconds, quantile) == pytest.approx(np.exp(5 + of_normal), rel=0.1)
    assert [job.submitted for job in jobs] == sorted(job.submitted for job in jobs)
    # Of each week only the second day has jobs; a batch may last into the next.
    on_the_day = sum(1 <= job.submitted % (7 * DAY) / DAY < 2 for job in jobs)
    assert on_the_day > 0.95 * len(jobs)
    assert {int(job.submitted // (7 * DAY)) for job in jobs} == {0, 1, 2}


def test_fewer_jobs_are_submitted_in_the_same_time() -> None:
    jobs = generate(fitted(), 1, 0.02)
    assert len(jobs) == pytest.approx(0.02 * 82247, rel=0.05)
    assert jobs[-1].submitted > 80 * DAY


def test_the_fitted_distributions_are_those_of_the_philly_trace() -> None:
    # Quantiles of the trace: all durations, and the share of gangs.
    jobs = generate(fitted(), 1)
    assert len(jobs) == 82247
    assert np.quantile([job.seconds for job in jobs], 0.5) == pytest.approx(1144, rel=0.1)
    assert np.mean([job.gpus > 1 for job in jobs]) == pytest.approx(0.068, abs=0.02)
    assert np.mean([job.seconds <= 300 for job in jobs]) == pytest.approx(0.327, abs=0.03)
    table = compare(jobs, generate(fitted(), 2, 0.1))
    assert "seconds, 16 GPUs or more" in table and "82247 |" in table


@pytest.mark.parametrize(
    ("gpus", "size"), [(1, 1), (2, 2), (3, 2), (4, 4), (8, 8), (11, 8), (12, 16), (128, 16)]
)
def test_sizes_have_classes(gpus: int, size: int) -> None:
    assert size_class(gpus) == size


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_trace_is_read_in_the_order_of_submission(tmp_path: Path, name: str) -> None:
    text = (
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-09 07:01:55,66.0,1,66.0,11cb48\n"
        "2017-10-09 07:01:25,10.0,4,40.0,6214e9\n"
    )
    data = gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    (tmp_path / name).write_bytes(data)
    assert read_trace(str(tmp_path / name)) == [
        Job(0.0, 10.0, 4, "6214e9"),
        Job(30.0, 66.0, 1, "11cb48"),
    ]
