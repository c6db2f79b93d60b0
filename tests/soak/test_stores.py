"""The model store while HDFS fails and comes back, and with a file that no memory holds."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu import devcluster
from hopsgpu.artifacts.models import ModelStore, ModelVersion
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.conftest import gone, until

PUBLISHERS = 8
ROUNDS = 2
GIB = 2**30

LARGE = """
    import json, sys
    from pathlib import Path
    from hopsgpu import ModelStore

    version = ModelStore(sys.argv[1]).publish(sys.argv[2], "large")
    version.download(sys.argv[3])
    peak = next(l for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l)
    print(json.dumps({"peak": int(peak.split()[1]) * 1024, "files": version.manifest["files"]}))
"""


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[devcluster.ClusterInfo]:
    directory = tmp_path_factory.mktemp("stores")
    try:
        info = devcluster.up(directory, nodes=1, gpus_per_node=1)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in devcluster.environment(directory).items():
                patch.setenv(name, value)
            yield info
    finally:
        devcluster.down(directory)


@pytest.fixture
def lake(own_cluster: devcluster.ClusterInfo, request: pytest.FixtureRequest) -> Iterator[LakePath]:
    root = LakePath(f"{own_cluster.filesystem}/tmp/{request.node.originalname}")
    yield root
    root.remove()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = tmp_path / "model"
    source.mkdir()
    for number in range(4):
        (source / f"shard-{number}.pt").write_bytes(os.urandom(2**20) * 12)
    return source


def publish(url: str, model: Path) -> list[ModelVersion | StoreError]:
    """What came of a publisher's publishes, one after the other."""
    came: list[ModelVersion | StoreError] = []
    for _ in range(ROUNDS):
        try:
            came.append(ModelStore(url).publish(model, "net"))
        except StoreError as error:
            came.append(error)
    return came


def written(lake: LakePath) -> bool:
    """Whether a publisher has its first file under way."""
    staging = lake / "net" / "_staging"
    return any((staging / name / "0").names() for name in staging.names())


@pytest.mark.parametrize("daemon", ["datanode", "namenode"])
def test_a_daemon_killed_and_restarted_in_mid_publish(
    own_cluster: devcluster.ClusterInfo, lake: LakePath, model: Path, daemon: str
) -> None:
    with concurrent.futures.ThreadPoolExecutor(PUBLISHERS) as pool:
        publishers = [pool.submit(publish, lake.url, model) for _ in range(PUBLISHERS)]
        assert until(lambda: written(lake))
        (pid,) = (
            d.pid for d in devcluster.status(own_cluster.directory).daemons if d.name == daemon
        )
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: gone(pid))
        assert not all(publisher.done() for publisher in publishers)
        assert devcluster.up(own_cluster.directory).started == (daemon,)
        came = [one for publisher in publishers for one in publisher.result(timeout=HANG_SECONDS)]
    published = [one for one in came if isinstance(one, ModelVersion)]
    refused = [one for one in came if isinstance(one, StoreError)]
    for error in refused:
        print(error.kind, error)
        assert lake.url in str(error)
    store = ModelStore(lake.url)
    listed = store.versions("net")
    # Of a publish whose last answer was lost with its daemon, the publisher knows no version.
    assert set(published) <= set(listed)
    assert len(listed) <= len(published) + len(refused)
    assert len(set(published)) == len(published) >= PUBLISHERS
    for version in listed:
        version.verify()
        assert sorted(version.files) == [f"shard-{number}.pt" for number in range(4)]
    assert store.publish(model, "net").version > max(version.version for version in listed)


def test_three_gigabytes_need_little_memory(lake: LakePath, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.mkdir()
    file = source / "weights.safetensors"
    # Sparse, but for what shows where it lies.
    with file.open("wb") as sparse:
        for offset in (0, GIB + 12_345, 3 * GIB):
            sparse.seek(offset)
            sparse.write(os.urandom(2**20))
    size = file.stat().st_size
    assert size == 3 * GIB + 2**20
    target = tmp_path / "copy"
    command = [sys.executable, "-c", textwrap.dedent(LARGE), lake.url, str(source), str(target)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    print(said)
    assert said["files"]["weights.safetensors"]["bytes"] == size
    assert said["peak"] < 200e6
    subprocess.run(["cmp", str(file), str(target / file.name)], check=True)
    (target / file.name).unlink()
