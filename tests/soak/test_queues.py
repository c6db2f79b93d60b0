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
# One driver has an application for each queue, and tries in each, so that a cluster serves several
# cases in a minute.
SCRIPT = """
    import os, sys, time
    import hopsgpu

    for case in sys.argv[1:]:
        queue, *tries = case.split(":")
        try:
            spark = hopsgpu.session("queues", conf={"spark.yarn.queue": queue})
        except hopsgpu.HopsGpuError as error:
            print(queue, f"{type(error).__name__}: {error}", flush=True)
            continue
        for workers in map(int, tries):
            began = time.monotonic()
            try:
                value = hopsgpu.launch(os.getpid, workers=workers, progress="off").values
                print(queue, workers, "got", len(value), flush=True)
            except hopsgpu.CapacityError as error:
                soon = time.monotonic() - began < 30
                print(queue, workers, "refused", soon, error, flush=True)
        spark.stop()
"""


def tried(env: Mapping[str, str], *cases: str) -> dict[str, str]:
    """What each queue's application printed: of queues, and what is tried there."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *cases],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = ran.stdout.splitlines()
    queues = [case.partition(":")[0] for case in cases]
    return {
        queue: "\n".join(line for line in said if line.startswith(f"{queue} ")) for queue in queues
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("conf", [CAPACITY, FAIR], ids=["capacity", "fair"])
def test_what_the_queue_can_never_give_is_refused_and_the_rest_is_had(
    tmp_path: Path, conf: Mapping[str, Any]
) -> None:
    devcluster.up(tmp_path, conf=conf)
    try:
        env = devcluster.environment(tmp_path)
        if conf is CAPACITY:
            told = tried(env, "half:3:2", "mine:4:3", "shut", "nowhere")
            assert "mine 4 refused True 4 executors" in told["mine"]
            assert "user" in told["mine"] and "root.mine" in told["mine"]
            assert "mine 3 got 3" in told["mine"]
            assert "CapacityError: queue root.shut is STOPPED" in told["shut"]
            assert "root.half, root.mine" in told["nowhere"]
        else:
            told = tried(env, "half:3:2", "mine:4")
            assert "mine 4 got 4" in told["mine"]
        assert "half 3 refused True 3 executors" in told["half"]
        assert "queue root.half may have at most 2 GPUs" in told["half"]
        assert "half 2 got 2" in told["half"]
    finally:
        devcluster.down(tmp_path)
