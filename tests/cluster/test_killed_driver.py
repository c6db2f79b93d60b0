"""What a driver leaves that is killed with its JVM: a run, a search, and a model half published."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import optuna
import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.artifacts import stale_uploads
from hopsgpu.artifacts.checkpoints import Checkpoints, complete_shards
from hopsgpu.artifacts.models import ModelStore
from hopsgpu.artifacts.run_logs import RankLog, log_sizes
from hopsgpu.artifacts.runs import RunStore
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.cluster.test_records import call, steps_of
from tests.conftest import gone, gpus_become, until
from tests.in_ranks import leave, pauses_half_done

pytestmark = pytest.mark.soak

DAY = 24 * 3600 * 1000
MODEL = [("zero", b"0", 3), ("one", b"1", 3)]
quiet = functools.partial(hopsgpu.launch, progress="off")

# It kills itself when the model is uploaded and claimed and the manifest is written, but the
# version is not there yet.
DRIVER = """
import os, signal, sys, threading
import hopsgpu
from hopsgpu.storage.lake import LakePath
from tests.cluster.test_killed_driver import MODEL, search
from tests.in_ranks import counts, leave

rename = LakePath.rename

def killed(source, target):
    if target.url.endswith("/models/net/1"):
        os.killpg(0, signal.SIGKILL)  # its JVM as well: nothing is tidied up
    return rename(source, target)

LakePath.rename = killed
hopsgpu.session("killed")
hopsgpu.submit(counts, args=(600,), name="counts", cores_per_worker=1, progress="off")
threading.Thread(target=search, args=(sys.argv[1],), daemon=True).start()
sys.stdin.readline()
hopsgpu.launch(leave, args=MODEL, workers=2, model="net", progress="off")
"""


def search(directory: str) -> hopsgpu.types.SearchResult:
    """Of the name that resumes it; its trials note in a directory that they were started."""
    return hopsgpu.search(
        pauses_half_done,
        {"x": optuna.distributions.FloatDistribution(0, 1)},
        trials=5,
        max_concurrent=1,
        cores_per_worker=1,
        memory_per_worker="1g",
        name="resumed",
        seed=1,
        kwargs={"directory": directory},
        progress="off",
    )


class Killed(NamedTuple):
    """A driver that was killed.

    Attributes:
        run_id: of its run.
        trials: notes of the trials of its search, which were started.
    """

    run_id: str
    trials: Path


@pytest.fixture(scope="module")
def root(hdfs_url: str) -> Iterator[LakePath]:
    """A root of these tests' own on the lake."""
    lake = LakePath(f"{hdfs_url}/tmp/killed-{uuid.uuid4().hex}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOPSGPU_ROOT", lake.url)
        yield lake
    lake.remove()


@pytest.fixture(scope="module")
def killed(
    manager: ClusterManager, root: LakePath, tmp_path_factory: pytest.TempPathFactory
) -> Killed:
    """It had a run and a search, and was about to have published a model; its GPUs are back."""
    before, store = manager.gpus()[0], RunStore(root.url)
    script = tmp_path_factory.mktemp("driver") / "driver.py"
    script.write_text(DRIVER)
    trials = tmp_path_factory.mktemp("trials")
    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    driver = subprocess.Popen(
        [sys.executable, str(script), str(trials)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        found: list[str] = []

        def has_logs() -> bool:
            found[:] = [run_id for run_id in store.ids() if run_id.startswith("counts")]
            sizes = log_sizes(store.directory(found[0])) if found else {}
            return driver.poll() is not None or sizes.get(RankLog(0, 0), 0) > 0

        assert until(has_logs) and driver.poll() is None
        assert until(lambda: steps_of(found[0]) == 1)
        assert until(lambda: len(list(trials.iterdir())) == 3), list(trials.iterdir())
        there = Checkpoints(store.directory("resumed") / "trials" / "2" / "checkpoints", rank=0)
        assert until(lambda: bool(complete_shards(there.shards(), there.announced_ranks())))
        assert driver.stdin is not None
        driver.stdin.write("\n")
        driver.stdin.close()
        assert driver.wait(HANG_SECONDS) == -signal.SIGKILL
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    application = store.record(found[0]).application
    assert until(lambda: manager.end_of(application))
    assert gpus_become(manager, before, HANG_SECONDS)
    return Killed(found[0], trials)


def test_its_run_has_a_record_and_logs_and_counts_as_lost(
    killed: Killed, root: LakePath, is_kubernetes: bool
) -> None:
    record = RunStore(root.url).record(killed.run_id)
    assert record.state == "running" and record.ranks[0].pid > 0
    # A pod counts its processes itself, and no pod is left.
    assert is_kubernetes or until(lambda: all(gone(rank.pid) for rank in record.ranks))
    assert record.state_at(record.updated + 61) == "lost"
    # YARN says so before the record is that old.
    assert until(lambda: "lost" in call("runs", "show", killed.run_id).output.split())
    assert f"state of {record.application}: " in call("runs", "show", killed.run_id).output
    output = call("logs", killed.run_id, "--rank", "0").output
    lines = output.splitlines()
    assert lines[:3] == ["line 0", "line 1", "line 2"]


def test_its_search_resumes_and_loses_no_trial_that_has_ended(
    spark: SparkSession, gpus_back: Callable[[], int], killed: Killed
) -> None:
    result = search(str(killed.trials))
    assert [trial.state for trial in result.trials] == ["complete"] * 5
    assert result.trials[2].tries == 2
    started = [file.name.partition("-")[0] for file in killed.trials.iterdir()]
    assert sorted(started) == ["0", "1", "2", "2", "3", "4"]


def test_its_publication_leaves_no_version_and_the_next_launch_publishes(
    spark: SparkSession, gpus_back: Callable[[], int], killed: Killed, root: LakePath
) -> None:
    store, home = ModelStore(f"{root.url}/models"), root / "models" / "net"
    assert store.versions("net") == () and store.list() == ()
    assert home.names() == ("_claims", "_staging")
    (dead,) = (home / "_staging").names()
    assert (home / "_claims").names() == ("1",)
    version = quiet(leave, args=MODEL, workers=2, placement="pack", model="net").model
    assert version is not None and version.version == 2
    version.verify()
    assert sorted(version.files) == ["one", "zero"]
    assert store.versions("net") == (version,) and store.get("net") == version
    now = home.stat().modified
    assert stale_uploads.sweep(home, now) == []
    assert stale_uploads.sweep(home, now + 2 * DAY) == [dead]
