"""`hopsgpu score` up to the command line of spark-submit: options that reach hopsgpu.score()."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hopsgpu.cli.main import main
from hopsgpu.scoring.score_options import ScoreOptions
from tests.process.backends.test_submit_arguments import home

__all__ = ["home"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "job.py").write_text("def predict(batch):\n    return batch\n")
    return f"{tmp_path}/job.py:predict"


def given_to(cache: Path) -> dict[str, object]:
    """The options of hopsgpu.score() in the script that the command has written."""
    (script,) = (cache / "hopsgpu" / "score").iterdir()
    (call,) = (
        node
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hopsgpu.score"
    )
    options: dict[str, object] = ast.literal_eval(call.keywords[0].value)
    return options


def test_its_options_are_those_of_the_call(home: Path, job: str, tmp_path: Path) -> None:
    words = ["--gpu-type", "A100", "--cores-per-worker", "2", "--memory-per-worker", "8g"]
    words += ["--acquire-timeout", "1m", "--score-timeout", "2h", "--shape", "image=28,28"]
    words += ["--columns", "image,x", "--keep", "id", "--gpus-per-worker", "2", "--resume", "r-1"]
    words += ["--model", "m@production", "--on-error", "skip", "--output", "/lake/out"]
    ran = CliRunner().invoke(main, ["score", "--dry-run", "--data", "/lake/in", *words, job])
    assert ran.exit_code == 0, ran.output
    options = given_to(tmp_path / "cache")
    assert options == {
        "data": "/lake/in",
        "output": "/lake/out",
        "model": "m@production",
        "columns": ["image", "x"],
        "keep": ["id"],
        "shapes": {"image": (28, 28)},
        "batch_size": 1024,
        "max_concurrent": 8,
        "gpus_per_worker": 2,
        "cores_per_worker": 2,
        "memory_per_worker": "8g",
        "gpu_type": "A100",
        "acquire_timeout": "1m",
        "score_timeout": "2h",
        "on_error": "skip",
        "resume": "r-1",
    }
    assert ScoreOptions(predict=len, **options).gpu_type == "A100"  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["image", "image=", "=28", "image=a,b"])
def test_a_shape_that_is_none_is_refused(home: Path, job: str, shape: str) -> None:
    ran = CliRunner().invoke(
        main, ["score", "--dry-run", "--data", "/lake/in", "--shape", shape, job]
    )
    assert ran.exit_code == 1 and "must be a column and the sizes of a row" in ran.output
