"""Metrics of several runs in one plot each, smoothed if a reader wants that. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopsgpu.display.picture import Point
from hopsgpu.web.metric_series import MetricPlots, readable_name

# Shares of the mean so far in each smoothed value.
SMOOTHINGS = ("0", "0.6", "0.9", "0.99")
_MAX_PLOTS = 24
_LABELS = "ABCDEFGH"


@dataclass(frozen=True)
class OverlaySeries:
    """A metric of a run.

    Attributes:
        run: number of the run in the comparison, from 0.
        points: pairs (step, value) of its first rank that reported the metric.
    """

    run: int
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        return label_of(self.run)


@dataclass(frozen=True)
class OverlayPlot:
    """A metric of all runs that have it; `words` names the last values."""

    name: str
    series: tuple[OverlaySeries, ...]

    @property
    def words(self) -> str:
        lasts = [(series.label, *series.points[-1]) for series in self.series]
        return "last: " + ", ".join(
            f"{run} {value:.4g} at step {at:,.0f}" for run, at, value in lasts
        )


def label_of(run: int) -> str:
    """Return the letter that stands for a run of a comparison."""
    return _LABELS[run]


def overlay_plots(
    plots: Sequence[MetricPlots | None], smoothing: float, *, is_log: bool
) -> tuple[tuple[OverlayPlot, ...], int]:
    """Return the plots of the first metrics, and the number of metrics that are left out.

    Args:
        plots: the metrics of each run, as far as they are known.
        smoothing: share of the mean so far in each value, in [0, 1).
        is_log: whether values that have no logarithm are left out.
    """
    names = dict.fromkeys(name for run in plots if run is not None for name in run.metrics)
    drawn = [
        OverlayPlot(name, tuple(_series(plots, name, smoothing, is_log=is_log)))
        for name in [*names][:_MAX_PLOTS]
    ]
    shown = tuple(plot for plot in drawn if plot.series)
    return shown, max(len(names) - _MAX_PLOTS, 0)


def _series(
    plots: Sequence[MetricPlots | None], name: str, smoothing: float, *, is_log: bool
) -> Iterator[OverlaySeries]:
    for run, metrics in enumerate(plots):
        first = None if metrics is None else next(iter(metrics.metrics.get(name, ())), None)
        points = () if first is None else smooth(first.points, smoothing)
        kept = tuple(point for point in points if point[1] > 0) if is_log else points
        if kept:
            yield OverlaySeries(run, kept)


def smooth(points: Sequence[Point], weight: float) -> tuple[Point, ...]:
    """Return exponential means of the values so far.

    The first values count as much as later ones would, as in TensorBoard.

    Args:
        weight: share of the mean so far in each value, in [0, 1).
    """
    smoothed, mean, total = [], 0.0, 0.0
    for at, value in points:
        mean = weight * mean + (1.0 - weight) * value
        total = weight * total + (1.0 - weight)
        smoothed.append((at, mean / total))
    return tuple(smoothed)


def logarithms(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points with the logarithms of their positive values."""
    return tuple((at, math.log10(value)) for at, value in points)


def overlay_json(plots: Sequence[OverlayPlot]) -> Mapping[str, Any]:
    """Return plots for the page's script: JSON values, in the form of `plots_json`."""
    return {
        "metrics": [
            {
                "name": readable_name(plot.name),
                "words": plot.words,
                "series": [
                    {
                        "label": series.label,
                        "colour": series.run,
                        "points": [list(point) for point in series.points],
                    }
                    for series in plot.series
                ],
            }
            for plot in plots
        ],
        "gpus": [],
    }
