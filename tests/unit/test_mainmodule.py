"""What a script or a notebook defines is in ranks under its names, with its sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scripts.ordinary import NAMES
from tests.unit.script_ranks import told_by

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return told_by(SCRIPTS / "ordinary.py", tmp_path_factory.mktemp("ordinary"))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_script_defines_is_in_ranks_as_under_python(ordinary: Any, name: str) -> None:
    assert name not in ordinary["failed"], ordinary["failed"][name]


def test_values_of_a_scripts_classes_are_of_the_drivers_own(ordinary: Any) -> None:
    assert ordinary["not of the driver"] == []


def test_a_notebooks_cells_are_in_ranks(tmp_path: Path) -> None:
    assert told_by(SCRIPTS / "notebook.py", tmp_path) == {}
