"""Run records and logs on the lake while a run goes on; test_killed_driver.py has what stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.artifacts.run_logs import RankLog, log_sizes
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cli.main import main
from tests.bounds import HANG_SECONDS
from tests.conftest import until
from tests.in_ranks import counts


def call(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def shown(run_id: str) -> dict[str, Any]:
    return dict(json.loads(call("runs", "show", run_id, "--json").output))


def steps_of(run_id: str) -> int:
    """How many ranks have reported a step, by the record."""
    return sum(1 for metrics in shown(run_id)["metrics"] if metrics.get("step", 0) > 0)


@pytest.fixture
def store(spark: SparkSession) -> RunStore:
    # As `hopsgpu runs` finds it, without Spark.
    assert call("runs", "--limit", "1").exit_code == 0
    return RunStore(hopsgpu.plan(os.getpid).paths["root"])


def test_a_run_is_read_while_it_goes_on_and_cancelled_from_outside(
    store: RunStore, gpus_back: Callable[[], int]
) -> None:
    run = hopsgpu.submit(counts, args=(300,), workers=2, placement="pack", progress="off")
    try:
        directory = store.directory(run.run_id)
        assert until(lambda: run.status().state == "running")
        command = [
            sys.executable,
            "-m",
            "hopsgpu.cli.main",
            "logs",
            run.run_id,
            "--follow",
            "--json",
        ]
        follower = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert until(lambda: set(log_sizes(directory)) == {RankLog(0, 0), RankLog(0, 1)})
        before = log_sizes(directory)
        assert until(lambda: all(log_sizes(directory)[log] > n for log, n in before.items()))
        assert until(lambda: steps_of(run.run_id) >= 2)
        found = shown(run.run_id)
        assert (found["state"], found["error"]) == ("running", None)
        assert {rank["host"] for rank in found["ranks"]} <= {"node1", "node2"}
        assert [(rank["rank"], rank["ended"]) for rank in found["ranks"]] == [
            (0, False),
            (1, False),
        ]
        environment = found["environment"]
        assert environment["packages"]["pyspark"] == environment["spark"]
        assert environment["hadoop"] and environment["driver"]["host"]
        (listed,) = (
            r for r in json.loads(call("runs", "--json").output) if r["run_id"] == run.run_id
        )
        assert (listed["state"], listed["workers"], listed["gpus"]) == ("running", 2, 2)
        result = call("runs", "cancel", run.run_id)
        assert result.output == f"{run.run_id} is cancelled\n"
        with pytest.raises(hopsgpu.Cancelled):
            run.result()
        out, err = follower.communicate(timeout=HANG_SECONDS)
        lines = [json.loads(line) for line in out.splitlines()]
        for rank in (0, 1):
            texts = [line["line"] for line in lines if line["rank"] == rank]
            assert texts == [f"line {step}" for step in range(len(texts))] and len(texts) > 20
        assert err == f"hopsgpu: {run.run_id}: cancelled\n"
        ended = shown(run.run_id)
        assert ended["state"] == "cancelled" and "was cancelled" in ended["error"]
        assert log_sizes(directory)[RankLog(0, 0)] == ended["logs"]["logs/rank-0.log"]
        assert "has ended already: cancelled" in call("runs", "cancel", run.run_id).stderr
    finally:
        run.cancel()
        run.wait(HANG_SECONDS)
