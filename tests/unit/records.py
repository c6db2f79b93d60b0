"""Records of runs for tests, in a local directory that stands for the lake."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hopsgpu.core.gang import GangState
from hopsgpu.core.run_values import GpuSeconds, RankReport, Timeline
from hopsgpu.core.spec import ExecutorShape, GangSpec, LaunchPlan
from hopsgpu.display.progress import progress_of
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.gang_result import GangResult
from hopsgpu.runs.recorder import Recording
from hopsgpu.runs.run_record import RunDetails, RunSnapshot, content
from hopsgpu.runs.status_board import Board
from hopsgpu.storage.background import Background
from hopsgpu.storage.lake import LakePath

ENVIRONMENT = {
    "hopsgpu": "0.7",
    "python": "3.11.9",
    "spark": "4.0.1",
    "hadoop": "3.4.1",
    "driver": {"host": "laptop"},
    "packages": {"torch": "2.9"},
}


class RecordedRun:
    """A run whose record the project's own recorder writes, by a clock that a test sets.

    Args:
        root: of runs and models.
        run_id: the run's id.
        began: when it is requested, in seconds since the epoch.
        executors: how many it has, with one GPU each.
        user: who submits it.
        queue: YARN's queue.
    """

    def __init__(
        self,
        root: LakePath,
        run_id: str,
        began: float,
        executors: int = 2,
        user: str = "alice",
        queue: str = "default",
    ) -> None:
        self.now = began
        self.board = Board(run_id, executors, 1, progress_of("off"), self._clock)
        shape = ExecutorShape(1, 1, 512, 4608)
        spec = GangSpec(run_id.partition("-")[0], workers=executors)
        paths = {"root": root.url, "run": f"{root.url}/runs/{run_id}"}
        plan = LaunchPlan(spec, executors, 1, shape, queue, {}, paths)
        site: Any = SimpleNamespace(id="application_1", user=user, versions={})
        self._background = Background("records")
        active = ActiveRun(plan, site, self.board, threading.Event(), self._background)
        self._recording = Recording(active, RunDetails, self._clock)
        active.directory().make()
        self.put("requested")

    def _clock(self) -> float:
        return self.now

    def put(self, state: str) -> None:
        """Has the record written, and waits for that."""
        self._recording.put(state)
        self._background.flush(60.0)
        assert self._background.problems() == ()

    def goes(self, at: float, state: GangState) -> None:
        """Takes the run to a state; the record tells of both its end and its begin."""
        self.now = at
        self.board.state(state)
        self.put(state.value)

    def trains(self, granted: float, started: float) -> None:
        """Takes the run from the request until the function runs."""
        self.goes(self.now, GangState.WAITING)
        self.now = granted
        self.board.on_executors_arrived([granted] * self.board.status().wanted)
        self.board.mark("granted")
        for state in (GangState.GRANTED, GangState.READY, GangState.STARTING):
            self.goes(granted, state)
        self.now = started
        self.board.mark("started")
        self.goes(started, GangState.RUNNING)

    def ends(self, returned: float, uploaded: float, released: float, state: GangState) -> None:
        """Takes a run that trains to its end."""
        self.now = returned
        self.board.mark("returned")
        self.goes(returned, GangState.PUBLISHING)
        self.goes(uploaded, GangState.RELEASING)
        self.now = released
        self.board.mark("released")
        self.goes(released, state)


def put_run(root: Path, name: str, state: str = "succeeded", **changes: Any) -> Path:
    """Writes a run of two ranks as its driver would; returns its directory.

    Args:
        root: of runs and models.
        name: the run's id, and its directory's.
        state: a GangState's value.
        changes: to the record's fields; "updated" may be negative, for so many seconds ago.
    """
    now = time.time()
    spec = GangSpec("fit", workers=2)
    plan = LaunchPlan(spec, 2, 1, ExecutorShape(1, 1, 512, 4608), "default", {}, {})
    result = GangResult(
        name,
        metrics=({"step": 9, "loss": 0.123456, "gpu.0.power": 300.0}, {}),
        timeline=Timeline(requested=now - 75.0, granted=now - 60.0),
        gpu_seconds=GpuSeconds(held=120.0, training=100.0, idle=20.0),
    )
    standing = RunSnapshot(
        plan,
        result,
        application="application_1_0001",
        user="alice",
        state=state,
        attempt=0,
        updated=now,
        ranks=(
            (RankReport(0, "worker", "node1", ("GPU-1",), 71, 0, None, 3 * 2**30, 0.875), True),
            (RankReport(1, "worker", "node2", ("GPU-2",), 72), False),
        ),
    )
    record = json.loads(content(standing, ENVIRONMENT)) | changes
    if isinstance(record["updated"], float) and record["updated"] < 0:
        record["updated"] += now
    directory = root / "runs" / name
    (directory / "logs").mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps(record))
    return directory
