"""Metrics of several runs in one plot."""

from __future__ import annotations

import json

import pytest

from hopsgpu.web.metric_overlay import overlay_json, overlay_plots, smooth
from hopsgpu.web.metric_series import MetricPlots, Series

STEPS = ((0.0, 4.0), (1.0, 2.0), (2.0, 0.0))
ONE = MetricPlots(
    {"loss": (Series(0, STEPS), Series(1, ((0.0, 9.0),))), "acc": (Series(1, STEPS),)}
)
OTHER = MetricPlots({"loss": (Series(0, ((0.0, 1.0),)),), "\ud800": (Series(0, STEPS),)})


def test_the_first_rank_of_each_run_is_drawn() -> None:
    plots, left_out = overlay_plots([ONE, None, OTHER], 0.0, is_log=False)
    assert ([plot.name for plot in plots], left_out) == (["loss", "acc", "\ud800"], 0)
    loss = plots[0]
    assert [(one.label, one.points) for one in loss.series] == [("A", STEPS), ("C", ((0.0, 1.0),))]
    assert loss.words == "last: A 0 at step 2, C 1 at step 0"
    content = json.dumps(overlay_json(plots), ensure_ascii=False).encode()
    first = json.loads(content)["metrics"][0]
    assert first["series"][1] == {"label": "C", "colour": 2, "points": [[0.0, 1.0]]}


def test_values_without_a_logarithm_are_left_out() -> None:
    zero = MetricPlots({"loss": (Series(0, ((0.0, 0.0),)),)})
    plots, _ = overlay_plots([ONE, zero], 0.0, is_log=True)
    assert [len(one.points) for one in plots[0].series] == [2]


def test_smoothed_values_are_means_of_those_so_far() -> None:
    assert smooth(STEPS, 0.0) == STEPS
    smoothed = [value for _, value in smooth(STEPS, 0.5)]
    assert smoothed == pytest.approx([4.0, 8 / 3, 8 / 7])
    flat = tuple((float(step), 3.0) for step in range(50))
    assert [value for _, value in smooth(flat, 0.99)] == pytest.approx([3.0] * 50)


def test_plots_are_bounded() -> None:
    many = MetricPlots({f"m{n}": (Series(0, STEPS),) for n in range(40)})
    plots, left_out = overlay_plots([many], 0.0, is_log=False)
    assert (len(plots), left_out) == (24, 16)
