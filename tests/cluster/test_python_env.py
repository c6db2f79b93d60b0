"""Python environments in ranks on the real cluster: packages, and a whole one.

Packages are wheels made on the spot, so that pip needs no network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu.cluster_managers.manager import ClusterManager
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env import commands
from hopsgpu.storage.lake import LakePath
from tests.cluster.imported import what_is_imported
from tests.cluster.test_launch import quiet
from tests.travelling import PYTHON, make_wheel, whole_environment

pytestmark = pytest.mark.usefixtures("nothing_warmed")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two packages: one that the cluster's Python lacks, and another version of one that it has."""
    wheels = tmp_path_factory.mktemp("wheels")
    make_wheel(wheels, "travelled", "1.0", "VALUE = 'from the wheel'\n")
    make_wheel(wheels, "xxhash", "99.0", "__version__ = '99.0'\n")
    return ["--no-index", f"--find-links {wheels}", "travelled", "xxhash"]


@pytest.mark.soak
def test_packages_go_before_those_of_the_executors(
    spark: SparkSession,
    gpus_back: Callable[[], int],
    packages: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hopsgpu.hold(workers=3, python_env=packages, progress="off") as gang:
        for _ in range(2):
            values = gang.launch(what_is_imported).values
            assert [(v["value"], v["xxhash"]) for v in values] == [("from the wheel", "99.0")] * 3
    # Two ranks or more are on one node, and it is unpacked once there.
    assert len({v["file"] for v in values}) == len({v["host"] for v in values})
    # A second gang installs nothing.
    monkeypatch.setattr(commands, "run", lambda *_: pytest.fail("pip was run again"))
    result = quiet(what_is_imported, python_env=packages)
    assert result.value["xxhash"] == "99.0"
    root = hopsgpu.plan(what_is_imported).paths["root"]
    record = json.loads((LakePath(root) / "runs" / result.run_id / "run.json").read())
    assert record["python_env"]["name"] == "travelled, xxhash"
    assert LakePath(record["python_env"]["url"]).stat().size == record["python_env"]["bytes"]
    assert str(hopsgpu.plan(what_is_imported, python_env=packages)).count(
        "Python environment: travelled, xxhash"
    )


def test_what_cannot_be_installed_asks_for_no_gpu(
    spark: SparkSession, manager: ClusterManager, packages: list[str]
) -> None:
    asked_for = []
    with pytest.raises(ConfigError, match=r"(?s)pip install failed.*No matching distribution"):
        hopsgpu.launch(
            what_is_imported,
            python_env=[*packages, "nonsuch"],
            progress=lambda status: asked_for.append(status.state),
        )
    assert set(asked_for) == {"preparing", "failed"}


def test_ranks_run_in_a_whole_environment(
    spark: SparkSession, gpus_back: Callable[[], int], tmp_path: Path
) -> None:
    modules = {"travelled": "VALUE = 'from the whole'\n", "xxhash": "__version__ = 'none'\n"}
    whole = whole_environment(tmp_path, modules)
    result = quiet(what_is_imported, python_env=str(whole))
    for value in result.values:
        assert value["value"] == "from the whole"
        assert Path(value["executable"]).name == PYTHON
        assert Path(value["executable"]).parents[1] == Path(value["file"]).parents[3]
    assert not [text for text in result.warnings if "not forked" in text]


def test_another_python_on_the_executors_is_said(
    spark: SparkSession, gpus_back: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Spark has every task compare.
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.6")
    words = rf"the executors' Python is 3\.{sys.version_info[1]}, but the driver's is 3\.6"
    with pytest.raises(ConfigError, match=words):
        quiet(int, workers=1)
