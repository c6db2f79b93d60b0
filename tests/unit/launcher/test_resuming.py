"""From which run's checkpoints `resume=` goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hopsgpu.artifacts.checkpoint_retention import CheckpointOptions
from hopsgpu.artifacts.checkpoints import Checkpoints
from hopsgpu.core.run_record import fields_of
from hopsgpu.errors import ConfigError
from hopsgpu.launcher.planner import _resume_source_url
from hopsgpu.storage.lake import LakePath
from tests.unit.records import record_of


@pytest.fixture
def runs(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/runs")


def run(runs: LakePath, name: str, resumed: object = None, *, saved: bool = False) -> str:
    """A run on the lake; its URL."""
    (runs / name).make()
    fields = fields_of(record_of(name))
    fields["spec"]["resume"] = resumed
    (runs / name / "run.json").write(json.dumps(fields).encode())
    if saved:
        file = Path(runs.path).parent / "state"
        file.write_text("state")
        checkpoints = Checkpoints(runs / name / "checkpoints", 0)
        checkpoints.save({"state": file}, CheckpointOptions(1))
    return (runs / name).url


def test_the_named_run_where_it_has_saved(runs: LakePath) -> None:
    run(runs, "a", saved=True)
    named = run(runs, "b", "a", saved=True)
    assert _resume_source_url(runs, "b") == named


def test_a_run_that_came_to_no_checkpoint_leads_to_the_one_before(runs: LakePath) -> None:
    first = run(runs, "a", saved=True)
    run(runs, "b", "a")
    run(runs, "c", "b")
    assert _resume_source_url(runs, "c") == first


@pytest.mark.parametrize("before", [None, "gone", "b", 7])
def test_the_named_run_where_none_before_has_saved(runs: LakePath, before: object) -> None:
    assert run(runs, "b", before) == _resume_source_url(runs, "b")


def test_a_run_without_a_record_is_the_last(runs: LakePath) -> None:
    (runs / "b").make()
    assert _resume_source_url(runs, "b") == (runs / "b").url
    (runs / "b" / "run.json").write(b"{")
    assert _resume_source_url(runs, "b") == (runs / "b").url


def test_what_is_not_there_is_refused_with_what_is(runs: LakePath) -> None:
    run(runs, "a")
    with pytest.raises(ConfigError, match="resume='x': .*: a$"):
        _resume_source_url(runs, "x")
