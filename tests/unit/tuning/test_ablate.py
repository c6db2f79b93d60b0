"""What an ablation takes, and the table that it comes to."""

from __future__ import annotations

from typing import Any

import pytest

from hopsgpu.core.trials import TrialReport
from hopsgpu.errors import ConfigError
from hopsgpu.tuning.ablate import AblateOptions, ablation, rows_of


def trial(number: int, component: str, value: float | None, state: str = "complete") -> TrialReport:
    return TrialReport(number, {"component": component, "seed": 0}, state, value)


def test_each_component_is_held_against_the_whole() -> None:
    trials = [
        trial(0, "", 1.0),
        trial(1, "", 3.0),
        trial(2, "dropout", 5.0),
        trial(3, "dropout", 7.0),
        trial(4, "dropout", None, "failed"),
        trial(5, "layer", 2.5),
        trial(6, "head", None, "failed"),
    ]
    baseline, dropout, layer, head = rows_of(["dropout", "layer", "head"], trials)
    assert (baseline.component, baseline.mean, baseline.difference) == ("", 2.0, None)
    assert baseline.spread == pytest.approx(2**0.5)
    assert (dropout.mean, dropout.difference, dropout.failed) == (6.0, 4.0, 1)
    assert (layer.mean, layer.spread, layer.difference) == (2.5, None, 0.5)
    assert (head.mean, head.difference, head.failed) == (None, None, 1)


def test_without_the_whole_nothing_is_compared() -> None:
    (baseline, one) = rows_of(["one"], [trial(0, "", None, "failed"), trial(1, "one", 1.0)])
    assert baseline.mean is None and one.difference is None


def train(width: int = 4, seed: int = 0) -> float:
    return 1.0 / width + seed


def no_seed(width: int = 4) -> float:
    return 1.0 / width


@pytest.mark.parametrize(
    ("function", "given", "told"),
    [
        (train, {"components": {}}, "components={}"),
        (train, {"components": {"": {"width": 1}}}, "a component's name must be"),
        (train, {"components": {"narrow": {}}}, r"components\['narrow'\]"),
        (train, {"components": {"narrow": {"depth": 1}}}, "does not accept"),
        (train, {"components": {"narrow": {"width": 1}}, "seeds": 0}, "seeds=0"),
        (no_seed, {"components": {"narrow": {"width": 1}}, "seeds": 2}, "has no argument `seed`"),
        (3, {"components": {"narrow": {"width": 1}}}, "train_fn=3"),
    ],
)
def test_what_cannot_work_is_refused(function: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ablation(AblateOptions(function, max_concurrent=1, **given))
