from __future__ import annotations

import io
import signal
import threading
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hopsgpu.core.run_values import RunStatus, Timeline
from hopsgpu.display.base import NoDisplay
from hopsgpu.display.progress import RunLines, Shielded, describe, progress_of
from hopsgpu.errors import Cancelled, HopsGpuError
from hopsgpu.launcher.interrupts import interrupts_noted, takes, wait_for
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.run import Run
from hopsgpu.runs.status_board import GangBoard
from tests.bounds import HANG_SECONDS


def board() -> GangBoard:
    return GangBoard("run-1", wanted=2, gpus=1, progress=progress_of("off"))


def started(run_board: GangBoard, work: object, cancelled: threading.Event | None = None) -> Run:
    def start_thread(body: object) -> None:
        threading.Thread(target=body, daemon=True).start()  # type: ignore[arg-type]

    return Run(run_board, cancelled or threading.Event(), work, start_thread)  # type: ignore[arg-type]


def test_a_run_gives_its_result_or_its_error() -> None:
    result = GangResult("run-1", values=(4, 5))
    run = started(board(), lambda: result)
    assert run.wait(HANG_SECONDS) and run.result() is result
    assert run.result().value == 4
    assert GangResult("empty").value is None


def test_a_result_reads_well_whatever_its_values() -> None:
    timeline = Timeline(requested=100.0, granted=110.5, released=120.0)
    shown = repr(GangResult("run-1", values=("x" * 10_000,), timeline=timeline))
    assert len(shown) < 300
    assert "Timeline(waited 10.5 s, started 9.5 s)" in shown


@pytest.mark.parametrize(
    ("passed", "phases"),
    [
        ({}, []),
        ({"released": 3.0}, [("waited", 3.0)]),
        ({"granted": 1.0}, [("waited", 1.0)]),
        (
            {"granted": 10, "started": 12, "returned": 22, "published": 24, "released": 25},
            [("waited", 10), ("started", 2), ("trained", 10), ("published", 2), ("released", 1)],
        ),
        ({"prepared": 4, "granted": 10}, [("prepared", 4), ("waited", 6)]),
        # The function did not run in all ranks.
        (
            {"granted": 10, "returned": 22, "released": 25},
            [("waited", 10), ("started", 12), ("released", 3)],
        ),
        (
            {"prepared": 4, "retried": 30, "granted": 32, "started": 33, "returned": 40},
            [("earlier attempts", 30), ("waited", 2), ("started", 1), ("trained", 7)],
        ),
        # A node's clock may be a little behind.
        ({"granted": 10, "started": 9.9, "returned": 12}, [("waited", 10), ("started", 0)]),
    ],
)
def test_each_phase_has_its_own_length(
    passed: dict[str, float], phases: list[tuple[str, float]]
) -> None:
    found = Timeline(requested=0, **passed).phases()
    assert list(found)[: len(phases)] == phases
    assert Timeline(**passed).phases() == ()


def test_a_runs_error_is_raised() -> None:
    def fail() -> GangResult:
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        started(board(), fail).result()


def test_ctrl_c_cancels_first_and_then_interrupts() -> None:
    cancelled = threading.Event()
    ended = threading.Event()

    def work() -> GangResult:
        signal.raise_signal(signal.SIGINT)  # handled in the main thread, which waits
        assert cancelled.wait(HANG_SECONDS)
        ended.set()
        raise Cancelled("by hand")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts_noted() as interrupted:
        wait_for(started(board(), work, cancelled), interrupted)
    assert ended.is_set()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_noted() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
        signal.raise_signal(signal.SIGINT)


def test_other_threads_note_nothing() -> None:
    def look() -> None:
        with interrupts_noted():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[object] = []
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_display_that_fails_ends_nothing() -> None:
    class Broken(NoDisplay):
        def line(self, rank: int, host: str, text: str) -> None:
            raise BrokenPipeError("the terminal is gone")

    shown = Shielded(Broken())
    assert shown.problem is None
    shown.line(0, "node1", "x")
    shown.line(0, "node1", "y")
    assert "BrokenPipeError: the terminal is gone" in (shown.problem or "")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_repeat_a_wait_but_not_at_every_look(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = RunLines(clock=clock)
    status = RunStatus("run-1", "waiting", 0, 1, 2, ("node1",), "YARN is busy", 3.0)
    for clock.now in (0.0, 1.0, 9.9, 10.1):
        lines.status(status)
    lines.status(replace(status, granted=2, granted_hosts=("node1", "node2"), waiting_for=""))
    lines.line(3, "node2", "loss 0.1")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    RunLines(out=narrow).line(0, "node1", "grün")
    assert narrow.buffer.getvalue() == b"[rank 0 node1] gr\\xfcn\n"  # type: ignore[attr-defined]
    said = capsys.readouterr()
    assert said.out == "[rank 3 node2] loss 0.1\n"
    assert len(said.err.splitlines()) == 3
    assert "waiting: YARN is busy" in said.err
    assert describe(replace(status, state="succeeded")) == "succeeded"


def test_a_run_that_failed_keeps_nothing_that_its_work_held() -> None:
    class Connection:
        pass

    held: list[weakref.ref[Connection]] = []

    def work() -> GangResult:
        connection = Connection()
        held.append(weakref.ref(connection))
        raise HopsGpuError("lost")

    run = started(board(), work)
    with pytest.raises(HopsGpuError, match="lost"):
        run.result()
    assert held[0]() is None


@dataclass(frozen=True, kw_only=True)
class Options:
    train_fn: object = field(kw_only=False)
    workers: int = 1
    gpus_per_worker: float = 1


@takes(Options)
def launched(options: Options, interrupted: threading.Event) -> int:
    return options.workers


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        (
            (print,),
            {"gpus_per_workers": 1},
            "launched() got an unexpected keyword argument 'gpus_per_workers': did you mean"
            " 'gpus_per_worker'?",
        ),
        (
            (print,),
            {"xyz": 1},
            "launched() got an unexpected keyword argument 'xyz'; it has train_fn, workers,"
            " gpus_per_worker",
        ),
        ((), {}, "launched() missing a required argument: 'train_fn'"),
        ((print, 1), {}, "launched() too many positional arguments"),
        ((print,), {"train_fn": 1}, "launched() multiple values for argument 'train_fn'"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_by_the_name_that_was_called(
    args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    assert launched(print, workers=3) == 3
    with pytest.raises(TypeError) as caught:
        launched(*args, **kwargs)
    assert str(caught.value) == said
