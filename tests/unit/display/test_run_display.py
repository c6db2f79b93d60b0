"""Live displays: what is kept of a run, how it is drawn, and that the run never waits for it."""

from __future__ import annotations

import base64
import contextvars
import html
import io
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hopsgpu.core.gpu_losses import split_gpu_seconds, time_not_training
from hopsgpu.core.run_values import RankReport, RunStatus, Timeline, WorldReport
from hopsgpu.display import screens
from hopsgpu.display.cell import page, summary
from hopsgpu.display.charts import ASCII, SHARES, bars_image, lines_image, sparkline, worlds_image
from hopsgpu.display.live import Live
from hopsgpu.display.picture import MAX_RANK_ROWS, SHOWN_RANKS, Picture, Scene, Trace, gpu_of
from hopsgpu.display.progress import Shielded, progress_of
from hopsgpu.display.terminal import Terminal, lines_of
from tests.bounds import HANG_SECONDS
from tests.conftest import until

GIB = 2**30
WAITING = RunStatus("run-1", "waiting", 0, 1, 2, ("node1",), "node2 is <full>", 1.5)
TRAINING = replace(
    WAITING, state="running", granted=2, granted_hosts=("node1", "node2"), waiting_for=""
)


def measured(rank: int, step: int) -> dict[str, float]:
    gpu = {"utilisation": 0.5 + rank / 4000, "memory_used": 8.0 * GIB, "memory_total": 80.0 * GIB}
    return {"step": step, "loss": 1 / (1 + step)} | {f"gpu.0.{n}": v for n, v in gpu.items()}


def trained(ranks: int, steps: int) -> Scene:
    scene = Scene(TRAINING, 0.0)
    for step in range(steps):
        metrics = tuple(measured(rank, step) for rank in range(ranks))
        scene.status(replace(TRAINING, metrics=metrics, elapsed=step / 2), step / 2)
    return scene


# --- what is kept ------------------------------------------------------------------------


def test_a_picture_of_a_wait_goes_on_by_the_clock() -> None:
    scene = Scene(WAITING, 10.0)
    assert scene.picture(12.0).elapsed == 3.5
    scene.status(replace(WAITING, state="failed"), 13.0)
    assert scene.picture(20.0).elapsed == 1.5 and scene.picture(20.0).has_ended


def test_metrics_become_traces_of_the_first_ranks_and_a_range_over_all() -> None:
    picture = trained(1000, 3).picture(2.0)
    (plot,) = picture.plots
    assert (plot.name, plot.value, plot.least, plot.most) == ("loss", 1 / 3, 1 / 3, 1 / 3)
    assert len(plot.traces) == SHOWN_RANKS
    # By step, whatever time that took.
    assert plot.traces[0] == ((0, 1.0), (1, 1 / 2), (2, 1 / 3)) and plot.steps == (0, 2)
    assert len(picture.rows) == MAX_RANK_ROWS and picture.ranks == 1000
    assert len(picture.utilisations) == 200
    assert picture.utilisations[0] == pytest.approx(0.5 + 2 / 4000)


def test_a_new_attempt_is_plotted_anew() -> None:
    scene = trained(1, 5)
    scene.status(replace(TRAINING, attempt=1), 9.0)
    assert scene.picture(9.0).plots == ()


def test_values_that_are_no_finite_numbers_are_told_and_not_plotted() -> None:
    scene = Scene(TRAINING, 0.0)
    nan = float("nan")
    metrics = ({"step": 7, "loss": nan}, {"step": 7, "loss": 2.0})
    scene.status(replace(TRAINING, metrics=metrics), 1.0)
    (plot,) = scene.picture(1.0).plots
    assert plot.value != plot.value and (plot.least, plot.most) == (2.0, 2.0)
    assert plot.traces == ((), ((7, 2.0),))
    assert "nan" in page(scene.picture(1.0), "k")


def test_a_trace_of_a_long_run_stays_small_and_even() -> None:
    trace = Trace()
    for second in range(100_000):
        trace.add(float(second), second / 2)
    assert 100 < len(trace.points) < 240
    gaps = {b[0] - a[0] for a, b in zip(trace.points, trace.points[1:], strict=False)}
    assert (
        max(gaps) < 1.1 * min(gaps)
        and trace.points[0] == (0.0, 0.0)
        and trace.points[-1][0] > 99_000
    )


