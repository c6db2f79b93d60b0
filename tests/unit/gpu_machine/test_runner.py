"""Which checks run, within the bounds of time, and the processes that run them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_machine import runner
from tests.gpu_machine.results import FAILED, NO_GPU, Outcome, Verdict, exit_code
from tests.gpu_machine.runner import run_in_process, run_steps, why_not_applicable
from tests.gpu_machine.situation import Situation
from tests.gpu_machine.steps import STEPS, Step
from tests.unit.gpu_machine.machines import situation


def never(situation: Situation) -> Verdict:
    raise AssertionError("a stand-in runs the checks")


STEP = Step("step", 60.0, never)


class Clock:
    """A clock that each check moves, and the time limits of the checks."""

    def __init__(self, *durations: float) -> None:
        self.now = 1000.0
        self.limits: list[float] = []
        self._durations = iter(durations)

    def __call__(self) -> float:
        return self.now

    def run_step(self, step: Step, seconds: float) -> Verdict:
        self.limits.append(seconds)
        self.now += next(self._durations)
        return Verdict(Outcome.OK, step.name)


def test_no_check_starts_after_the_last_start(tmp_path: Path) -> None:
    clock = Clock(60.0, 60.0, 60.0, 40.0)
    steps = [dataclasses.replace(STEP, name=str(n)) for n in range(6)]
    checks = run_steps(steps, situation(tmp_path), clock.run_step, 990.0, clock)
    assert clock.limits == [60.0, 60.0, 60.0, 45.0]
    assert [check.outcome for check in checks] == [Outcome.OK] * 4 + [Outcome.NOT_RUN] * 2
    assert [check.seconds for check in checks] == [60.0, 60.0, 60.0, 40.0, None, None]
    assert checks[-1].detail == "225 s had passed"
    assert exit_code(checks) == FAILED


def test_what_cannot_apply_is_not_started(tmp_path: Path) -> None:
    step = dataclasses.replace(STEP, needs_two_gpus=True)
    clock = Clock()
    (check,) = run_steps([step], situation(tmp_path), clock.run_step, clock.now, clock)
    assert (check.outcome, check.detail) == (Outcome.NOT_APPLICABLE, "one GPU only")
    assert exit_code([check]) == 0


@pytest.mark.parametrize(
    ("needs", "fields", "reason"),
    [
        ("needs_cuda", {}, ""),
        ("needs_cuda", {"torch_cuda": ""}, "torch has no CUDA"),
        ("needs_cuda", {"torch": "", "torch_cuda": ""}, "torch cannot be imported"),
        ("needs_two_gpus", {}, "one GPU only"),
        ("needs_two_gpus", {"gpus": ["GPU-1", "GPU-2"]}, ""),
        ("needs_two_gpus", {"gpus": ["MIG-1", "MIG-2"]}, "no two whole GPUs"),
        ("needs_idle_gpus", {}, ""),
        ("needs_idle_gpus", {"pids": [7]}, "another program computes on a GPU"),
    ],
)
def test_needs(tmp_path: Path, needs: str, fields: dict[str, Any], reason: str) -> None:
    step = dataclasses.replace(STEP, **{needs: True})  # type: ignore[arg-type]
    assert why_not_applicable(step, situation(tmp_path, **fields)) == reason
    assert why_not_applicable(STEP, situation(tmp_path, **fields)) == ""


def test_each_check_has_a_name_and_a_bound() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert all(0 < step.seconds < runner.LAST_START_SECONDS for step in STEPS)
    assert runner.LAST_START_SECONDS < runner.END_SECONDS < 240
    assert NO_GPU == 2


def test_a_situation_is_what_was_saved(tmp_path: Path) -> None:
    saved = situation(tmp_path, ["GPU-1", "GPU-2"], [7])
    saved.save()
    assert Situation.load(tmp_path) == saved
    assert (saved.workers, saved.device_type) == (2, "cuda")
    assert situation(tmp_path, [], torch_cuda="").workers == 1


def test_a_check_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    verdict = run_in_process(STEP, 0.0, situation(tmp_path))
    assert verdict == Verdict(Outcome.FAILED, "did not end within 0 s")


def test_a_check_without_a_verdict_has_failed(tmp_path: Path) -> None:
    situation(tmp_path).save()
    verdict = run_in_process(dataclasses.replace(STEP, name="no such"), 60.0, situation(tmp_path))
    assert verdict == Verdict(Outcome.FAILED, "ended with exit code 1: StopIteration")
