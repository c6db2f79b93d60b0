"""The plan of a score: what a run that resumes it must have in common with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from hopsgpu.errors import ConfigError, HopsGpuError, StoreError
from hopsgpu.scoring.score_plan import EarlierPlan, ScorePlan, chosen_columns, new_score_plan
from hopsgpu.storage.lake import LakePath
from tests.unit.scoring.sources import source

TABLE = source((10, 10), (5,))
NAMES = (("x",), ("id",))


def plan() -> ScorePlan:
    return new_score_plan(TABLE, NAMES, "hdfs://lake/models/m/1", "sha256:1", "hdfs://lake/out", 2)


def schema(**fields: pa.DataType) -> bytes:
    return bytes(pa.schema(fields).serialize().to_pybytes())


def test_a_plan_is_resumed_with_its_parts(tmp_path: Path) -> None:
    run = LakePath(f"file://{tmp_path}")
    plan().write(run)
    earlier = EarlierPlan(run)
    assert earlier.output == "hdfs://lake/out"
    again = earlier.resume(TABLE, NAMES, "hdfs://lake/models/m/1")
    assert (again.parts, again.code) == (plan().parts, "sha256:1")


def test_other_data_columns_or_models_are_not_resumed(tmp_path: Path) -> None:
    run = LakePath(f"file://{tmp_path}")
    plan().write(run)
    earlier, model = EarlierPlan(run), "hdfs://lake/models/m/1"
    with pytest.raises(ConfigError, match="data= differs"):
        earlier.resume(source((10, 11), (5,)), NAMES, model)
    with pytest.raises(ConfigError, match=r"columns= .*\['x'\]"):
        earlier.resume(TABLE, (("id",), ("id",)), model)
    with pytest.raises(ConfigError, match="model= differs.*m/1"):
        earlier.resume(TABLE, NAMES, "hdfs://lake/models/m/2")


def test_damaged_plan_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "score.json").write_text("{")
    with pytest.raises(StoreError, match=r"score\.json is damaged"):
        EarlierPlan(LakePath(f"file://{tmp_path}"))


def test_columns_that_cannot_be_kept_are_refused() -> None:
    inside = replace(TABLE, instants=frozenset({"id.t"}))
    with pytest.raises(ConfigError, match=r"'id' .*INT96 .*\(id.t\)"):
        chosen_columns(inside, ["x"], ["id"], {})
    assert chosen_columns(inside, ["id"], ["x"], {}) == (("id",), ("x",))
    with pytest.raises(ConfigError, match=r"keep=\['nope'\]"):
        chosen_columns(TABLE, ["x"], ["nope"], {})


def test_parts_must_be_whole_and_have_one_schema() -> None:
    there = plan()
    first = there.parts[0]
    with pytest.raises(HopsGpuError, match="3 rows"):
        there.check(first, 3, schema(y=pa.int64()))
    there.check(first, first.rows, schema(y=pa.int64()))
    there.check(first, first.rows, schema(y=pa.int64()))
    with pytest.raises(HopsGpuError, match="y: double; .* y: int64"):
        there.check(first, first.rows, schema(y=pa.float64()))


def test_columns_are_checked_before_anything_is_requested() -> None:
    assert chosen_columns(TABLE, None, (), {}) == (("id", "x"), ())
    with pytest.raises(ConfigError, match="different names"):
        chosen_columns(TABLE, ["x"], ["nothing"], {})