def test_a_training_that_goes_back_is_plotted_from_there() -> None:
    trace = Trace()
    for step in (0, 10, 20, 30, 10, 15):
        trace.add(step, float(step))
    assert [at for at, _ in trace.points] == [0, 10, 15]


def test_a_plot_ends_at_the_last_step_however_many_there_were() -> None:
    scene = Scene(TRAINING, 0.0)
    for step in range(1001):
        metrics = ({"step": step, "loss": float(step)},)
        scene.status(replace(TRAINING, metrics=metrics), step / 10)
    (plot,) = scene.picture(200.0).plots
    assert plot.traces[0][-1] == (1000, 1000.0) and plot.steps == (0, 1000)
    assert len(plot.traces[0]) < 250


def test_metrics_of_other_steps_have_the_same_scale() -> None:
    scene = Scene(TRAINING, 0.0)
    for step in range(0, 101, 10):
        later = {"accuracy": step / 100} if step >= 50 else {}
        metrics = ({"step": step, "loss": 1.0} | later,)
        scene.status(replace(TRAINING, metrics=metrics), step)
    loss, accuracy = scene.picture(200.0).plots
    assert loss.steps == accuracy.steps == (0, 100)
    assert accuracy.traces[0][0] == (50, 0.5)
    drawn = [line.plain for line in lines_of(scene.picture(200.0), 80, 24, "utf-8")]
    named = [line for line in drawn if "accuracy" in line]
    # It begins half way.
    assert re.match(r"  accuracy  {14,19}[▁▂▃▄▅▆▇█]{14,17} *  0\.5 → 1$", named[0]), named


def test_of_several_gpus_the_mean_and_the_sum() -> None:
    gpu = gpu_of({"gpu.0.utilisation": 1, "gpu.1.utilisation": 0, "gpu.1.memory_used": 5})
    assert gpu is not None and (gpu.utilisation, gpu.memory_used, gpu.memory_total) == (
        0.5,
        5,
        None,
    )
    assert gpu_of({"loss": 1.0}) is None


def test_of_lines_the_last_ones_are_kept() -> None:
    scene = Scene(TRAINING, 0.0)
    scene.line(0, "node1", [f"{number}" for number in range(100_000)])
    scene.line(999, "node2", ["x" * 10_000_000])
    picture = scene.picture(0.0)
    (log,) = picture.logs
    assert (log.total, log.lines[-1], len(log.lines)) == (100_000, "99999", 30)
    assert picture.recent.total == 100_001 and picture.recent.lines[-1].startswith("[rank 999] xxx")
    assert len(picture.recent.lines[-1]) < 2_000


# --- how it is drawn ---------------------------------------------------------------------


