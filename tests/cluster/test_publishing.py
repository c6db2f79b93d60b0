"""What a launch leaves: models of all ranks, and who holds GPUs while they are uploaded."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import hopsgpu
from hopsgpu import devcluster
from hopsgpu.artifacts import publication
from hopsgpu.artifacts.checkpoints import Checkpoints
from hopsgpu.artifacts.models import ModelVersion
from hopsgpu.cluster_managers.yarn.manager import YarnManager
from hopsgpu.devcluster.layout import DATANODE
from hopsgpu.linux import comm
from hopsgpu.runs.run import Run
from hopsgpu.storage.lake import LakePath
from tests.conftest import gone, until
from tests.in_ranks import (
    go_on,
    leave,
    leave_a_signed_pickle,
    leave_when_told,
    save_and_leave_when_told,
)
from tests.processes import family

pytestmark = pytest.mark.usefixtures("nothing_warmed")
quiet = functools.partial(hopsgpu.launch, progress="off")
MIB = 2**20

# The containers of a gang are those of a priority.
pytestmark = pytest.mark.yarn


@pytest.fixture(autouse=True)
def root(hdfs_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LakePath]:
    """A root of each test's own on the lake."""
    lake = LakePath(f"{hdfs_url}/tmp/publishing-{uuid.uuid4().hex}")
    monkeypatch.setenv("HOPSGPU_ROOT", lake.url)
    yield lake
    lake.remove()


def gang_containers(manager: YarnManager, application: str) -> set[str]:
    """An application's containers but those under the default profile, the master's and ETL's."""
    attempts = manager.resource_manager.ask(f"/ws/v1/cluster/apps/{application}/appattempts")
    attempt = attempts["appAttempts"]["appAttempt"][-1]["appAttemptId"]
    listed = manager.resource_manager.ask(
        f"/ws/v1/cluster/apps/{application}/appattempts/{attempt}/containers"
    )
    return {c["containerId"] for c in listed["container"] if int(c["priority"]) > 0}


class Watch(threading.Thread):
    """Looks again and again how many containers and GPUs a gang has once its upload has begun."""

    def __init__(self, run: Run, staging: LakePath, manager: YarnManager, application: str) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._staging = staging
        self._manager = manager
        self._application = application
        self.containers: list[int] = []
        self.gpus: list[int] = []
        self.granted: set[int] = set()
        self.start()

    def run(self) -> None:
        while not self._run.wait(0.02):
            status = self._run.status()
            # In this order: what is seen to upload has begun before the others are counted.
            if status.state == "publishing" and self._staging.names():
                there = gang_containers(self._manager, self._application)
                gpus = self._manager.gpus()[0]
                # Only then none of them was let go meanwhile.
                if self._run.status().state == "publishing":
                    self.containers.append(len(there))
                    self.gpus.append(gpus)
                    self.granted.add(status.granted)


