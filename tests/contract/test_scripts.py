"""Frameworks that look for a script's classes by name, and read its sources, find them in ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.script_ranks import told_by

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["torch_script", "tensorflow_script"])
def test_a_frameworks_script(name: str, tmp_path: Path) -> None:
    assert told_by(SCRIPTS / f"{name}.py", tmp_path) == {}
