"""What queues and users may have, of both schedulers, each on a cluster of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hopsgpu import devcluster
from tests.bounds import HANG_SECONDS

QUEUE = "yarn.scheduler.capacity.root"
CAPACITY: Mapping[str, Any] = {
    "capacity-scheduler": {
        f"{QUEUE}.queues": "default,half,mine,shut",
        f"{QUEUE}.default.capacity": 0,
        # Half of 4 GPUs, and not more when others idle.
        f"{QUEUE}.half.capacity": 50,
        f"{QUEUE}.half.maximum-capacity": 50,
        f"{QUEUE}.half.user-limit-factor": 10,
        # All of them, but one user may have half; YARN lets a user exceed it by one container.
        f"{QUEUE}.mine.capacity": 50,
        f"{QUEUE}.mine.maximum-capacity": 100,
        f"{QUEUE}.mine.user-limit-factor": 1,
        f"{QUEUE}.shut.capacity": 0,
        f"{QUEUE}.shut.state": "STOPPED",
    }
}
FAIR: Mapping[str, Any] = {
    "yarn-site": {
        "yarn.resourcemanager.scheduler.class": "org.apache.hadoop.yarn.server.resourcemanager"
        ".scheduler.fair.FairScheduler"
    },
    "fair-scheduler": """<?xml version="1.0"?>
        <allocations>
          <queue name="half">
            <maxResources>memory-mb=28672,vcores=12,yarn.io/gpu=2</maxResources>
          </queue>
          <queue name="mine"/>
        </allocations>""",
}
# Tries in one application for each queue, so that a cluster serves several cases in a minute.
SCRIPT = """
    import os, sys, time
    import hopsgpu

    queue, *tries = sys.argv[1:]
    try:
        hopsgpu.session("queues", conf={"spark.yarn.queue": queue})
    except hopsgpu.HopsGpuError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    for workers in map(int, tries):
        began = time.monotonic()
        try:
            value = hopsgpu.launch(os.getpid, workers=workers, progress="off").values
            print(workers, "got", len(value))
        except hopsgpu.CapacityError as error:
            print(workers, "refused", time.monotonic() - began < 30, error)
"""


def tried(env: Mapping[str, str], queue: str, *workers: int) -> str:
    """What the application printed; where that is not all it had to, what it ended with too."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), queue, *map(str, workers)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    whole = len(ran.stdout.splitlines()) == len(workers) > 0
    return ran.stdout if whole else f"{ran.stdout}{ran.stderr}(it ended with {ran.returncode})"


# Four applications, one after the other.
@pytest.mark.parametrize("conf", [CAPACITY, FAIR], ids=["capacity", "fair"])
def test_what_the_queue_can_never_give_is_refused_and_the_rest_is_had(
    tmp_path: Path, conf: Mapping[str, Any]
) -> None:
    try:
        devcluster.up(tmp_path, conf=conf)
        env = devcluster.environment(tmp_path)
        half = tried(env, "half", 3, 2)
        assert "3 refused True 3 executors" in half
        assert "queue root.half may have at most 2 GPUs" in half
        assert "2 got 2" in half
        if conf is CAPACITY:
            mine = tried(env, "mine", 4, 3)
            assert "4 refused True 4 executors" in mine
            assert "user" in mine and "root.mine" in mine
            assert "3 got 3" in mine
            assert "CapacityError: queue root.shut is STOPPED" in tried(env, "shut")
            assert "root.half, root.mine" in tried(env, "nowhere")
        else:
            assert "4 got 4" in tried(env, "mine", 4)
    finally:
        devcluster.down(tmp_path)
