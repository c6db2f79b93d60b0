"""The page of `make gpu`, the table in docs/gpus.md, the recorded runs and the exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_machine.page import (
    BEGIN,
    END,
    NO_RUNS,
    OTHER_PYTHON,
    docs_table,
    machine_lines,
    summary,
    text_page,
    with_table,
)
from tests.gpu_machine.results import (
    FAILED,
    PASSED,
    CheckResult,
    Outcome,
    exit_code,
    load_runs,
    record_run,
)
from tests.unit.gpu_machine.machines import machine, run_of

OK, BAD, NONE, LATE = Outcome.OK, Outcome.FAILED, Outcome.NOT_APPLICABLE, Outcome.NOT_RUN


def test_the_page_has_a_line_for_each_check() -> None:
    run = run_of(OK, BAD, NONE, LATE, gpus=["A100", "A100"])
    assert text_page(run).splitlines() == [
        "hopsgpu on a machine with GPUs, 2026-12-01",
        "GPUs    2 × A100, 40 GiB",
        "driver  580.1, CUDA 13.0",
        "Python  3.11.7, torch 2.15.0 with CUDA 13.2",
        "",
        "check    result          seconds  detail",
        "check 0  ok                  1.5  detail 0",
        "check 1  failed                -  detail 1",
        "check 2  not applicable        -  detail 2",
        "check 3  not run               -  detail 3",
        "",
        "1 ok, 1 failed, 1 not applicable, 1 not run; no time was left for: check 3",
    ]


def test_the_page_says_how_to_use_another_torch() -> None:
    lines = machine_lines(machine(torch_cuda=""))
    assert lines[-2:] == ["Python  3.11.7, torch 2.15.0 without CUDA", f"        {OTHER_PYTHON}"]
    absent = machine(torch="", torch_cuda="", torch_problem="ImportError: none")
    assert "torch cannot be imported: ImportError: none" in machine_lines(absent)[2]
    assert machine_lines(machine("A100", "T4", cuda="", driver="", memory_mib=0))[:2] == [
        "GPUs    1 × A100, 1 × T4",
        "driver  unknown, CUDA unknown",
    ]


def test_a_summary_names_nothing_where_all_had_time() -> None:
    assert summary(run_of(OK, OK).checks) == "2 ok"


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [([OK], PASSED), ([OK, NONE], PASSED), ([OK, BAD], FAILED), ([OK, LATE], FAILED)],
)
def test_exit_codes(outcomes: list[Outcome], code: int) -> None:
    assert exit_code(run_of(*outcomes).checks) == code


def test_the_table_has_a_column_for_each_machine() -> None:
    assert docs_table([]) == NO_RUNS
    table = docs_table([run_of(OK, BAD), run_of(OK, gpus=["T4"])]).splitlines()
    assert table == [
        "|  | 1 × A100 | 1 × T4 |",
        "| --- | --- | --- |",
        "| date | 2026-12-01 | 2026-12-01 |",
        "| driver | 580.1, CUDA 13.0 | 580.1, CUDA 13.0 |",
        "| torch | 2.15.0 with CUDA 13.2 | 2.15.0 with CUDA 13.2 |",
        "| check 0 | ok (2 s) | ok (2 s) |",
        "| check 1 | failed: detail 1 | – |",
    ]


def test_a_cell_has_no_path_of_the_machine() -> None:
    run = run_of()
    check = CheckResult("launch", BAD, 1.0, "no file /home/me/x.py | at all")
    row = docs_table([type(run)(run.date, run.machine, (check,))]).splitlines()[-1]
    assert row == "| launch | failed: no file … / at all |"


def test_the_table_replaces_the_one_before() -> None:
    text = f"before\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n"
    assert with_table(text, []) == f"before\n\n{BEGIN}\n\n{NO_RUNS}\n\n{END}\n\nafter\n"
    for broken in ("no marker", BEGIN, f"{END}{BEGIN}"):
        with pytest.raises(ValueError, match="lacks"):
            with_table(broken, [])


def test_a_later_run_replaces_that_of_the_same_gpus(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text("[]")
    first, second = run_of(OK, NONE), run_of(BAD, gpus=["A100", "A100"])
    for run in (second, first):
        record_run(run, file)
    assert load_runs(file) == [first, second]
    later = run_of(OK, date="2026-12-02")
    record_run(later, file)
    assert load_runs(file) == [later, second]
