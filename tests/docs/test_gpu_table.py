"""The table in docs/gpus.md is what the recorded runs of `make gpu` are."""

from __future__ import annotations

from tests.gpu_machine.page import PAGE, with_table
from tests.gpu_machine.results import load_runs


def test_the_table_is_what_the_results_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text, load_runs()), "run: python -m tests.gpu_machine.page"
