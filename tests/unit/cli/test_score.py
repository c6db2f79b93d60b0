"""The script that `hopsgpu score` writes, and what it refuses."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from hopsgpu.cli.score import write_script
from hopsgpu.errors import ConfigError


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    job = tmp_path / 'it\'s a "home"' / "job.py"
    job.parent.mkdir()
    job.write_text("def predict(batch):\n    return batch\n")
    return job


def test_the_script_imports_the_users_module_and_scores(job: Path, tmp_path: Path) -> None:
    options = {"data": "/lake/it's", "keep": ["id"], "batch_size": 7}
    script = write_script(tmp_path / "scripts", f"{job}:predict", options, None)
    tree = ast.parse(script.read_text())
    imported = [n.names[0].name for n in ast.walk(tree) if isinstance(n, ast.Import)]
    assert imported == ["os", "sys", "job", "hopsgpu"]
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hopsgpu.score"
    )
    assert ast.unparse(call.args[0]) == "job.predict"
    assert ast.literal_eval(call.keywords[0].value) == options
    assert sys.path[0] == str(job.parent)
    (condition,) = (
        node.test
        for node in tree.body
        if isinstance(node, ast.If) and node.col_offset == 0 and "path.insert" in ast.unparse(node)
    )
    assert str(tmp_path / "scripts") in ast.unparse(condition), "only where it was written"
    assert write_script(tmp_path / "scripts", f"{job}:predict", options, None) == script


@pytest.mark.parametrize(
    "given", ["job.py", "nowhere.py:predict", "{job}:", "{job}:a b", "{job}:if", "{job}"]
)
def test_what_names_no_function_of_a_file_is_refused(job: Path, tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="must be a Python file|is not the name"):
        write_script(tmp_path, given.format(job=job), {}, None)
