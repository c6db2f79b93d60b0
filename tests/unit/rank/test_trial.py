"""What a rank knows of its trial."""

from __future__ import annotations

import logging
from pathlib import Path

import optuna
import pytest

import hopsgpu
from hopsgpu.rank.trial import Trial, ask_to_end, has_seen_end, is_pruning, is_to_end


def test_values_without_json_become_their_repr() -> None:
    params = {"a": 1, "b": 0.5, "c": None, "d": (1, "x"), "e": Path("f"), "g": {(1, 2): 3}}
    fields = Trial(3, params).as_fields()
    told = {"a": 1, "b": 0.5, "c": None, "d": [1, "x"], "e": repr(Path("f")), "g": "{(1, 2): 3}"}
    assert Trial.from_fields(fields) == Trial(3, told)


def test_who_was_told_is_marked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hopsgpu.rank")
    assert not is_to_end(str(tmp_path))
    ask_to_end(tmp_path)
    assert not has_seen_end(tmp_path)
    for _ in range(2):
        assert is_to_end(str(tmp_path)) and has_seen_end(tmp_path)
    assert caplog.messages == ["the search ends this trial early"]
    ask_to_end(tmp_path)
    assert is_to_end(str(tmp_path))


def test_outside_a_gang_there_is_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    context = hopsgpu.context()
    assert (context.trial, context.should_prune()) == (None, False)


class Own(optuna.TrialPruned):
    """A user's."""


class TrialPruned(Exception):
    """Somebody else's."""


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (optuna.TrialPruned(), True),
        (optuna.exceptions.TrialPruned(), True),
        (Own(), True),
        (TrialPruned(), False),
        (ValueError(), False),
    ],
)
def test_optunas_exception_is_known(error: BaseException, found: bool) -> None:
    assert is_pruning(error) is found
