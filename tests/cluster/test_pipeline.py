"""The pipeline on the lake as a person runs it: whole, and a step as an orchestrator's task."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.framework_ranks import EXAMPLES

SECONDS = 240


def run(cluster_env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / "lake_pipeline.py", *arguments],
        env=cluster_env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.timeout(600)  # two applications, one after the other
def test_from_raw_files_to_a_scored_table(
    cluster_env: dict[str, str], hdfs_url: str, tmp_path: Path, gpus_back: Callable[[], int]
) -> None:
    picture = tmp_path / "gpus.png"
    ran = run(cluster_env, f"{hdfs_url}/tmp/wines", "--picture", str(picture))
    assert ran.returncode == 0, ran.stderr
    assert "GPUs in use: at most 2; outside of the training at most 0" in ran.stdout
    assert "clean: 178 of 218 rows" in ran.stdout
    scored = re.search(r"score: version \d+: (\d+) of 178 right", ran.stdout)
    assert scored is not None and int(scored[1]) > 170
    assert picture.read_bytes().startswith(b"\x89PNG")

    failed = run(cluster_env, f"{hdfs_url}/tmp/no-wines", "--step", "train")
    assert failed.returncode == 1
    assert re.search(r"^\w+Error: .*/tmp/no-wines/features", failed.stderr, re.MULTILINE)
