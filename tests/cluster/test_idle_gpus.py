"""What GPUs did while they were held, on a real cluster; a stand-in for NVML has the utilisation.

The script is an application of its own, since executors have the stand-in from its PYTHONPATH,
which Spark hands on.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.core.run_record import fields_of
from hopsgpu.storage.lake import LakePath
from tests import idle_runs, nvml_standin
from tests.conftest import gpus_become


@pytest.fixture
def root(hdfs_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LakePath]:
    """A root of the test's own on the lake."""
    lake = LakePath(f"{hdfs_url}/tmp/idle-{uuid.uuid4().hex}")
    monkeypatch.setenv("HOPSGPU_ROOT", lake.url)
    yield lake
    lake.remove()


@pytest.mark.soak
def test_what_gpus_were_lost_to_is_named_and_idle_ones_are_ended(
    manager: ClusterManager, root: LakePath, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    nvml = nvml_standin.install(tmp_path / "nvml")
    told = idle_runs.told_by_script(nvml, os.environ)
    assert gpus_become(manager, 0)
    store = RunStore(root.url)

    def records(run: str) -> Mapping[str, Any]:
        return fields_of(store.record(run))

    idle_runs.check_slow_feed(told, records)
    idle_runs.check_checkpoints(told, records)
    idle_runs.check_unused(told, records)
    idle_runs.check_ended(told, records)
    idle_runs.check_trial(told)
    idle_runs.check_unknown(told, records)


def idles(seconds: float) -> str:
    time.sleep(seconds)
    return "returned"


@pytest.mark.soak
def test_simulated_gpus_neither_warn_nor_end_a_run(
    spark: SparkSession, gpus_back: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The development cluster's own nvidia-smi says 0 %, and NVML knows none of its GPUs."""
    monkeypatch.setenv("HOPSGPU_IDLE_WARNING", "1s")
    result = hopsgpu.launch(idles, args=(8.0,), workers=2, gpu_idle_timeout="2s", progress="off")
    assert result.values == ("returned", "returned")
    assert not [text for text in result.warnings if "idled" in text]
    assert result.gpu_seconds.unused == 0.0
    assert {rank.gpu_utilisation for rank in result.ranks} == {None}
    assert sum(result.gpu_seconds.kinds().values()) == pytest.approx(result.gpu_seconds.held)
