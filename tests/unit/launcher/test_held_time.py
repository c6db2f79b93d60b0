"""The GPU time of a held gang between its launches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.artifacts.run_uses import UsageFiles
from hopsgpu.core.gpu_use import GpuUse, use_between
from hopsgpu.core.spec import ExecutorShape, GangSpec, LaunchPlan
from hopsgpu.core.usage_report import RunUse
from hopsgpu.errors import StoreError
from hopsgpu.launcher.held_time import HeldTime
from hopsgpu.storage.background import Background
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS


class Held:
    """A gang of two executors with two GPUs each, by a clock that a test sets."""

    def __init__(self, root: Path) -> None:
        self.now = 1000.0
        self.root = LakePath(f"file://{root}")
        self.background = Background("records")
        shape = ExecutorShape(1, 2, 512, 4608)
        paths = {"root": self.root.url}
        plan = LaunchPlan(GangSpec("gang", workers=4), 2, 2, shape, "ml", {}, paths)
        site: Any = SimpleNamespace(user="alice")
        self.time = HeldTime(plan, site, self.background, lambda: self.now)

    def holds(self, at: float, executors: int) -> None:
        self.now = at
        self.time.record_held(executors)

    @property
    def told(self) -> RunUse | None:
        self.background.flush(HANG_SECONDS)
        runs = [one for one in UsageFiles(self.root).read(None) if isinstance(one, RunUse)]
        assert len(runs) <= 1
        return runs[0] if runs else None


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path)


def test_only_the_time_without_a_launch_counts(held: Held) -> None:
    """Waits 10 s, then idles for 30 s, trains for 60 s, idles for 20 s; loses an executor then."""
    held.time.record_request()
    held.holds(1010.0, 2)
    held.time.record_acquisition(seconds_waited=10.0, gpu_seconds_held=6.0)
    held.holds(1040.0, 0)
    held.holds(1100.0, 2)
    held.holds(1120.0, 1)
    held.holds(1125.0, 0)
    held.time.write()
    run = held.told
    assert run is not None
    assert (run.user, run.queue, run.state, run.name) == ("alice", "ml", "held", "gang")
    assert use_between(run.points, 0.0, 1011.0).waited == 40.0
    assert use_between(run.points, 1011.0, 1040.0).held == pytest.approx(29 * 4)
    assert use_between(run.points, 1040.0, 1100.0) == GpuUse()
    whole = use_between(run.points, 0.0, 2000.0)
    assert whole == GpuUse(held=6.0 + 30 * 4 + 20 * 4 + 5 * 2, waited=40.0)
    assert whole.idle == whole.held


def test_a_gang_that_is_held_for_long_is_written_again_and_again(held: Held) -> None:
    held.time.record_request()
    held.holds(1000.0, 2)
    for second in range(1, 100):
        held.holds(1000.0 + second, 2)
        run = held.told
        if run is not None:
            assert 1000.0 + second - run.ended < 20.0
    assert run is not None and use_between(run.points, 0.0, 2000.0).held >= 80 * 4


def test_of_a_gang_that_never_was_nothing_is_written(held: Held) -> None:
    held.holds(1000.0, 0)
    held.time.write()
    held.time.record_request()
    held.time.write()
    assert held.told is None


def test_a_lake_that_refuses_is_a_problem_of_the_background(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LakePath, content: bytes) -> Callable[[], None]:
        raise StoreError("the quota is exhausted", kind="quota")

    monkeypatch.setattr(LakePath, "replace", refuse)
    held.time.record_request()
    held.holds(1000.0, 2)
    held.holds(1030.0, 2)
    held.background.flush(HANG_SECONDS)
    (problem,) = held.background.problems()
    assert problem.endswith(": the quota is exhausted")


def test_a_lake_that_refuses_for_hours_is_one_problem(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the draft is in the reason, so that no two are the same."""
    refused = []

    def refuse(self: LakePath, content: bytes) -> None:
        refused.append(self)
        raise StoreError(f"draft {len(refused)}: the quota is exhausted", kind="quota")

    monkeypatch.setattr(LakePath, "replace", refuse)
    held.time.record_request()
    for minute in range(5):
        held.holds(1000.0 + 60 * minute, 2)
        held.background.flush(HANG_SECONDS)
    assert len(refused) > 2
    assert len(held.background.problems()) == 1


def test_a_machine_without_threads_keeps_its_gang(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(key: str, work: Callable[[], None]) -> bool:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(held.background, "try_put", refuse)
    held.time.record_request()
    held.holds(1000.0, 2)
    held.holds(1030.0, 2)
    monkeypatch.undo()
    held.time.write()
    assert held.told is not None
