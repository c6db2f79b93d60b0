"""docs/reliability.md is what the results say, and has each fault of the matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.faults import FAULTS
from tests.faults.launches import Kind
from tests.faults.page import PAGE, Cell, load, page, record, table


def test_the_page_is_what_the_results_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(*load()), "run: python -m tests.faults.page"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_kind_has_an_expectation_or_a_reason(fault: object) -> None:
    assert isinstance(fault, type(FAULTS[0]))
    assert {*fault.expected, *fault.not_for} == set(Kind)


def test_a_cell_has_its_seconds() -> None:
    seen = {("it rains", Kind.GANG.value): Cell("`RankFailed`", 1.23, 0.04)}
    assert table(seen).splitlines()[2] == "| it rains | `RankFailed`, 1.2 s; GPUs 0.0 s | – | – |"


def test_a_later_run_replaces_what_it_has_seen(tmp_path: Path) -> None:
    file, (first, second) = tmp_path / "results.json", [fault.name for fault in FAULTS[:2]]
    record({(second, Kind.GANG.value): Cell("old"), (first, Kind.GANG.value): Cell("a")}, file)
    record({(second, Kind.GANG.value): Cell("new"), ("gone", Kind.GANG.value): Cell("b")}, file)
    _, seen = load(file)
    assert [(name, cell.outcome) for (name, _), cell in seen.items()] == [
        (first, "a"),
        (second, "new"),
    ]
