"""Names, comments and pages keep the rules that a program can check; the rest is for readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import wording

# How many findings of each kind are left. A change may lower these numbers, never raise them.
LEFT_IN_CODE = {"boolean": 58, "class": 7, "long": 28, "participle": 12, "start": 9, "vague": 7}
LEFT_IN_PAGES = {"long": 43, "start": 5}


@pytest.mark.parametrize(
    ("places", "budget"),
    [(["hopsgpu"], LEFT_IN_CODE), (["docs", "README.md"], LEFT_IN_PAGES)],
    ids=["code", "pages"],
)
def test_no_more_findings_than_before(places: list[str], budget: dict[str, int]) -> None:
    found = wording.findings([wording.ROOT / place for place in places])
    counts = wording.counts(found)
    more = {kind: n for kind, n in counts.items() if n > budget.get(kind, 0)}
    listed = [f"{f.path}:{f.line}: {f.kind}: {f.text}" for f in found if f.kind in more]
    assert not more, "\n".join([f"more findings than {budget}: {more}", *listed])


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ("def _told() -> str: ...", {"participle"}),
        ("def seed() -> int: ...", set()),
        ("@contextmanager\ndef queued(): ...", set()),
        ("def f(over: bool) -> None: ...", {"boolean"}),
        ("def f(is_gone: bool, force: bool) -> None: ...", set()),
        ("over = False", {"boolean"}),
        ("def f(broken: Callable[[int], None]) -> None: ...", {"callable"}),
        ("def f(on_begin: Callable[[int], None]) -> None: ...", set()),
        ("there = 3", {"vague"}),
        ("# Of the mix before, whose order most mixes have.", {"start"}),
        ("# It has a bound.", {"start"}),
        ("# The number is small. It has a bound.", set()),
        ("# To set it is to lose it.", {"start"}),
        ("# To set it, call `wording.counts`.", set()),
        ("# Poll: Spark has no notification for the end of a job.", set()),
        ("# " + "word " * 26, {"long"}),
        ("# A `function_that" + "_does_not_exist` here.", {"symbol"}),
        ('"""Calls `wording.findings`."""', set()),
    ],
)
def test_each_rule_finds_what_breaks_it(tmp_path: Path, code: str, kinds: set[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(code + "\n")
    assert {finding.kind for finding in wording.findings([path])} == kinds


def test_two_classes_of_one_name_are_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("class Part: ...\n")
    assert [f.text for f in wording.findings([tmp_path])] == ["Part", "Part"]


def test_blocks_of_pages_are_no_sentences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\nIt begins badly.\n```\n\nIt begins badly too.\n")
    assert [f.line for f in wording.findings([page])] == [5]
