"""The class-data archive that the tests' `up` makes is the one that a YARN container's JVM maps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.devcluster.class_archive import archive_of
from hopsgpu.devcluster.daemons import members
from tests.conftest import until

pytestmark = pytest.mark.usefixtures("nothing_warmed")


def maps_of_executors(cluster_dir: Path) -> list[str]:
    """What the executors' JVMs have mapped."""
    found = []
    for process in members(cluster_dir):
        entry = Path(f"/proc/{process.pid}")
        with suppress(OSError):  # it has ended meanwhile
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"org.apache.spark.executor.YarnCoarseGrainedExecutorBackend" in words:
                found.append((entry / "maps").read_text())
    return found


def test_a_new_executor_maps_it(
    spark: SparkSession,
    cluster_dir: Path,
    cluster_env: dict[str, str],
    gpus_back: Callable[[], int],
) -> None:
    archive = archive_of(Path(cluster_env["JAVA_HOME"]), Path(cluster_env["SPARK_HOME"]))
    if archive is None:
        # None is made for another JDK, and its JVMs start without.
        assert 'JAVA_VERSION="17' not in (Path(cluster_env["JAVA_HOME"]) / "release").read_text()
        return
    # An `up` of another cluster may be at it, for which this cluster's did not wait.
    assert until(archive.file.exists, step=1)
    with hopsgpu.hold(workers=1, progress="off"):
        maps = maps_of_executors(cluster_dir)
    assert any(str(archive.file) in text for text in maps), len(maps)
