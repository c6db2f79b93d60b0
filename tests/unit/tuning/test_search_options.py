"""What a search takes, and the calls of its trials."""

from __future__ import annotations

import threading
from typing import Any

import optuna
import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.packaging.pickling import pickle_call
from hopsgpu.tuning.search_options import SearchOptions, _function, search_arguments
from tests.unit.script_ranks import run

X = {"x": optuna.distributions.FloatDistribution(0.0, 1.0)}


def train(x: float, scale: float = 1.0) -> float:
    return x * scale


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"trials": 0}, "trials=0"),
        ({"max_concurrent": 0}, "max_concurrent=0"),
        ({"min_concurrent": 3}, "min_concurrent=3 with max_concurrent=2"),
        ({"workers_per_trial": 0}, "workers_per_trial=0"),
        ({"gpus_per_trial": 0.3}, "gpus_per_trial=0.3"),
        ({"gpus_per_trial": 0.5, "workers_per_trial": 2}, "one worker each"),
        ({"max_failures": -1}, "max_failures=-1"),
        ({"direction": "up"}, "direction='up'"),
        ({"metric": ""}, "metric=''"),
        ({"name": "a", "resume": "b"}, "give only one of them"),
        ({"space": {}}, "space={}"),
        ({"space": {"y": X["x"]}}, "does not accept"),
        ({"kwargs": {"x": 1.0}}, "both contain x"),
        ({"kwargs": {"scale": threading.Lock()}}, "cannot be pickled"),
        ({"search_timeout": "soon"}, "search_timeout='soon'"),
        ({"trial_timeout": -1}, "trial_timeout=-1"),
        ({"gpu_idle_timeout": "often"}, "gpu_idle_timeout='often'.*or 'off' for never"),
        (
            {"gpu_idle_timeout": "5m", "gpus_per_trial": 0},
            "gpu_idle_timeout='5m' with gpus_per_trial=0: there is no GPU.*use trial_timeout=",
        ),
        ({"train_fn": 3}, "train_fn=3"),
    ],
)
def test_invalid_options_are_refused_without_a_session(given: dict[str, Any], told: str) -> None:
    arguments = {"train_fn": train, "space": X, "trials": 2, "max_concurrent": 2, **given}
    with pytest.raises(ConfigError, match=told):
        search_arguments(SearchOptions(**arguments))


def test_a_trials_call_is_the_users_own_function_with_all_arguments() -> None:
    function = _function(train, X, {"scale": 3.0}).call
    assert run(function + pickle_call(None, (), {"x": 2.0})) == 6.0
    plain = _function(train, X, {}).call
    assert run(plain + pickle_call(None, (), {"x": 2.0})) == 2.0
