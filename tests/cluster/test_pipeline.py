"""The pipeline on the lake as a person runs it: whole, and a step as an orchestrator's task."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bounds import HANG_SECONDS
from tests.contract.framework_ranks import EXAMPLES

# First as the script that it is; then as an orchestrator's worker, where the file is imported, and
# its function called for each task.
TASKS = """
import runpy, sys
from unittest import mock

from pyspark.sql import SparkSession

examples, lake, picture, nothing = sys.argv[1:]
script = f"{examples}/lake_pipeline.py"
sys.argv[:] = [script, lake, "--picture", picture]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    print("ended with", end.code)
print("tasks", flush=True)

sys.path.insert(0, examples)  # not by PYTHONPATH, which Spark hands on to executors
import lake_pipeline

# The worker has one application for both tasks.
with mock.patch.object(SparkSession, "stop"):
    failed = lake_pipeline.main([nothing, "--step", "train"])
scored = lake_pipeline.main([lake, "--step", "compare", "--step", "score"])
print("codes", scored, failed)
"""


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@pytest.mark.soak
def test_from_raw_files_to_a_scored_table(
    cluster_env: dict[str, str], hdfs_url: str, tmp_path: Path, gpus_back: Callable[[], int]
) -> None:
    root, picture = f"{hdfs_url}/tmp/wines", tmp_path / "gpus.png"
    nothing = f"{hdfs_url}/tmp/no-wines"
    ran = run(cluster_env, "-c", TASKS, str(EXAMPLES), root, str(picture), nothing)
    whole, _, tasks = ran.stdout.partition("tasks\n")
    assert "ended with 0" in whole, ran.stderr
    assert "clean: 178 of 218 rows" in whole
    assert re.search(r"^compare: candidate \d+: \d\.\d{3} \(", whole, re.M)
    assert re.search(r"^promote: version \d+ is in production", whole, re.M)
    scored = re.search(r"score: version \d+: (\d+) of 178 right", whole)
    assert scored is not None and int(scored[1]) > 160
    assert re.search(
        r"^GPUs in use: (0 to )?2 in train, (0 to )?[12] in score, 0 outside$", whole, re.M
    ), whole
    executors = re.search(r"^CPU executors: .*, 0 to (\d+) outside$", whole, re.M)
    assert executors is not None, whole + ran.stderr
    assert int(executors[1]) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")

    assert "codes 0 1" in tasks, ran.stderr
    assert scored[0] in tasks  # a step that is repeated says the same
    assert re.search(r"^compare: candidate \d+: (\d\.\d{3}), production \d+: \1 ", tasks, re.M)
    assert re.search(r"^\w+: .*/tmp/no-wines/features", ran.stderr, re.M)
