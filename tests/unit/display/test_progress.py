"""What `progress=` accepts, and what each display shows."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hopsgpu.core.gpu_losses import RankLosses, split_gpu_seconds
from hopsgpu.core.run_values import RunStatus, Timeline, WorldReport
from hopsgpu.display.progress import RunLines, describe, progress_of
from hopsgpu.errors import ConfigError

STATUS = RunStatus("r", "waiting", 0, 1, 2, ("node1",), "node2 is full", 1.5)


def test_a_callable_is_told_of_states_and_of_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[RunStatus] = []
    shown = progress_of(told.append)
    shown.status(STATUS)
    shown.line(0, "node1", "one", "two")
    assert told == [STATUS] and shown.problem is None
    assert capsys.readouterr() == ("", "")


def test_a_later_attempt_is_said_to_be_one() -> None:
    again = replace(STATUS, state="running", attempt=1)
    assert describe(again) == "running (attempt 1)"
    assert describe(replace(again, attempt=0)) == "running"
    assert describe(replace(again, state="ready")).endswith("executors on node1 (attempt 1)")
    starting = replace(again, state="starting", waiting_for="Starting 4 ranks")
    assert describe(starting) == "Starting 4 ranks (attempt 1)"


def test_the_end_tells_how_long_it_took_for_what() -> None:
    passed = Timeline(requested=0, granted=12.1, started=32.5, returned=70.9, released=71.3)
    ended = replace(STATUS, state="succeeded", timeline=passed)
    assert describe(ended) == (
        "succeeded: waited 12.1 s, started 20.4 s, trained 38.4 s, released 0.4 s"
    )
    # A gang that was held has waited for nothing when it goes.
    idle = replace(ended, state="released", timeline=Timeline(requested=0, released=0.7))
    assert describe(idle) == "released"


@pytest.mark.parametrize(
    ("wanted", "waiting", "granted"),
    [
        (1, "waiting: 0 of 1 executor is here", "granted: 1 executor on node1"),
        (2, "waiting: 0 of 2 executors are here", "granted: 2 executors on node1"),
    ],
)
def test_one_executor_is_no_executors(wanted: int, waiting: str, granted: str) -> None:
    none = RunStatus("r", "waiting", 0, 0, wanted, (), "", 1.5)
    assert describe(none) == waiting
    assert describe(replace(none, waiting_for="Needs 2 GPUs")) == "waiting: Needs 2 GPUs"
    assert describe(replace(none, state="granted", granted_hosts=("node1",))) == granted


def test_data_that_is_written_is_told_of_now_and_then() -> None:
    now, err = 0.0, io.StringIO()
    lines = RunLines(err=err, clock=lambda: now)
    for second in range(25):
        now = float(second)
        written = f"writing data: {second} of 40 tasks"
        lines.status(replace(STATUS, state="preparing", waiting_for=written))
    lines.status(replace(STATUS, state="waiting"))
    told = [line.partition(" s: ")[2] for line in err.getvalue().splitlines()]
    assert told[:-1] == [f"writing data: {n} of 40 tasks" for n in (0, 10, 20)]
    assert told[-1].startswith("waiting: ")


def test_lines_show_the_sentence_first_and_new_details_below_it() -> None:
    now, err = 0.0, io.StringIO()
    lines = RunLines(err=err, clock=lambda: now)
    status = replace(
        STATUS, application="application_1_7", queue="default", waiting_details=("a", "b")
    )
    for seconds in (0.0, 1.0, 20.0):
        now = seconds
        lines.status(status)
    now = 40.0
    lines.status(replace(status, waiting_details=("c",)))
    told = [line.partition(" s: ")[2] for line in err.getvalue().splitlines()]
    sentence = "waiting: node2 is full"
    place = "application_1_7 in queue default"
    assert told == [place, sentence, "  a; b", sentence, sentence, "  c"]


def test_a_callable_that_fails_is_told_of_nothing_more() -> None:
    calls = []

    def fails(status: RunStatus) -> None:
        calls.append(status)
        raise ValueError("mine")

    shown = progress_of(fails)
    shown.status(STATUS)
    shown.status(STATUS)
    assert len(calls) == 1
    assert shown.problem == "the progress display stopped (ValueError: mine)"


class Takes:
    def __call__(self, status: RunStatus, extra: int = 0) -> None: ...

    def none(self) -> None: ...


@pytest.mark.parametrize(
    "given",
    [print, Takes(), lambda *statuses: None, functools.partial(lambda a, b: None, 1), [].append],
)
def test_callables_with_one_argument_are_accepted(given: Callable[..., Any]) -> None:
    progress_of(given).status(STATUS)


async def coroutine(status: RunStatus) -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: None, "one argument, a RunStatus"),
        (lambda one, two: None, "one argument, a RunStatus"),
        (lambda *, status: None, "one argument, a RunStatus"),
        (Takes().none, "one argument, a RunStatus"),
        (coroutine, "coroutine"),
        ("loud", "progress='loud': must be 'rich', 'lines', 'off', None or a callable"),
        (1, "progress=1"),
    ],
)
def test_others_are_refused(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        progress_of(given)


def test_lines_that_come_together_are_written_at_once() -> None:
    class Counted(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            return super().write(text)

    out = Counted()
    lines = RunLines(out=out)
    lines.line(3, "node2", "one", "", "three")
    lines.line(0, "node1", "four")
    assert out.writes == 2
    assert out.getvalue().splitlines() == [
        "[rank 3 node2] one",
        "[rank 3 node2] ",
        "[rank 3 node2] three",
        "[rank 0 node1] four",
    ]


@pytest.mark.parametrize("given", [None, "lines"])
def test_lines_are_the_default_and_off_shows_nothing(
    given: object, capsys: pytest.CaptureFixture[str]
) -> None:
    progress_of(given).line(0, "node1", "shown")
    progress_of("off").line(0, "node1", "not shown")
    progress_of("off").status(STATUS)
    assert capsys.readouterr() == ("[rank 0 node1] shown\n", "")
    progress_of(given).status(STATUS)
    assert "node2 is full" in capsys.readouterr().err


def test_metrics_are_told_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = RunLines(clock=lambda: now)
    training = replace(STATUS, state="running", waiting_for="")
    lines.status(training)
    for step in range(12):
        now = float(step)
        measured: dict[str, float] = {"step": step, "loss": 1 / 4, "gpu.0.power": 90.0}
        lines.status(replace(training, metrics=(measured, {})))
    lines.status(replace(training, state="releasing"))
    told = [line.partition(" s: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["running", "running: step 10, loss 0.25", "releasing"]


ELASTIC = replace(
    STATUS,
    state="running",
    granted=3,
    wanted=4,
    granted_hosts=("node1", "node1", "node2"),
    waiting_for="waits for 1 more executor: node2 is full",
    sizes=(2, 4),
    worlds=(
        WorldReport(0, 2, ("node1", "node1"), 1010.0, 1012.0, 1030.0, "grew", "", None, 40.0),
        WorldReport(1, 3, ("node1", "node1", "node2"), 1031.0, 1034.0, None, "", "", 5.5, 60.0),
    ),
    timeline=Timeline(requested=1000.0, granted=1010.0, started=1012.0),
)


def test_an_elastic_gang_is_told_of_by_its_world() -> None:
    assert describe(ELASTIC) == (
        "running (world 1: 3 of 2 to 4 ranks); waits for 1 more executor: node2 is full"
    )
    reported = replace(ELASTIC, metrics=({"loss": 0.5},), waiting_for="")
    assert describe(reported) == "running (world 1: 3 of 2 to 4 ranks): loss 0.5"
    ready = replace(ELASTIC, state="ready")
    assert describe(ready).startswith("ready: 3 executors on node1, node1, node2 (world 1: 3 of")


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ((), "waiting for 2 to 4 ranks: 0 of 4 executors are here"),
        (("node1",), "waiting for 2 to 4 ranks: 1 of 4 executors are here (node1)"),
    ],
)
def test_an_elastic_gang_waits_for_its_sizes(hosts: tuple[str, ...], words: str) -> None:
    waits = RunStatus("r", "waiting", 0, len(hosts), 4, hosts, "", 1.5, sizes=(2, 4))
    assert describe(waits) == words
    full = replace(waits, waiting_for="Queue q is full")
    assert describe(full) == "waiting for 2 to 4 ranks: Queue q is full"


def test_at_the_end_the_worlds_have_a_line_each() -> None:
    out = io.StringIO()
    worlds = (
        ELASTIC.worlds[0],
        replace(ELASTIC.worlds[1], ended=1050.0, end="lost", why="node2 is gone"),
    )
    RunLines(out=out, err=out).status(replace(ELASTIC, state="succeeded", worlds=worlds))
    told = out.getvalue()
    assert "world 0: 2 ranks, 10.0 s to 30.0 s, 40.0 GPU seconds, grew" in told
    assert (
        "world 1: 3 ranks, 31.0 s to 50.0 s, resize 5.5 s, 60.0 GPU seconds, lost: node2 is gone"
    ) in told


def test_the_end_names_the_time_not_spent_training() -> None:
    out = io.StringIO()
    lines = RunLines(out=out, err=out)
    lost = split_gpu_seconds(2400.0, 2000.0, losses=RankLosses(720.0))
    running = RunStatus("r", "running", 0, 2, 2, (), "", 1.5, gpu_seconds=lost)
    lines.status(running)
    assert "GPU time not spent training" not in out.getvalue()
    lines.status(replace(running, state="succeeded"))
    told = "s: GPU time not spent training: 12 of 40 GPU minutes waited for data: read fewer"
    assert told in out.getvalue()


def test_runs_that_failed_get_no_advice() -> None:
    out = io.StringIO()
    lost = split_gpu_seconds(2400.0, 2000.0, losses=RankLosses(720.0))
    for state in ("failed", "cancelled"):
        status = RunStatus("r", state, 0, 2, 2, (), "", 1.5, gpu_seconds=lost)
        RunLines(out=out, err=out).status(status)
    assert "failed" in out.getvalue() and "not spent training" not in out.getvalue()
