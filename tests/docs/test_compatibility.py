"""docs/compatibility.md is what the results say, and has each test of the matrix."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.matrix.behaviours import BEHAVIOURS, WORKS, Corner, Seen, first_line, load, record
from tests.matrix.page import PAGE, page

CORNER = Corner("3.5.9", "3.3.6", "3.11.7", "17.0.15", "2026-11-26", {"hold": Seen(WORKS, 12.4)})


def test_the_page_is_what_the_results_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(load()), "run: python -m tests.matrix.page"


def test_every_test_has_its_row() -> None:
    tree = ast.parse((ROOT / "tests" / "matrix" / "test_matrix.py").read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = [name.removeprefix("test_") for name in names if name.startswith("test_")]
    assert tests == list(BEHAVIOURS)


def test_a_cell_is_the_seconds_or_the_failure() -> None:
    failed = Seen(first_line("RankFailed: a|b `c` in /home/me/.venv/x.py\n  more"), 3.0)
    corner = dataclasses.replace(CORNER, seen={**CORNER.seen, "cancel": failed})
    rows = {line.split(" | ")[0]: line for line in page([corner]).splitlines()}
    assert rows[f"| {BEHAVIOURS['hold']}"].endswith("| works (12 s) |")
    assert rows[f"| {BEHAVIOURS['cancel']}"].endswith("| fails: `RankFailed: a/b 'c' in …` |")
    assert rows[f"| {BEHAVIOURS['rivals']}"].endswith("| not run |")


@pytest.mark.parametrize(
    ("spark", "hadoop", "order"),
    [
        ("3.5.10", "3.3.6", ["3.5.10"]),
        ("4.0.5", "3.3.6", ["3.5.9", "4.0.5"]),
        ("3.4.4", "3.5.0", ["3.4.4", "3.5.9"]),
    ],
)
def test_a_later_release_replaces_that_of_its_series(
    tmp_path: Path, spark: str, hadoop: str, order: list[str]
) -> None:
    file = tmp_path / "results.json"
    record(CORNER, file)
    record(dataclasses.replace(CORNER, spark=spark, hadoop=hadoop), file)
    assert [corner.spark for corner in load(file)] == order
