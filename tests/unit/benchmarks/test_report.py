"""Which figures of two runs of benchmarks count as worse, and the page about them."""

from __future__ import annotations

import io

import pytest

from benchmarks.report import Change, Recorder, compare, figures_of, make_page


def test_figures_are_found_however_deep_they_are() -> None:
    results = {
        "warm": {"launch": [1.0, 2], "name": "x", "is_there": True},
        "small": {"HDFS": {"CPU": [0.5]}},
        "rounds": [{"seconds": 3}, {"seconds": 4}],
        "empty": [],
    }
    assert dict(figures_of(results)) == {
        "warm/launch": (1.0, 2.0),
        "small/HDFS/CPU": (0.5,),
        "rounds/0/seconds": (3.0,),
        "rounds/1/seconds": (4.0,),
    }


@pytest.mark.parametrize(
    ("name", "before", "now", "is_worse"),
    [
        ("warm/launch", [1.0, 1.1, 1.2], [1.3, 1.4, 1.5], True),
        ("warm/launch", [1.0, 1.1, 1.2], [1.0, 1.15, 1.2], False),  # within the noise
        ("warm/launch", [1.0, 1.1, 1.4], [1.2, 1.3, 1.5], False),  # the earlier noise explains it
        ("warm/launch", [1.0, 1.1, 1.2], [1.0, 1.3, 1.5], False),  # the present noise explains it
        ("warm/launch", [1.3, 1.4, 1.5], [1.0, 1.1, 1.2], False),  # better
        ("data/columns/warm", [10.0, 11, 12], [7.0, 8, 9], True),  # a rate
        ("data/columns/warm", [7.0, 8, 9], [10.0, 11, 12], False),
        ("score/rows a second", [10.0, 11], [7.0, 8], True),
        ("output/rate", [10.0, 11], [7.0, 8], True),
        ("release/idle", [60.0], [65.0], False),
        ("release/idle", [60.0], [67.0], True),
    ],
)
def test_what_is_worse_than_noise_is_marked(
    name: str, before: list[float], now: list[float], is_worse: bool
) -> None:
    (change,) = compare({name: now}, {name: before, "gone": [1.0]})
    assert change.is_worse is is_worse
    assert change.name == name and change.ratio == pytest.approx(change.now / change.before)


def test_worse_figures_come_first_and_ratios_are_left_out() -> None:
    before = {"a": [1.0], "b": [1.0], "ratio": 3.0, "zero": [0.0]}
    changes = compare({"a": [1.0], "b": [2.0], "ratio": 1.0, "zero": [0.0], "new": [1.0]}, before)
    assert [change.name for change in changes] == ["b", "a"]


def test_the_page_has_the_changes_and_what_was_printed() -> None:
    changes = [Change("b", 1.0, 2.0, 2.0, True), Change("a", 1.0, 1.0, 1.0, False)]
    page = make_page("\nwarm  0.22\n", changes, 90.0)
    assert "1 of 2 figures became worse" in page and "1.5 minutes" in page
    assert "| b | 1 | 2 | 2.00 | **worse** |" in page
    assert "| a | 1 | 1 | 1.00 |  |" in page
    assert page.endswith("```text\nwarm  0.22\n```\n")
    assert "nothing is compared" in make_page("", None, 1.0)


def test_what_is_printed_is_seen_and_kept() -> None:
    screen = io.StringIO()
    recorder = Recorder(screen)
    print("one", 2, file=recorder, flush=True)
    assert recorder.text == screen.getvalue() == "one 2\n"