def test_sparklines_are_as_high_as_their_values() -> None:
    points = tuple((float(at), float(at)) for at in range(100))
    assert sparkline(points, 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(points, 8, ASCII) == ASCII
    assert sparkline(points[:1], 8) == "▁" and sparkline((), 8) == ""
    # Between two points is a line, as wide as they are far from each other.
    assert sparkline(((0.0, 1.0), (1.0, 1.0)), 4, bounds=SHARES) == "████"
    assert sparkline(((0.0, 0.0), (7.0, 7.0)), 8) == "▁▂▃▄▅▆▇█"
    # What is out of bounds is drawn at them.
    assert sparkline(((0.0, -1.0), (1.0, 2.0)), 2, bounds=SHARES) == "▁█"
    assert sparkline(((4.0, 1.0), (6.0, 1.0)), 8, span=(0.0, 8.0), bounds=SHARES) == "    ███"


def svg(address: str) -> str:
    kind, _, content = address.partition(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(content).decode()


def test_images_are_small_svgs() -> None:
    lines = svg(lines_image([((0.0, 0.0), (1.0, 2.0)), ((0.0, 1.0),), ()], 100, 20))
    assert lines.count("<polyline") == 1 and 'points="2.0,18.0 98.0,2.0"' in lines
    assert lines.count("<circle") == 1
    bars = svg(bars_image((0.0, 1.0, 2.0), 30, 11))
    assert bars.count("<rect") == 4 and 'height="11.0"' in bars and 'height="1.0"' in bars
    assert "<poly" not in svg(lines_image([], 10, 10))


def test_a_cell_shows_all_there_is_and_escapes_it() -> None:
    scene = trained(2, 3)
    scene.line(1, "<node2>", ["<img src=x onerror=alert(1)>"])
    shown = page(scene.picture(2.0), "key")
    assert "2 of 2 executors on node1, node2" in shown
    assert "data:image/svg+xml" in shown and "loss" in shown and "0.3333" in shown
    assert "50%" in shown and "8.0 of 80.0 GiB" in shown and "GPU memory" in shown
    assert ">step 0<" in shown and ">2<" in shown
    assert "&lt;img src=x onerror=alert(1)&gt;" in shown and "<img src=x" not in shown
    assert "log of rank 1 on &lt;node2&gt;" in shown and "<details" in shown
    waits = page(Scene(WAITING, 0.0).picture(0.0), "key")
    assert "node2 is &lt;full&gt;" in waits
    assert "1 of 2 executors on node1" in summary(Scene(WAITING, 0.0).picture(0.0))


def test_a_cells_plots_are_as_wide_and_as_high_whatever_is_reported() -> None:
    plots = [
        page(Scene(replace(TRAINING, metrics=metrics), 0.0).picture(0.0), "key")
        for metrics in (({"loss": 1.0}, {"loss": 1.0}), ({"l" * 90: 0.12345}, {"l" * 90: 1e9}))
    ]
    for shown in plots:
        assert shown.count("width:204px") == 1 and shown.count("text-overflow:ellipsis") == 3
    assert "&nbsp;" in plots[0] and "ranks 0.1235 to 1e+09" in plots[1]


def test_a_plot_has_the_range_of_its_values() -> None:
    scene = Scene(TRAINING, 0.0)
    for step, loss in enumerate((2.5, 0.25, 0.5)):
        metrics = ({"step": step, "loss": loss}, {"step": step, "loss": loss + 0.01})
        scene.status(replace(TRAINING, metrics=metrics), step)
    picture = scene.picture(9.0)
    assert "0.25 … 2.51" in page(picture, "key") and "ranks 0.5 to 0.51" in page(picture, "key")
    for encoding, text in (
        ("utf-8", "2.5 → 0.5 (ranks 0.5 to 0.51)"),
        ("ascii", "2.5 -> 0.5 (ranks 0.5 to 0.51)"),
    ):
        (line,) = (one.plain for one in lines_of(picture, 80, 24, encoding) if "loss" in one.plain)
        assert line.endswith(text)


def test_ranks_that_have_said_nothing_are_in_no_table() -> None:
    silent = Scene(replace(TRAINING, metrics=({}, {})), 0.0)
    assert "<table" not in page(silent.picture(0.0), "key")
    silent.line(1, "node2", ["one"])
    assert "<td" in page(silent.picture(0.0), "key")


def test_a_press_of_the_button_unfolds_a_log_and_its_click_does_not_fold_it_again() -> None:
    scene = trained(1, 2)
    scene.line(0, "node1", ["one"])
    (log,) = re.findall("<details .*?</script>", page(scene.picture(1.0), "key"), re.DOTALL)
    # An update between press and release makes another element, where no click comes.
    assert re.search('onmousedown="[^"]*this.open=!this.open', log)
    assert re.search('onclick="if\\(event.detail[^"]*preventDefault', log)
    # The classic notebook's style has no triangle.
    assert "display:list-item" in log
    assert """querySelectorAll('[id="key-0"]')""" in log


def test_a_large_gang_takes_no_more_room() -> None:
    scene = trained(1000, 3)
    for rank in range(1000):
        scene.line(rank, "node1", ["<" * 10_000] * 300)
    picture = scene.picture(2.0)
    assert "and 988 more ranks; GPU utilisation of all: 62% on average" in page(picture, "key")
    assert len(page(picture, "key")) < 700_000  # the worst: each character is four
    lines = lines_of(picture, 80, 24, "utf-8")
    assert len(lines) <= 24 and all(line.cell_len <= 80 for line in lines)
    assert any("more ranks; GPU utilisation" in line.plain for line in lines)
    # A part of the terminal is what they wrote.
    assert sum("[rank " in line.plain for line in lines) >= 3


@pytest.mark.parametrize("ranks", [1, 4, 12])
def test_all_ranks_that_fit_are_shown_with_metrics_or_without(ranks: int) -> None:
    ended = tuple(RankReport(r, "worker", f"node{r}", (), 1, exit_code=0) for r in range(ranks))
    scene = Scene(replace(TRAINING, ranks=ended), 0.0)
    picture = scene.picture(0.0)
    assert (len(picture.rows), picture.ranks) == (ranks, ranks)
    text = "\n".join(line.plain for line in lines_of(picture, 80, 24, "utf-8"))
    assert [f"node{r}  " in text for r in range(ranks)] == [True] * ranks
    for shown in (text, page(picture, "key")):
        assert "more rank" not in shown


def test_of_more_ranks_than_fit_the_others_are_counted() -> None:
    ended = tuple(RankReport(r, "worker", "node1", (), 1, exit_code=0) for r in range(30))
    scene = Scene(replace(TRAINING, ranks=ended), 0.0)
    scene.line(0, "node1", [str(number) for number in range(9)])
    lines = [line.plain for line in lines_of(scene.picture(0.0), 80, 16, "utf-8")]
    assert len(lines) == 16
    rows = [line for line in lines if "returned" in line]
    assert f"  and {30 - len(rows)} more ranks" in lines
    assert lines[-2:] == [
        "  [rank 0] 8",
        "  9 lines; whole logs: hopsgpu logs run-1",
    ]


NEEDS = "Needs 2 GPUs, 1 is free; 'nightly training of all models' of alice uses 4 GPUs"
WHY = (
    "used by 'nightly training of all models' of alice (4 GPUs, application_1795267401648_0010),"
    " 'b' of bob (2 GPUs, application_1795267401648_0011)",
    "0 of 4 in queue root.default",
)


@pytest.mark.parametrize("width", [64, 90, 120])
def test_the_sentence_comes_before_the_details(width: int) -> None:
    waiting = replace(WAITING, waiting_for=NEEDS, waiting_details=WHY)
    picture = Scene(waiting, 0.0).picture(0.0)
    lines = [line.plain for line in lines_of(picture, width, 24, "utf-8")]
    assert all(len(line) <= width for line in lines)
    *sentence, holders, rest = lines[1:]
    assert " ".join(line.strip() for line in sentence).endswith(NEEDS)
    assert holders.startswith("  used by 'nightly training of all models'")
    assert holders.endswith("…") and rest == "  0 of 4 in queue root.default"
    # Elsewhere nothing is cut.
    shown = html.unescape(page(picture, "key"))
    assert shown.index(NEEDS) < shown.index("; ".join(WHY))


@pytest.mark.parametrize(
    ("details", "lines"),
    [
        (("two phrases",), ["  two phrases"]),
        (
            ("one long phrase that is longer than a line of a narrow terminal has characters",),
            [
                "  one long phrase that is longer than a",
                "  line of a narrow terminal has characters",
            ],
        ),
        (("a", "b", "c" + "c" * 36), ["  a; b;", f"  c{'c' * 36}"]),
    ],
)
def test_details_are_broken_between_their_parts(details: tuple[str, ...], lines: list[str]) -> None:
    picture = Scene(replace(WAITING, waiting_details=details), 0.0).picture(0.0)
    found = [line.plain for line in lines_of(picture, 42, 24, "utf-8")]
    assert found[-len(lines) :] == lines


def test_what_is_cut_is_seen_to_be() -> None:
    scene = Scene(TRAINING, 0.0)
    scene.line(0, "node1", ["x" * 100, "ü" * 100])
    for encoding, mark in (("utf-8", "…"), ("ascii", "...")):
        last = [line.plain for line in lines_of(scene.picture(0.0), 40, 24, encoding)][-2:]
        assert all(line.endswith(mark) and len(line) == 40 for line in last)


ENDED = replace(
    TRAINING,
    state="succeeded",
    elapsed=73.4,
    granted_hosts=(),
    timeline=Timeline(
        requested=0, granted=12.1, started=32.5, returned=70.9, published=73.0, released=73.4
    ),
)
TOOK = ("waited 12.1 s", "started 20.4 s", "trained 38.4 s", "published 2.1 s", "released 0.4 s")


def test_the_end_tells_how_long_each_part_took() -> None:
    picture = Scene(ENDED, 0.0).picture(0.0)
    assert ", ".join(TOOK) in page(picture, "key")
    assert ", ".join(TOOK) in summary(picture)
    for width, said in (
        (120, [", ".join(TOOK)]),
        (64, [f"{', '.join(TOOK[:3])},", ", ".join(TOOK[3:])]),
    ):
        lines = [line.plain for line in lines_of(picture, width, 24, "utf-8")]
        assert lines == ["hopsgpu run-1: succeeded - 73.4 s", *(f"  {line}" for line in said)]


def test_the_end_names_the_time_not_spent_training_with_its_remedy() -> None:
    lost = split_gpu_seconds(60.0, 40.0, starting=18.0)
    assert time_not_training(lost)
    picture = Scene(replace(ENDED, gpu_seconds=lost), 0.0).picture(0.0)
    line = f"GPU time not spent training: {time_not_training(lost)}"
    assert line in page(picture, "key") and line in summary(picture)
    shown = [text.plain for text in lines_of(picture, 60, 24, "utf-8")]
    assert line in " ".join(text.strip() for text in shown)
    assert max(map(len, shown)) <= 60
    for state in ("running", "failed", "cancelled"):
        other = Scene(replace(ENDED, state=state, gpu_seconds=lost), 0.0).picture(0.0)
        assert "GPU time not spent training" not in page(other, "key")


def test_ranks_that_import_are_starting() -> None:
    starting = replace(TRAINING, state="starting", waiting_for="Starting 2 ranks: 1 of them runs")
    picture = Scene(starting, 0.0).picture(0.0)
    text = "\n".join(line.plain for line in lines_of(picture, 64, 24, "utf-8"))
    assert "hopsgpu run-1: starting ranks - 1.5 s" in text and "  Starting 2 ranks: 1" in text
    assert "starting ranks" in page(picture, "key") and "starting ranks" in summary(picture)


def test_a_terminal_shows_it_in_its_own_characters() -> None:
    scene = trained(2, 20)
    scene.line(0, "node1", ["\x1b[31mred ✓\x1b[0m"])
    ended = tuple(RankReport(r, "worker", "node1", (), 1, exit_code=r) for r in range(2))
    scene.status(replace(TRAINING, ranks=ended, metrics=({}, {})), 10.0)
    text = "\n".join(line.plain for line in lines_of(scene.picture(9.0), 100, 30, "utf-8"))
    assert "hopsgpu run-1: running" in text and "2 of 2 executors on node1, node2" in text
    assert "[rank 0] red ✓" in text and "exit code 1" in text
    ascii_only = lines_of(scene.picture(9.0), 100, 30, "ascii")
    assert all(line.plain.isascii() for line in ascii_only)
    assert len(lines_of(scene.picture(9.0), 40, 3, "utf-8")) == 3


# --- when it is drawn --------------------------------------------------------------------


class Seen:
    """A screen that notes what it is shown."""

    def __init__(self, fails: bool = False) -> None:
        self.pictures: list[Picture] = []
        self.ended = False
        self.closed = False
        self._fails = fails

    def show(self, picture: Picture) -> None:
        self.pictures.append(picture)
        if self._fails:
            raise OSError("the terminal is gone")

    def end(self, picture: Picture) -> None:
        self.show(picture)
        self.ended = True

    def close(self) -> None:
        self.closed = True


def test_the_last_picture_is_there_before_the_run_goes_on() -> None:
    seen = Seen()
    live = Live(lambda context: seen)
    live.status(TRAINING)
    live.line(0, "node1", "one", "two")
    live.status(replace(TRAINING, state="succeeded"))
    assert seen.ended and seen.closed
    assert seen.pictures[-1].status.state == "succeeded"
    assert seen.pictures[-1].recent.lines == ("[rank 0] one", "[rank 0] two")


def test_it_is_drawn_a_few_times_a_second_however_much_is_told() -> None:
    seen = Seen()
    live = Live(lambda context: seen)
    live.status(TRAINING)
    began = time.monotonic()
    while (took := time.monotonic() - began) < 1.0 or (not seen.pictures and took < 30.0):
        live.line(0, "node1", *(["x"] * 100))
        live.status(TRAINING)
    live.status(replace(TRAINING, state="succeeded"))
    drawn = len(seen.pictures)
    # One each quarter of a second, and the last.
    assert 2 <= drawn <= 4 * (time.monotonic() - began) + 2
    assert not until(lambda: len(seen.pictures) > drawn, 0.5)


def test_a_gang_that_is_acquired_again_is_shown_again() -> None:
    screens = [Seen(), Seen()]
    opened = iter(screens)
    live = Live(lambda context: next(opened))
    for _ in screens:
        live.status(WAITING)
        live.status(replace(WAITING, state="succeeded"))
        live.line(0, "node1", "late")
    assert all(seen.ended for seen in screens)


def test_a_screen_that_fails_is_shown_no_more_and_let_go() -> None:
    seen = Seen(fails=True)
    shown = Shielded(Live(lambda context: seen))
    shown.status(TRAINING)
    assert until(lambda: seen.closed)
    shown.line(0, "node1", "goes on")
    shown.status(replace(TRAINING, state="succeeded"))
    assert shown.problem == "the progress display stopped (OSError: the terminal is gone)"
    assert len(seen.pictures) == 1


def test_where_another_display_is_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    live = Live(lambda context: None)
    live.status(WAITING)
    live.line(0, "node1", "one")
    live.status(replace(WAITING, state="failed"))
    printed = capsys.readouterr()
    assert printed.out == "[rank 0 node1] one\n" and printed.err.count("\n") == 2


# --- on which screen ---------------------------------------------------------------------


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Tty:
    # In the test itself: pytest has another stdout while it makes fixtures.
    tty = Tty()
    monkeypatch.setattr(sys, "stdout", tty)
    monkeypatch.setattr(sys, "stderr", tty)
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    return tty


def test_a_terminal_is_drawn_on_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    assert screens.is_in_terminal() and not screens.is_taken()
    live = Live()
    live.status(TRAINING)
    assert screens.is_taken()
    other = Live()
    other.status(replace(TRAINING, run_id="run-2"))
    other.line(0, "node1", "a line of the other run")
    print("a line of the script")
    live.status(replace(TRAINING, state="succeeded"))
    assert sys.stdout is terminal and sys.stderr is terminal
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "run-1: succeeded" in shown
    assert shown.index("a line of the other run") < shown.index("a line of the script")
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
    other.status(replace(TRAINING, run_id="run-2", state="succeeded"))


def test_a_display_may_be_closed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    shown = Terminal(lines_of)
    shown.close()
    shown.close()
    assert sys.stdout is terminal


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_is_given_lines(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("TERM", term)
    progress_of(None).line(0, "node1", "shown")
    assert terminal.getvalue() == "[rank 0 node1] shown\n"


def test_at_a_prompt_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not screens.is_in_terminal()


class Shell:
    kernel = object()


def test_a_kernel_is_given_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    cells = contextvars.ContextVar("cell", default="another")

    class IPython:
        @staticmethod
        def get_ipython() -> Shell:
            return Shell()

    class Display:
        @staticmethod
        def display(content: dict[str, str], **given: Any) -> None:
            shown.append({**content, **given, "cell": cells.get()})

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    monkeypatch.setitem(sys.modules, "IPython.display", Display)
    assert screens.is_in_kernel() and not screens.is_in_terminal()
    cells.set("mine")
    told = progress_of(None)
    cells.set("the next one")

    def run() -> None:
        told.status(TRAINING)
        until(lambda: bool(shown))
        told.status(replace(TRAINING, state="succeeded"))

    in_thread(run)
    assert told.problem is None
    assert [s["update"] for s in shown] == [False] + [True] * (len(shown) - 1)
    assert len(shown) >= 2 and {s["cell"] for s in shown} == {"mine"}
    assert len({s["display_id"] for s in shown}) == 1
    assert shown[-1]["text/plain"].startswith("hopsgpu run-1") and shown[-1]["raw"] is True
    assert "succeeded" in shown[-1]["text/html"]


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


# --- the worlds of an elastic gang ---------------------------------------------------------

WORLDS = (
    WorldReport(0, 2, ("node1", "node2"), 1010.0, 1012.0, 1030.0, "lost", "<gone>", None, 40.0),
    WorldReport(1, 4, ("node1",) * 4, 1031.0, 1034.0, None, "", "", 5.5, 60.0),
)
ELASTIC = replace(
    TRAINING,
    granted=4,
    granted_hosts=("node1",) * 4,
    wanted=6,
    waiting_for="Gives 2 GPUs to waiting gangs at its next checkpoint",
    elapsed=60.0,
    timeline=Timeline(requested=1000.0, granted=1010.0, started=1012.0),
    worlds=WORLDS,
    sizes=(2, 6),
)


def pictured(status: RunStatus) -> Picture:
    return Scene(status, 0.0).picture(0.0)


def test_a_world_that_runs_is_named_with_what_comes() -> None:
    shown = [line.plain for line in lines_of(pictured(ELASTIC), 120, 30, "utf-8")]
    text = "\n".join(shown)
    assert "running (world 1: 4 of 2 to 6 ranks)" in text
    assert "4 executors on node1, 2 more asked for" in text
    assert "  Gives 2 GPUs to waiting gangs at its next checkpoint" in shown
    assert "  world 0: 2 ranks, 10.0 s to 30.0 s, 40.0 GPU seconds, lost: <gone>" in shown
    assert "world 1: 4 ranks" not in text, "the present one is in the first line"
    assert "attempt" not in text


def test_a_cell_has_bars_of_the_worlds_and_in_the_end_a_table() -> None:
    shown = page(pictured(ELASTIC), "k1")
    assert "ranks of the worlds: 2, 4" in shown and "GPU seconds" not in shown
    (address,) = re.findall(r'src="([^"]+)"', shown)
    drawn = svg(address)
    assert drawn.count('fill-opacity="0.8"') == 2
    ended = replace(WORLDS[1], ended=1060.0, end="returned")
    shown = page(pictured(replace(ELASTIC, state="succeeded", worlds=(WORLDS[0], ended))), "k1")
    assert "lost: &lt;gone&gt;" in shown and "<gone>" not in shown
    assert "GPU seconds" in shown and "5.5 s" in shown


def test_bars_are_as_high_as_the_ranks_and_as_wide_as_the_time() -> None:
    drawn = svg(worlds_image([(0.0, 10.0, 2), (10.0, 40.0, 4)], 40.0, 404, 64))
    sizes = re.findall(r'width="([0-9.]+)" height="([0-9.]+)" fill="#3b82f6"', drawn)
    (narrow, low), (wide, high) = ((float(w), float(h)) for w, h in sizes)
    assert (high, wide + 1) == (2 * low, pytest.approx(3 * (narrow + 1)))
    assert ">2</text>" in drawn and ">4</text>" in drawn and ">40 s</text>" in drawn
    assert "#000" not in drawn and "black" not in drawn, "readable on dark backgrounds"
    worlds_image([], 0.0, 404, 64)


def test_of_many_worlds_the_last_are_shown() -> None:
    many = tuple(replace(WORLDS[0], generation=number) for number in range(1000))
    status = replace(ELASTIC, state="failed", worlds=many)
    shown = [line.plain for line in lines_of(pictured(status), 120, 60, "utf-8")]
    assert sum("world " in line for line in shown) == 8 and "  992 worlds before" in shown
    assert len(page(pictured(status), "k1")) < 100_000
    assert len(page(pictured(replace(status, state="running")), "k1")) < 100_000


def test_a_gang_of_one_size_shows_no_world() -> None:
    text = page(pictured(TRAINING), "k1")
    assert "world" not in text and "asked for" not in text
