"""docs/reliability.md is what the results say, and has each fault of the matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launches import Kind
from tests.faults.matrix import FAULTS
from tests.faults.page import (
    KUBERNETES,
    PAGE,
    STANDALONE,
    YARN,
    Cell,
    CellKey,
    load,
    page,
    record,
    table,
)


def test_the_page_is_what_the_results_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(*load()), "run: python -m tests.faults.page"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_kind_has_an_expectation_or_a_reason(fault: object) -> None:
    assert isinstance(fault, type(FAULTS[0]))
    kinds = [Kind.GANG] if fault.managers == (STANDALONE,) else Kind
    assert {*fault.expected, *fault.not_for} == set(kinds)


def test_a_cell_has_its_seconds() -> None:
    seen = {
        CellKey("it rains", Kind.GANG.value): Cell("`RankFailed`", 1.23, 0.04),
        CellKey("it rains", Kind.GANG.value, STANDALONE): Cell("continues"),
    }
    lines = table(seen, YARN, STANDALONE).splitlines()
    assert lines[0] == "| fault | gang | elastic gang | search | gang, standalone |"
    row = "| it rains | `RankFailed`, 1.2 s; GPUs 0.0 s | – | – | continues |"
    assert lines[2] == row


def test_a_table_has_the_faults_of_its_cluster_managers() -> None:
    seen = {
        CellKey("it rains", Kind.GANG.value): Cell("continues"),
        CellKey("it snows", Kind.SEARCH.value, KUBERNETES): Cell("not affected"),
    }
    lines = table(seen, KUBERNETES).splitlines()
    assert lines[0] == "| fault | gang | elastic gang | search |"
    assert lines[2:] == ["| it snows | – | – | not affected |"]


def test_a_later_run_replaces_what_it_has_seen(tmp_path: Path) -> None:
    file, (first, second) = tmp_path / "results.json", [fault.name for fault in FAULTS[:2]]
    gang = Kind.GANG.value
    record({CellKey(second, gang): Cell("old"), CellKey(first, gang): Cell("a")}, file)
    record({CellKey(second, gang): Cell("new"), CellKey("gone", gang): Cell("b")}, file)
    dates, seen = load(file)
    assert [*dates] == [YARN]
    assert [(key.fault, cell.outcome) for key, cell in seen.items()] == [
        (first, "a"),
        (second, "new"),
    ]


def test_a_run_keeps_the_results_of_another_cluster_manager(tmp_path: Path) -> None:
    file, name = tmp_path / "results.json", FAULTS[0].name
    on_yarn, standalone = (
        CellKey(name, Kind.GANG.value, manager) for manager in (YARN, STANDALONE)
    )
    record({on_yarn: Cell("a")}, file)
    record({standalone: Cell("b")}, file)
    dates, seen = load(file)
    assert [*dates] == [YARN, STANDALONE]
    assert seen == {on_yarn: Cell("a"), standalone: Cell("b")}
