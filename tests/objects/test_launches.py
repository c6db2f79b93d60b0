"""Launches whose runs, logs, checkpoints and models are on an object store: local and on YARN."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from hopsgpu.artifacts.models import ModelStore
from hopsgpu.cli.main import main
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.storage.hadoop_conf import HadoopConf
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.conftest import gpus_become
from tests.objects.emulators import Emulator

DRIVER = Path(__file__).with_name("launches_driver.py")
ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_HOME", "SPARK_CONF_DIR")


def nowhere(emulator: Emulator) -> str:
    """A root in a bucket that does not exist."""
    return f"{emulator.url('no-such-bucket')}/root"


def root_of(bucket: str, master: str) -> str:
    return f"{bucket}/root-{master}"


@pytest.fixture(scope="module", params=["local", "yarn"])
def master(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def told(
    master: str,
    emulator: Emulator,
    bucket: str,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[str, dict[str, Any]]:
    """What the script told, by step."""
    table = io.BytesIO()
    parquet.write_table(pa.table({"x": list(range(100))}), table)
    LakePath(f"{bucket}/table/part-0.parquet").write(table.getvalue())
    directory = tmp_path_factory.mktemp("launches")
    if master == "yarn":
        env = dict(request.getfixturevalue("cluster_env"))
    else:
        env = {name: value for name, value in os.environ.items() if name not in OTHERS}
    env |= {"HOPSGPU_ROOT": root_of(bucket, master), "PYTHONPATH": os.pathsep.join(sys.path)}
    gpus = "1" if master == "yarn" else "0"
    ran = subprocess.run(
        [sys.executable, str(DRIVER), bucket, nowhere(emulator), gpus],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("TOLD ")]
    steps = [json.loads(line.removeprefix("TOLD ")) for line in lines]
    assert ran.returncode == 0, ran.stderr[-3000:]
    if master == "yarn":
        assert gpus_become(ResourceManager(web_addresses(HadoopConf.load(env).get)), 0)
    return {step.pop("step"): step for step in steps}


@pytest.fixture
def root(bucket: str, master: str) -> LakePath:
    return LakePath(root_of(bucket, master))


def test_a_failed_run_is_resumed_from_its_checkpoints(told: Any, root: LakePath) -> None:
    assert "ValueError: as planned" in told["failed"]["error"]
    failed, resumed = (root / "runs" / told[step]["run"] for step in ("failed", "resumed"))
    assert told["resumed"]["values"] == [[50, f"rank {rank} step 2"] for rank in (0, 1)]
    assert (failed / "checkpoints").names() == ("0", "1", "2", "_ranks")
    assert (failed / "logs" / "rank-1.log").read().startswith(b"step 0\nstep 1\nstep 2\n")
    assert (resumed / "logs" / "rank-0.log").read() == b"step 0\n"
    version = ModelStore((root / "models").url).get("net")
    assert version.url == told["resumed"]["model"]
    assert set(version.manifest["files"]) == {"part-0", "part-1"}
    version.verify()


def test_the_command_line_shows_them(told: Any, root: LakePath) -> None:
    def shown(*arguments: str) -> str:
        done = CliRunner().invoke(main, [*arguments, "--root", root.url])
        assert done.exit_code == 0, done.output
        return done.stdout

    run = told["failed"]["run"]
    listed = {line.split()[0]: line.split()[1] for line in shown("runs").splitlines()[1:]}
    assert listed == {run: "failed", told["resumed"]["run"]: "succeeded"} | {
        told["searched"]["run"]: "succeeded"
    }
    assert "as planned" in shown("runs", "show", run)
    assert "[rank 0" in shown("logs", run)
    shown("runs", "prune", "--keep", "0")
    assert (root / "runs").names() == ()


def test_the_journal_of_a_search_is_whole(told: Any) -> None:
    assert told["searched"]["trials"] == 4


def test_what_cannot_be_there_is_refused_with_words(told: Any) -> None:
    assert told["frame"]["error"].startswith("data is a DataFrame, which Spark would write below")
    assert "the outputs of scores must be on HDFS (hdfs://)" in told["score"]["error"]


@pytest.mark.parametrize("kind", ["launch", "search"])
def test_a_bucket_that_is_not_there_is_told_before_executors_are_asked_for(
    told: Any, emulator: Emulator, kind: str
) -> None:
    """By the driver: a directory of an object store is there with its first file."""
    step = told[f"{kind} without a bucket"]
    assert step["error"].startswith(f"cannot create {nowhere(emulator)}/runs/")
    assert step["kind"] == "absent"


def test_no_object_has_the_credentials(told: Any, root: LakePath, emulator: Emulator) -> None:
    secret = (emulator.secret or emulator.variables[emulator.address]).encode()

    def files(place: LakePath) -> list[LakePath]:
        entries = place.entries()
        below = [file for e in entries if e.is_directory for file in files(place / e.name)]
        return below + [place / e.name for e in entries if not e.is_directory]

    there = files(root)
    assert there
    assert not [file.url for file in there if secret in file.read()]
