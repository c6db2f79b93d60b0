"""What is seen of a search while it goes on: lines, a cell, a terminal; bounded and escaped."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.core.trials import FAILED, PRUNED, Best, Moment, SearchStatus, TrialReport, Writer
from hopsgpu.display.base import PlainLines
from hopsgpu.display.live import LiveSearch
from hopsgpu.display.progress import SearchProgress, search_progress_of
from hopsgpu.display.search_cell import page, summary
from hopsgpu.display.search_phrases import SearchFormatter, end_of, shorten_params, why
from hopsgpu.display.search_picture import (
    SHOWN_TRIALS,
    SearchPicture,
    SearchScene,
    average,
    curve_of,
    evenly,
)
from hopsgpu.display.search_terminal import lines_of
from hopsgpu.errors import ConfigError
from tests.unit.searches import status, trial

NASTY = "<script>alert(1)</script>"


def said(err: io.StringIO) -> list[str]:
    return [line.partition(" s: ")[2] for line in err.getvalue().splitlines()]


# --- words -------------------------------------------------------------------------------


def test_a_trial_that_has_ended_is_a_line() -> None:
    done = trial(12, params={"lr": 0.01}, value=0.03123, ended=1016.25)
    best = Best(done.params, 0.03123, 12)
    assert end_of(done, best) == (
        "trial 12 complete: 0.03123 (best so far), lr=0.01, 4.2 s on node1 GPU-0a2b3c4d"
    )
    assert "best so far" not in end_of(done, replace(best, number=11))
    pruned = trial(3, PRUNED, params={}, value=0.5, step=7, gpu="")
    assert end_of(pruned, None) == "trial 3 pruned: 0.5 at step 7, 2.0 s on node2"


def test_a_failed_trial_says_why() -> None:
    said = end_of(trial(7, FAILED, params={}), None)
    assert said.startswith("trial 7 failed: ValueError: <lr> is too large, 2.0 s on node2 ")
    killed = "rank 0 on node1 was ended by SIGKILL: out of memory\nlast line\nwhole log: hdfs://x"
    assert why(trial(7, FAILED, error=killed)) == killed.splitlines()[0]
    assert why(trial(7, FAILED, error="")) == ""


def test_parameters_are_short_whatever_they_are() -> None:
    assert shorten_params({"lr": 0.000123456, "layers": 3, "kind": "adam"}) == (
        "lr=0.0001235, layers=3, kind=adam"
    )
    many = dict.fromkeys((f"p{number}" for number in range(1000)), "\x1b[31m" + "x" * 10_000_000)
    assert shorten_params({"component": "", "seed": 1}) == "component='', seed=1"
    assert len(shorten_params(many)) <= 80 and "\x1b" not in shorten_params(many)
    of_many = trial(1, gpu=",".join(f"GPU-{n}" for n in range(8)))
    assert end_of(of_many, None).endswith("node2 8 GPUs")


# --- lines -------------------------------------------------------------------------------


def test_lines_tell_of_each_trial_once_and_of_all_every_ten_seconds() -> None:
    now, err = 0.0, io.StringIO()
    lines = PlainLines(SearchFormatter(), err=err, clock=lambda: now)
    for step in range(240):  # twenty times a second, and a trial in half a second
        now = step / 20
        lines.status(status(step // 10, waiting_for="", metric="loss"))
    told = said(err)
    ended = [line for line in told if line.startswith("trial ")]
    assert [int(line.split()[1]) for line in ended] == list(range(23))
    assert all("(best so far)" in line for line in ended)
    assert [line for line in told if line not in ended] == [
        "0 of 60 trials; 4 running on 4 of at most 8 executors",
        "20 of 60 trials: 20 complete; 4 running on 4 of at most 8 executors;"
        " best loss 0.05 (trial 19)",
    ]


def test_lines_tell_of_a_change_of_state_and_of_what_is_waited_for() -> None:
    now, err = 0.0, io.StringIO()
    lines = PlainLines(SearchFormatter(), err=err, clock=lambda: now)
    waits = status(0, 0, state="waiting", executors=0)
    lines.status(status(0, 0, state="requested", most=0, executors=0, waiting_for=""))
    for reason in ("node2 is full", "node2 is full", "the queue is full"):
        lines.status(replace(waits, waiting_for=reason))
        now += 1.0
    lines.status(status(0, waiting_for=""))
    lines.status(status(2, 0, state="succeeded", pruned=1, waiting_for=""))
    assert said(err) == [
        "requested",
        "waiting: node2 is full; 0 of at most 8 executors",
        "waiting: the queue is full; 0 of at most 8 executors",
        "0 of 60 trials; 4 running on 4 of at most 8 executors",
        "1 more trial ended",
        "trial 0 complete: 1, lr=0.1, optimizer=adam, 2.0 s on node1 GPU-0a2b3c4d",
        "trial 1 complete: 0.5 (best so far), lr=0.01, optimizer=sgd, 2.0 s on node2 GPU-1a2b3c4d",
        "succeeded: 3 of 60 trials: 2 complete, 1 pruned; best 0.5 (trial 1)",
    ]


def test_a_reason_that_changes_all_the_time_is_told_once_a_second() -> None:
    now, err = 0.0, io.StringIO()
    lines = PlainLines(SearchFormatter(), err=err, clock=lambda: now)
    for step in range(200):
        now = step / 20
        lines.status(status(0, 0, state="waiting", waiting_for=f"{step} ms"))
    assert [line.partition("; ")[0] for line in said(err)] == [
        f"waiting: {n * 20} ms" for n in range(10)
    ]


def test_trials_of_an_earlier_run_of_the_study_are_a_number() -> None:
    err = io.StringIO()
    lines = PlainLines(SearchFormatter(), err=err, clock=lambda: 0.0)
    lines.status(status(30, 0))
    lines.status(status(31, 0))
    assert [line.split(":")[0] for line in said(err)] == ["30 of 60 trials", "trial 30 complete"]


def test_more_trials_than_a_status_names_are_counted() -> None:
    err = io.StringIO()
    lines = PlainLines(SearchFormatter(), err=err, clock=lambda: 0.0)
    lines.status(status(0))
    lines.status(status(50))
    assert "30 more trials ended" in said(err) and len(said(err)) == 1 + 1 + 20


def test_lines_of_trials_say_whose_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    shown: SearchProgress = search_progress_of("lines")
    shown.status(status(0))
    shown.line(3, 0, "node1", "one", "two")
    shown.line(3, 1, "node2", "three")
    shown.status(status(0, workers=2))
    shown.line(3, 0, "node1", "four")
    assert capsys.readouterr().out.splitlines() == [
        "[trial 3 node1] one",
        "[trial 3 node1] two",
        "[trial 3 rank 1 node2] three",
        "[trial 3 rank 0 node1] four",
    ]


# --- what progress= accepts --------------------------------------------------------------


def test_a_callable_is_told_of_states_alone() -> None:
    told: list[SearchStatus] = []
    shown = search_progress_of(told.append)
    shown.status(status(1))
    shown.line(0, 0, "node1", "one")
    assert told == [status(1)] and shown.problem is None


@pytest.mark.parametrize("given", ["loud", 1, lambda: None])
def test_others_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="a SearchStatus"):
        search_progress_of(given)


# --- the picture -------------------------------------------------------------------------


def pictured(given: SearchStatus, wall: float = 1100.0) -> SearchPicture:
    return SearchScene(given, 0.0, lambda: wall).picture(0.0)


def test_a_picture_has_running_trials_by_gpu_and_the_last_ended_first() -> None:
    picture = pictured(status(10))
    places = [(one.host, one.gpu) for one in picture.running]
    assert len(places) == 4 and places == sorted(places)
    assert [one.number for one in picture.ended] == [9, 8, 7, 6, 5, 4, 3, 2]
    assert picture.seconds == tuple(1100.0 - (one.started or 0) for one in picture.running)


def test_a_picture_goes_on_by_the_clock_until_the_end() -> None:
    scene = SearchScene(status(10), 100.0)
    assert scene.picture(103.0).elapsed == 8.0
    scene.status(status(10, state="succeeded"), 104.0)
    assert scene.picture(200.0).elapsed == 5.0


def test_steps_become_points_in_even_distances() -> None:
    steps = [(0.0, 1.0), (5.0, 2.0), (9.0, 4.0)]
    even = evenly(steps, 10.0)
    assert len(even) == 240 and even[0] == (0.0, 1.0) and even[-1] == (10.0, 4.0)
    assert {value for _, value in even} == {1.0, 2.0, 4.0}
    assert [value for at, value in even if 5.1 < at < 8.9] == [2.0] * len(
        [at for at, _ in even if 5.1 < at < 8.9]
    )
    means = average(steps, 10.0)
    assert sum(value for _, value in means) / len(means) == pytest.approx(1.7)
    busy = average([(n / 1000, n % 2) for n in range(100_000)], 100.0)
    assert {round(value, 2) for _, value in busy} <= {0.49, 0.5, 0.51}
    assert evenly([(3.0, 1.0)], 3.0) == average([(3.0, 1.0)], 3.0) == ((3.0, 1.0),)


def test_a_value_without_an_end_is_not_plotted() -> None:
    assert curve_of(((1, float("inf")), (3, 2.0)), 5)[0] == (3.0, 2.0)
    assert curve_of(((1, float("inf")),), 5) == ()
    assert "best 0.333333 (trial 2)" in page(pictured(status(3, curve=((1, float("inf")),))), "key")


# --- how it is drawn ---------------------------------------------------------------------


def test_a_cell_shows_all_there_is() -> None:
    scene = SearchScene(status(10, metric="loss", failed=1, wanted=60), 0.0, lambda: 1015.0)
    scene.line(Writer(3, 0), "node1", ["<img src=x onerror=alert(1)>"])
    shown = page(scene.picture(0.0), "key")
    for word in (
        "11 of 60 trials: 10 complete, 1 failed",
        "4 of at most 8 GPUs",
        "node2 is &lt;full&gt;",
        "best loss 0.1 (trial 9): lr=1e-05, optimizer=sgd",
        "data:image/svg+xml",
        "GPU-0a2b3c4d",
        "[trial 3 node1] &lt;img",
        "<details",
    ):
        assert word in shown, shown
    assert "<img src=x" not in shown
    assert "10 of 60 trials: 10 complete; 4 running on 4" in summary(pictured(status(10)))


def test_a_search_on_cpus_has_executors() -> None:
    assert "4 of at most 8 executors" in page(pictured(status(10, gpus=0)), "key")


def test_whatever_a_user_named_is_escaped() -> None:
    nasty = trial(0, FAILED, params={NASTY: NASTY}, host=NASTY, gpu=NASTY, error=NASTY)
    best = Best({NASTY: NASTY}, 1.0, 0)
    given = replace(status(1), metric=NASTY, best=best, running=(nasty,), recent=(nasty,))
    shown = page(pictured(given), "key")
    assert shown.count("&lt;script&gt;") > 5 and "<script>alert" not in shown


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            "rank 0 on node1 (container c_1, GPU g) was ended by SIGKILL",
            "rank 0 was ended by SIGKILL",
        ),
        (
            "the executor of rank 0 on node1 was lost (container c_1): preempted. Log: x",
            "the executor of rank 0 on node1 was lost: preempted. Log: x",
        ),
    ],
)
def test_the_reason_of_a_failed_trial_has_no_container(error: str, reason: str) -> None:
    assert why(trial(7, FAILED, error=error)) == reason


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_shows_it_in_its_own_characters(encoding: str) -> None:
    scene = SearchScene(status(10), 0.0, lambda: 1015.0)
    scene.line(Writer(3, 0), "node1", ["\x1b[31mred ✓\x1b[0m"])
    lines = [line.plain for line in lines_of(scene.picture(0.0), 100, 30, encoding)]
    text = "\n".join(lines)
    assert lines[0] == (
        "hopsgpu s-1: running - 5.0 s - 10 of 60 trials: 10 complete - 4 of at most 8 GPUs"
    )
    assert "  best 0.1 (trial 9): lr=1e-05, optimizer=sgd" in lines
    header, first = (lines[number] for number in range(5, 7))
    assert " ".join(header.split()) == "running host GPU step last value for parameters"
    assert first.split()[:2] == ["12", "node1"]
    assert "trial 9 complete: 0.1 (best" in text
    assert "[trial 3 node1] red" in text
    assert text.isascii() or encoding == "utf-8"
    assert len(lines_of(scene.picture(0.0), 40, 3, encoding)) == 3
    assert all(line.cell_len <= 40 for line in lines_of(scene.picture(0.0), 40, 30, encoding))


def large() -> SearchStatus:
    """Of ten thousand trials and 256 executors."""
    moments = tuple(Moment(float(n), n % 256, n % 200) for n in range(4000))
    return status(10_000, 256, wanted=20_000, executors=256, most=256, moments=moments)


def test_a_large_search_takes_no_more_room_or_time() -> None:
    given = large()
    scene = SearchScene(given, 0.0)
    for number in range(10_000):
        scene.line(Writer(number, 0), "node1", ["<" * 10_000] * 30)
    began = time.process_time()
    picture = scene.picture(0.0)
    shown, lines = page(picture, "key"), lines_of(picture, 100, 40, "utf-8")
    took = time.process_time() - began
    assert len(picture.running) == SHOWN_TRIALS and "and 244 more running" in shown
    assert len(shown) < 500_000 and len(lines) <= 40
    assert len(picture.curve) == len(picture.held) == 240
    # Of a core, a drawing each second at least; it takes some 20 ms.
    assert took < 1.0
    began = time.process_time()
    for _ in range(10_000):
        scene.status(given, 1.0)
    assert time.process_time() - began < 1.0


# --- when it is drawn --------------------------------------------------------------------


def test_where_another_display_is_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveSearch(lambda context: None)
    live.status(status(1))
    live.line(Writer(1, 0), "node1", "one")
    live.status(status(2, state="succeeded"))
    printed = capsys.readouterr()
    assert printed.out == "[trial 1 node1] one\n"
    assert "trial 1 complete" in printed.err and "succeeded: 2 of 60" in printed.err


def test_a_kernel_is_given_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    display = SimpleNamespace(display=lambda content, **given: shown.append(content))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    told = search_progress_of(None)
    told.status(status(1))
    told.status(status(60, 0, state="succeeded", waiting_for=""))
    assert told.problem is None
    assert "60 trials: 60 complete" in shown[-1]["text/html"]
    assert shown[-1]["text/plain"].endswith(
        "succeeded: 60 trials: 60 complete; best 0.0166667 (trial 59)"
    )


def test_a_running_trial_that_has_not_begun_has_no_seconds() -> None:
    picture = pictured(replace(status(0), running=(TrialReport(0, {}, "running"),)))
    assert picture.seconds == (None,) and "<td" in page(picture, "key")
