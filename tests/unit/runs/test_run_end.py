"""The end of a run, whatever comes of it: one protocol for launches and searches."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import GangState
from hopsgpu.core.run_record import FailureRecord
from hopsgpu.core.spec import ExecutorShape, GangSpec, LaunchPlan
from hopsgpu.display.progress import progress_of
from hopsgpu.errors import Cancelled, ConfigError, GangTimeout, HopsGpuError, RankFailed
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.recorder import Recording
from hopsgpu.runs.run_details import RunDetails
from hopsgpu.runs.run_end import RunBody, failure_record, run_to_end
from hopsgpu.runs.status_board import GangBoard
from hopsgpu.storage.background import Background
from tests.bounds import HANG_SECONDS


class Fit(RunBody[GangResult]):
    """A run that does what a test says, and records in which order it is called."""

    def __init__(self, directory: Path, does: Callable[[], None]) -> None:
        board = GangBoard("fit-1", 1, 1, progress_of("off"))
        site: Any = SimpleNamespace(id="application_1", user="alice", versions={}, error_text=str)
        plan = LaunchPlan(
            GangSpec("fit"),
            1,
            1,
            ExecutorShape(1, 1, 512, 4608),
            "default",
            {},
            {"run": f"file://{directory}"},
        )
        self.active = ActiveRun(plan, site, board, threading.Event(), Background("records"))
        self.order: list[str] = []
        self._does = does

    def work(self, recording: Recording) -> None:
        self.active.directory().make()
        recording.put(GangState.REQUESTED.value)
        self.active.board.state(GangState.WAITING)
        try:
            self._does()
        finally:
            self.active.board.state(GangState.RELEASING)
            self.active.board.mark("released")

    def details(self) -> RunDetails:
        return RunDetails(data={"data": {"rows": 7}})

    def queue_final_work(self) -> None:
        self.order.append(f"rest of a run that is {self.active.board.status().state}")
        self.active.background.put_after_all("rest", self._rest)

    def _rest(self) -> None:
        self.order.append(f"record of one that has {self.record['state']}")
        raise HopsGpuError("MLflow is away")

    def result(self) -> GangResult:
        return replace(self.active.board.result(), values=(4,))

    def result_of_failure(self, error: HopsGpuError) -> GangResult:
        return self.active.board.result()

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.active.directory() / "run.json").read()))


def raising(error: BaseException) -> Callable[[], None]:
    def does() -> None:
        raise error

    return does


def test_a_run_that_succeeds_has_its_record_and_the_rest_before_it_returns(tmp_path: Path) -> None:
    run = Fit(tmp_path / "fit-1", lambda: None)
    result = run_to_end(run, run.active)
    assert result.values == (4,) and result.warnings == ("MLflow is away",)
    assert result.timeline.released is not None
    assert run.order == ["rest of a run that is releasing", "record of one that has succeeded"]
    assert (run.record["error"], run.record["data"]) == (None, {"data": {"rows": 7}})
    assert run.record["reason"] == "succeeded"
    board = run.active.board
    assert (board.status().state, board.executors_fate) == ("succeeded", "its GPUs are back")


def test_who_does_not_wait_leaves_problems_to_the_owner_of_the_background_work(
    tmp_path: Path,
) -> None:
    run = Fit(tmp_path / "fit-1", lambda: None)
    assert run_to_end(run, run.active, should_flush=False).warnings == ()
    run.active.background.flush(HANG_SECONDS)
    assert run.active.background.problems() == ("MLflow is away",)
    assert run.record["state"] == "succeeded"


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (HopsGpuError("boom"), "failed", "other"),
        (Cancelled("enough"), "cancelled", "cancelled"),
        (GangTimeout("too late", granted=1, wanted=2), "failed", "not_granted"),
    ],
)
def test_a_run_that_fails_has_its_record_too_and_its_result_so_far(
    tmp_path: Path, error: HopsGpuError, state: str, reason: str
) -> None:
    run = Fit(tmp_path / "fit-1", raising(error))
    with pytest.raises(type(error)) as caught:
        run_to_end(run, run.active, should_flush=False)
    assert caught.value.__notes__ == ["MLflow is away"]
    assert caught.value.result.timeline.released is not None
    assert (run.record["state"], run.record["error"]) == (state, str(error))
    assert run.record["reason"] == reason
    assert run.active.board.status().state == state


def test_a_bug_is_recorded_and_raised_as_it_is(tmp_path: Path) -> None:
    run = Fit(tmp_path / "fit-1", raising(ZeroDivisionError("bug")))
    with pytest.raises(ZeroDivisionError) as caught:
        run_to_end(run, run.active)
    assert not hasattr(caught.value, "result")
    assert (run.record["state"], run.record["error"]) == ("failed", "bug")


FAILED = RankFailed("rank 1 on node1 raised ValueError: no", summary="ValueError: no", rank=1)


@pytest.mark.parametrize(
    ("error", "reason", "failure"),
    [
        (FAILED, EndReason.USER_ERROR, FailureRecord("ValueError: no", 1)),
        (FAILED, EndReason.TIMEOUT, FailureRecord("ValueError: no")),
        (FAILED, EndReason.GPUS_IDLE, FailureRecord("ValueError: no")),
        (
            ConfigError("workers=0:\nno rank"),
            EndReason.REFUSED,
            FailureRecord("ConfigError: workers=0:"),
        ),
        (Cancelled("fit-1 was"), EndReason.CANCELLED, FailureRecord("fit-1 was")),
    ],
)
def test_the_error_in_short(error: Exception, reason: EndReason, failure: FailureRecord) -> None:
    assert failure_record(error, str(error), reason) == failure
