"""Records of runs for tests, in a local directory that stands for the lake."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.core.end_reason import EndReason
from hopsgpu.core.gang import GangState
from hopsgpu.core.gpu_use import UsePoint
from hopsgpu.core.run_record import (
    EnvironmentRecord,
    RankRecord,
    RunRecord,
    ScoreRecord,
    SearchRecord,
    fields_of,
)
from hopsgpu.core.run_values import GpuSeconds, Timeline
from hopsgpu.core.spec import ExecutorShape, GangSpec, LaunchPlan
from hopsgpu.display.progress import progress_of
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.recorder import Recording
from hopsgpu.runs.run_details import RunDetails
from hopsgpu.runs.status_board import GangBoard
from hopsgpu.storage.background import Background
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS

OLD, NEW = "fit-20261121-120000-aaaaaa", "fit-20261122-120000-bbbbbb"
ENVIRONMENT = EnvironmentRecord(
    hopsgpu="0.7",
    python="3.11.9",
    spark="4.0.1",
    hadoop="3.4.1",
    driver={"host": "laptop"},
    packages={"torch": "2.9"},
)


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
        self.board = GangBoard(run_id, executors, 1, progress_of("off"), self._clock)
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
        self._recording.put(state, reason=_REASONS.get(state))
        self._background.flush(HANG_SECONDS)
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


_REASONS = {
    "succeeded": EndReason.SUCCEEDED,
    "failed": EndReason.USER_ERROR,
    "cancelled": EndReason.CANCELLED,
}
SEARCH = SearchRecord(
    **{"trials_wanted": 5, "max_concurrent": 2, "min_concurrent": 1, "workers_per_trial": 1},
    **{"gpus_per_trial": 1, "max_failures": None, "direction": "minimize", "metric": "loss"},
    **{"sampler": "TPESampler", "pruner": "NopPruner", "seed": None, "space": {}},
    **{"best": None, "trials": ()},
)
SCORE = ScoreRecord(
    **{"output": "hdfs://lake/out", "is_complete": False, "kept_in": None, "model": None},
    **{"columns": None, "keep": (), "batch_size": 1024, "max_concurrent": 8},
    **{"gpus_per_worker": 1, "on_error": "raise", "rows": 0, "scored": 0, "parts": 0, "done": 0},
    **{"rate": None, "seconds_left": None, "failed_parts": ()},
)


DATA = {
    **{"url": "hdfs://lake/x", "written": True, "kept": False, "rows": 7, "bytes": 2048},
    **{"files": 1, "schema": {"x": "double"}, "more_columns": 0, "remainder": "drop", "seed": 0},
}


def record_of(
    run_id: str, state: str = "succeeded", now: float = 1000.0, **changes: Any
) -> RunRecord:
    """A record of a run of two ranks.

    Args:
        run_id: the run's id.
        state: a GangState's value.
        now: when it was written, 75 s after the request.
        changes: to the record's fields.
    """
    record = RunRecord(
        run_id=run_id,
        name="fit",
        user="alice",
        application="application_1_0001",
        state=state,
        attempt=0,
        error=None,
        reason=_REASONS.get(state),
        updated=now,
        timeline=Timeline(requested=now - 75.0, granted=now - 60.0),
        gpu_seconds=GpuSeconds(held=120.0, training=100.0, idle=20.0),
        use=(UsePoint(now - 75.0), UsePoint(now, 120.0, 100.0, 0.0, 30.0)),
        spec=GangSpec("fit", workers=2),
        queue="default",
        executors=2,
        executor=ExecutorShape(1, 1, 512, 4608),
        ranks=(
            RankRecord(
                0, "worker", "node1", ("GPU-1",), 71, 0, None, 3 * 2**30, 0.875, False, True
            ),
            RankRecord(1, "worker", "node2", ("GPU-2",), 72),
        ),
        metrics=({"step": 9, "loss": 0.123456, "gpu.0.power": 300.0}, {}),
        environment=ENVIRONMENT,
    )
    return replace(record, **changes)


def put_run(root: Path, run_id: str, state: str = "succeeded", /, **changes: Any) -> Path:
    """Writes a run of two ranks as its driver would; returns its directory.

    Args:
        root: of runs and models.
        run_id: the run's id, and its directory's name.
        state: a GangState's value.
        changes: to the JSON of the record; those of objects are merged into the objects. "updated"
            may be negative, for so many seconds ago.
    """
    now = time.time()
    record = record_of(run_id, state, now)
    if "search" in changes:
        record = replace(record, search=SEARCH)
    if "score" in changes:
        record = replace(record, score=SCORE)
    fields = fields_of(record)
    for key, change in changes.items():
        before = fields.get(key)
        both = isinstance(before, dict) and isinstance(change, dict)
        fields[key] = {**before, **change} if both else change
    if isinstance(fields["updated"], float) and fields["updated"] < 0:
        fields["updated"] += now
    directory = root / "runs" / run_id
    (directory / "logs").mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps(fields))
    return directory


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of commands, which find no settings of Spark."""
    monkeypatch.setenv("HOPSGPU_ROOT", f"file://{tmp_path}")
    for name in ("SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path
