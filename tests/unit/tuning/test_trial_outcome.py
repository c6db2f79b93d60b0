"""What a trial returned and reported, as the search counts it; and where GPU time goes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hopsgpu.core.metrics import report_line
from hopsgpu.runs.gpu_accounting import _MAX_MOMENTS, GpuAccount, Moment
from hopsgpu.tuning.trial_outcome import NoMetric, Reports, metric_of


class Tensor:
    """As torch's: one of several elements is no number."""

    def __init__(self, *values: float) -> None:
        self._values = values

    def __float__(self) -> float:
        if len(self._values) != 1:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self._values[0]


@pytest.mark.parametrize(
    ("returned", "metric", "found"),
    [
        (0.5, None, (0.5, {})),
        (3, "loss", (3.0, {"loss": 3.0})),
        (Tensor(0.25), None, (0.25, {})),
        ({"loss": 0.5}, None, (0.5, {"loss": 0.5})),
        (
            {"loss": Tensor(0.5), "name": "a", "accuracy": 0.9, "both": Tensor(1, 2)},
            "loss",
            (0.5, {"loss": 0.5, "accuracy": 0.9}),
        ),
        (math.inf, None, (math.inf, {})),
    ],
)
def test_the_metric_is_found(returned: Any, metric: str | None, found: Any) -> None:
    assert metric_of(returned, metric) == found


@pytest.mark.parametrize(
    ("returned", "metric", "said"),
    [
        (None, None, "returned None; the metric must be a number"),
        ("0.5", None, "the metric must be a number"),
        (Tensor(1, 2), None, "the metric must be a number"),
        (math.nan, None, "is NaN"),
        ({"a": 1, "b": 2}, None, r"several numbers \(a, b\): name the metric with metric="),
        ({}, None, "returned several|nothing"),
        ({"a": 1}, "loss", "no metric 'loss'; it returned a"),
        ({}, "loss", "it returned nothing"),
        ({"loss": "low"}, "loss", "returned 'low'"),
    ],
)
def test_no_metric_says_what_there_is(returned: Any, metric: str | None, said: str) -> None:
    with pytest.raises(NoMetric, match=said):
        metric_of(returned, metric)


def test_reports_come_in_chunks_that_end_anywhere() -> None:
    lines = [report_line(step, {"loss": 1.0 / (step + 1), "other": 0}, 0.0) for step in range(5)]
    gpu = json.dumps({"time": 0.0, "gpu": {}}).encode() + b"\n"
    content = gpu.join(lines) + report_line(5, {"loss": math.nan}, 0.0)
    for size in (1, 7, len(content)):
        reports = Reports("loss")
        found = []
        for start in range(0, len(content), size):
            found += reports.take(content[start : start + size])
        assert found[:-1] == [(step, 1.0 / (step + 1)) for step in range(5)]
        assert found[-1][0] == 5 and math.isnan(found[-1][1])


def test_without_a_name_one_metric_alone_counts_and_several_are_noted() -> None:
    reports = Reports(None)
    assert reports.take(report_line(0, {"loss": 0.5}, 0.0)) == [(0, 0.5)]
    assert reports.several == ()
    assert reports.take(report_line(1, {"loss": 0.5, "accuracy": 0.9}, 0.0)) == []
    assert reports.several == ("loss", "accuracy")


def test_lines_that_are_none_are_left_out() -> None:
    good = report_line(2, {"loss": 0.5}, 0.0)
    strange = b'{"step": 1, "metr\n[1]\n3\n{"metrics": {"loss": 1}}\n{"metrics": 4, "step": 1}\n'
    strange += b'{"step": 1, "metrics": {"loss": "low"}}\n{"step": "x", "metrics": {"loss": 1}}\n'
    assert Reports("loss").take(strange + good) == [(2, 0.5)]


def test_gpu_seconds_are_those_of_executors_held_and_slots_taken() -> None:
    tally = GpuAccount(gpus=2, slots=2)
    tally.change_executors(1, 0.0)
    tally.change_slots(1, 10.0)
    tally.change_executors(1, 20.0)
    tally.change_slots(-1, 30.0)
    tally.change_executors(-2, 40.0)
    seconds = tally.seconds(50.0)
    # Held: 20 s one executor and 20 s two; half an executor ran from 10 to 30.
    assert (seconds.held, seconds.training, seconds.idle) == (120.0, 20.0, 100.0)
    assert tally.share == pytest.approx(1 / 6)
    assert tally.moments[1:3] == [Moment(10.0, 2.0, 1.0), Moment(20.0, 4.0, 1.0)]


def test_a_search_on_cpus_counts_executors_and_no_gpu_time() -> None:
    tally = GpuAccount(gpus=0, slots=1)
    assert tally.share == 0.0
    tally.change_executors(2, 0.0)
    tally.change_slots(1, 0.0)
    assert tally.moments[-1] == Moment(0.0, 2.0, 1.0)
    assert tally.seconds(10.0).held == 0.0 and tally.share == 0.5


def test_the_picture_of_a_long_search_keeps_its_ends_and_its_size() -> None:
    tally = GpuAccount(gpus=1, slots=1)
    for second in range(3 * _MAX_MOMENTS):
        tally.change_slots(1 if second % 2 else -1, float(second))
    times = [moment.time for moment in tally.moments]
    assert len(times) <= _MAX_MOMENTS and times == sorted(times)
    assert (times[0], times[-1]) == (0.0, 3.0 * _MAX_MOMENTS - 1)
