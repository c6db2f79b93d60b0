"""The comparison of runs, from their records."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hopsgpu.core.run_record import CallRecord, RunRecord
from hopsgpu.core.trials import Best
from hopsgpu.display.run_comparison import (
    CODE,
    ENVIRONMENT,
    METRICS,
    OUTCOME,
    PARAMETERS,
    REQUEST,
    ComparisonGroup,
    compare_runs,
)
from tests.unit.records import ENVIRONMENT as VERSIONS
from tests.unit.records import NEW, OLD, SEARCH, record_of


def run_of(run_id: str, arguments: dict[str, str], **changes: Any) -> RunRecord:
    return record_of(
        run_id, call=CallRecord("mine.train", "sha256:" + "a" * 64, arguments), **changes
    )


def groups_of(*records: RunRecord) -> dict[str, ComparisonGroup]:
    return {group.name: group for group in compare_runs(records, 1000.0).groups}


def texts_of(group: ComparisonGroup) -> dict[str, tuple[str, ...]]:
    return {row.name: row.texts for row in group.rows}


def test_parameters_are_shown_side_by_side_with_what_differs() -> None:
    old = run_of(OLD, {"lr": "0.1", "layers": "4"})
    new = run_of(NEW, {"lr": "0.2", "layers": "4", "dropout": "0.5"})
    group = groups_of(old, new)[PARAMETERS]
    assert texts_of(group) == {
        "lr": ("0.1", "0.2"),
        "layers": ("4", "4"),
        "dropout": ("-", "0.5"),
    }
    assert [row.name for row in group.rows if row.is_different] == ["lr", "dropout"]


def test_the_parameters_of_a_search_are_those_of_its_best_trial() -> None:
    search = replace(SEARCH, best=Best({"lr": 0.5, "kind": "sgd"}, 0.25, 7))
    found = groups_of(run_of(OLD, {"lr": "0.1", "seed": "3"}, search=search), record_of(NEW))
    assert texts_of(found[PARAMETERS]) == {
        "lr": ("0.5", "-"),
        "seed": ("3", "-"),
        "kind": ("'sgd'", "-"),
    }
    assert texts_of(found[METRICS])["loss"] == ("0.25", "0.123456")
    assert texts_of(found[METRICS])["best trial"] == ("7", "-")
    assert texts_of(found[REQUEST])["kind"] == ("search", "gang")


def test_metrics_are_those_of_the_first_rank_without_samples_of_gpus() -> None:
    assert texts_of(groups_of(record_of(OLD), record_of(NEW, metrics=()))[METRICS]) == {
        "step": ("9", "-"),
        "loss": ("0.123456", "-"),
    }


def test_of_environments_only_differences_are_listed() -> None:
    changed = replace(
        VERSIONS, packages={"torch": "2.10", "numpy": "2.3"}, commit="c" * 40, has_changes=True
    )
    found = groups_of(record_of(OLD), record_of(NEW, environment=changed))
    assert texts_of(found[ENVIRONMENT]) == {"torch": ("2.9", "2.10"), "numpy": ("-", "2.3")}
    assert found[ENVIRONMENT].equal == 5
    assert texts_of(found[CODE]) == {"commit": ("-", "c" * 12 + " with changes")}
    equal = groups_of(record_of(OLD), record_of(NEW))[ENVIRONMENT]
    assert (equal.rows, equal.equal) == ((), 6)


def test_the_outcome_says_how_runs_ended_and_what_they_took() -> None:
    failed = record_of(NEW, "failed", error="ValueError: bad batch\nmore", gpu_seconds=_NOTHING)
    outcome = texts_of(groups_of(record_of(OLD), failed)[OUTCOME])
    assert outcome["state"] == ("succeeded", "failed")
    assert outcome["error"] == ("-", "ValueError: bad batch")
    assert outcome["took"] == ("75.0 s", "75.0 s")
    assert outcome["GPU seconds training"] == ("100 (83%)", "0")


_NOTHING = replace(record_of(OLD).gpu_seconds, held=0.0, training=0.0, idle=0.0)


def test_a_comparison_is_bounded_and_json() -> None:
    packages = {f"package-{n}": str(n) for n in range(500)}
    other = record_of(NEW, environment=replace(VERSIONS, packages=packages))
    comparison = compare_runs([record_of(OLD), other, *([other] * 9)], 1000.0)
    assert len(comparison.run_ids) == 6
    found = comparison.groups[-1]
    assert (found.name, len(found.rows), found.left_out) == (ENVIRONMENT, 200, 301)
    fields = json.loads(json.dumps(comparison.as_json()))
    assert fields["runs"][0] == OLD and fields["last_metrics"]["loss"] == ["0.123456"] * 6
