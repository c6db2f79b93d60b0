"""Records of runs for tests, in a local directory that stands for the lake."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hopsgpu.core.run_values import GpuSeconds, RankReport, Timeline
from hopsgpu.core.spec import ExecutorShape, GangSpec, LaunchPlan
from hopsgpu.launcher.gang_result import GangResult
from hopsgpu.launcher.run_record import RunSnapshot, content

ENVIRONMENT = {
    "hopsgpu": "0.7",
    "python": "3.11.9",
    "spark": "4.0.1",
    "hadoop": "3.4.1",
    "driver": {"host": "laptop"},
    "packages": {"torch": "2.9"},
}


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