def test_a_sharded_model_is_one_version_and_who_left_nothing_goes_before_the_upload(
    spark: SparkSession,
    manager: YarnManager,
    gpus_back: Callable[[], int],
    root: LakePath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit = publication.commit

    def commit_once_seen(*given: Any) -> ModelVersion:
        # The node tells a heartbeat later that it is rid of the third.
        until(lambda: watch.gpus[-1:] == [2])
        return commit(*given)

    monkeypatch.setattr(publication, "commit", commit_once_seen)
    application = spark.sparkContext.applicationId
    shards = [(f"shards/{n}.bin", bytes([n]) * MIB, 30) for n in range(2)]
    run = hopsgpu.submit(leave, args=shards, workers=3, model="net", name="big", progress="off")
    watch = Watch(run, root / "models" / "net" / "_staging", manager, application)
    result = run.result()
    watch.join()
    assert result.values == (0, 1, 2)
    assert watch.containers and set(watch.containers) == {2}
    assert watch.granted == {2}
    assert watch.gpus[-1] == 2
    version = result.model
    assert version is not None and version.version == 1
    manifest = version.manifest
    assert {name: facts["bytes"] for name, facts in manifest["files"].items()} == {
        "shards/0.bin": 30 * MIB,
        "shards/1.bin": 30 * MIB,
    }
    with version.open("shards/1.bin") as file:
        assert file.read(3) == b"\1\1\1"
    assert manifest["run_id"] == result.run_id
    assert manifest["application"] == application
    assert manifest["user"] == root.stat().owner
    assert manifest["metrics"]["loss"] == 0.5
    assert not [name for name in manifest["metrics"] if name.startswith("gpu.")]
    assert manifest["code_digest"].startswith("sha256:")
    assert manifest["parameters"]["fail"] is False
    assert (root / "models" / "net").names().count("1") == 1
    times, held = result.timeline, result.gpu_seconds
    assert times.started < times.returned < times.published < times.released
    assert held.publishing == pytest.approx(2 * (times.published - times.returned))
    # The third executor was seen gone before the model was there, and counts until then.
    board = run._board
    (gone,) = board._departures
    assert times.returned < gone < times.published
    stayed = sum(times.released - came for came in board._arrivals)
    assert held.held == pytest.approx(stayed - (times.released - gone))
    assert held.idle == pytest.approx(held.held - held.training - held.publishing)


@pytest.mark.soak
def test_on_a_held_gang_nobody_goes_whatever_comes_of_its_launches(
    spark: SparkSession, manager: YarnManager, gpus_back: Callable[[], int], root: LakePath
) -> None:
    models = root / "models"
    with hopsgpu.hold(workers=2, progress="off") as gang:
        there = gang_containers(manager, spark.sparkContext.applicationId)
        first = gang.launch(leave, [("w", b"one", 1)], model="net", progress="off")
        assert gpus_back() == 2
        assert first.model is not None and list(first.model.manifest["files"]) == ["w"]
        nothing = gang.launch(os.getpid, model="empty", progress="off")
        assert nothing.model is None
        assert "no version of 'empty' was published" in nothing.warnings[0]
        assert nothing.timeline.published is None
        assert not models.names().count("empty")
        with pytest.raises(
            hopsgpu.StoreError, match="ranks 0 and 1 wrote different content"
        ) as told:
            gang.launch(leave, [("w", b"a", 1), ("w", b"b", 1)], model="net", progress="off")
        assert told.value.result.values == (0, 1)
        assert told.value.result.model is None
        same = gang.launch(leave, [("w", b"a", 1), ("w", b"a", 1)], model="net", progress="off")
        assert same.model is not None and list(same.model.manifest["files"]) == ["w"]
        signed = gang.launch(
            leave,
            [("w", b"a", 1), ("signature.json", b'{"x": ["float32", 64]}', 1)],
            model="signed",
            progress="off",
        )
        assert signed.model is not None and not signed.warnings
        assert signed.model.manifest["signature"] == {"x": ["float32", 64]}
        assert set(signed.model.manifest["files"]) == {"w", "signature.json"}
        odd = gang.launch(leave, [("signature.json", b"{", 1)], model="signed", progress="off")
        assert odd.model is not None and odd.model.manifest["signature"] is None
        assert (
            "no signature: signature.json, which rank 0 left, is not valid JSON" in odd.warnings[0]
        )
        with pytest.raises(hopsgpu.RankFailed, match="did not converge"):
            gang.launch(leave, [("w", b"c", 1)], {"fail": True}, model="net", progress="off")
        versions = [name for name in (models / "net").names() if name.isdigit()]
        assert versions == [str(first.model.version), str(same.model.version)]
        with pytest.raises(hopsgpu.ConfigError, match=r"resume='of-old'.*latest runs: leave-"):
            gang.launch(leave, resume="of-old", progress="off")
        with pytest.raises(hopsgpu.ConfigError, match="model='a/b'"):
            gang.launch(leave, model="a/b", progress="off")
        saved = gang.launch(go_on, (1,), name="first", progress="off")
        gone_on = gang.launch(go_on, (2,), resume=saved.run_id, progress="off")
        assert (saved.values, gone_on.values) == ((0, 0), (1, 1))
        assert gang_containers(manager, spark.sparkContext.applicationId) == there
        assert len(there) == 2


def test_what_cannot_be_published_fails_before_any_gpu_is_asked_for(
    spark: SparkSession, manager: YarnManager, gpus_back: Callable[[], int], root: LakePath
) -> None:
    root.make()
    (root / "models").write(b"in the way")
    with pytest.raises(hopsgpu.StoreError, match="model='net' could not be published") as told:
        quiet(os.getpid, model="net")
    times = told.value.result.timeline
    assert (times.granted, times.started) == (None, None)
    assert gpus_back() == 0
    with pytest.raises(hopsgpu.ConfigError, match="resume='gone': there is no such run in"):
        quiet(os.getpid, resume="gone")
    with pytest.raises(hopsgpu.ConfigError, match=r"model='_x'"):
        quiet(os.getpid, model="_x")


def executor_of_a_gang(manager: YarnManager, application: str, rank: int | None = None) -> int:
    """Pid of an executor of an application's gang on this machine, and not of one for ETL.

    Where the pid of a rank is given, it is this one's executor.
    """
    containers = {f"CONTAINER_ID={name}".encode() for name in gang_containers(manager, application)}
    if rank is not None:
        containers &= set(Path(f"/proc/{rank}/environ").read_bytes().split(b"\0"))
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            environ = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_java = b"--executor-id" in command and comm(int(process.name)) == "java"
        if is_java and containers.intersection(environ):
            return int(process.name)
    raise AssertionError(f"no process of {containers}")


def kill_executor(executor: int) -> None:
    """Kills an executor; returns once all its processes are gone."""
    lost = family(executor)
    os.kill(lost[0], signal.SIGKILL)
    assert until(lambda: all(map(gone, lost)))


@contextlib.contextmanager
def frozen_daemon(cluster: Path, name: str) -> Iterator[None]:
    """Freezes a daemon of a cluster."""
    pid = next(one.pid for one in devcluster.status(cluster).daemons if one.name == name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.soak
@pytest.mark.parametrize("way", ["lost", "cancelled"])
def test_an_upload_that_ends_early_leaves_no_version_and_no_gpu(
    way: str,
    spark: SparkSession,
    manager: YarnManager,
    gpus_back: Callable[[], int],
    root: LakePath,
    cluster_dir: Path,
    tmp_path: Path,
) -> None:
    go = tmp_path / "go"
    shards = [(f"{n}.bin", bytes([n]) * MIB, 250) for n in range(2)]
    run = hopsgpu.submit(
        leave_when_told, args=(str(go), *shards), workers=2, model="net", progress="off"
    )
    staging = root / "models" / "net" / "_staging"
    assert until(lambda: run.status().state == "running")
    # Nothing can be uploaded to the end before it is ended.
    with frozen_daemon(cluster_dir, DATANODE):
        go.touch()
        assert until(lambda: bool(run.status().state == "publishing" and staging.names()))
        if way == "lost":
            kill_executor(executor_of_a_gang(manager, spark.sparkContext.applicationId))
            wanted, words = (
                hopsgpu.StoreError,
                "is not published: rank [01]'s executor was lost|executors of ranks",
            )
        else:
            run.cancel()
            assert until(lambda: not staging.names())
            wanted, words = hopsgpu.Cancelled, "cancelled while it published 'net'"
    with pytest.raises(wanted, match=words) as told:
        run.result()
    left = told.value.result
    assert left.values == ((0, 1) if way == "lost" else ())
    assert left.model is None and left.timeline.published is None
    assert left.timeline.released is not None
    assert not [name for name in (root / "models" / "net").names() if name.isdigit()]
    # The other rank may have had all of its part there.
    assert not staging.names() or (way == "lost" and "are kept for a day in" in str(told.value))


@pytest.mark.soak
def test_an_elastic_gang_that_lost_what_it_published_trains_again_from_its_checkpoint(
    spark: SparkSession,
    manager: YarnManager,
    gpus_back: Callable[[], int],
    root: LakePath,
    cluster_dir: Path,
    tmp_path: Path,
) -> None:
    go = tmp_path / "go"
    # An empty file needs no DataNode: rank 1 uploads all of its part.
    shards = [("0.bin", b"0" * MIB, 250), ("1.bin", b"", 0)]
    run = hopsgpu.submit(
        save_and_leave_when_told,
        args=(str(go), *shards),
        workers=(1, 2),
        model="net",
        progress="off",
    )
    saved = Checkpoints(root / "runs" / run.run_id / "checkpoints", rank=0)
    assert until(lambda: 0 < len(saved.shards().get(7, ())) == run.status().granted)
    staging = root / "models" / "net" / "_staging"
    rank = int(Path(f"{go}-0").read_text())
    executor = executor_of_a_gang(manager, spark.sparkContext.applicationId, rank)
    with frozen_daemon(cluster_dir, DATANODE):
        go.touch()
        assert until(lambda: run.status().state == "publishing")
        assert until(lambda: any((staging / s / "1/1.bin").exists() for s in staging.names()))
        kill_executor(executor)
    result = run.result()
    first, second = result.worlds
    assert (first.end, second.end) == ("lost", "returned")
    assert "'net' is not published: " in first.why and "lost" in first.why
    assert any(first.why in warning for warning in result.warnings)
    assert not staging.names()
    # The first world had no checkpoint to begin at.
    assert set(result.values) == {7} and len(result.values) == second.ranks
    assert result.model is not None and result.model.version == 1
    assert result.timeline.published is not None


@pytest.mark.soak
def test_ranks_sign_their_model_and_are_warned_of_pickles(
    spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    result = quiet(leave_a_signed_pickle, workers=2, model="signed")
    assert result.model is not None
    assert result.model.manifest["signature"] == {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "output", "datatype": "INT64", "shape": [-1]}],
    }
    (warning,) = result.warnings
    assert warning.startswith("'signed': part-0.pkl, part-1.pkl: whoever loads a pickle runs")
