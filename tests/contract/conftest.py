"""Every lake that a contract is held on: a local directory, and the real HDFS by two protocols."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hopsgpu.storage.lake import Lake


@pytest.fixture(scope="session")
def webhdfs_url(cluster_env: dict[str, str]) -> str:
    """The same HDFS as `hdfs_url`, over HTTP."""
    site = ElementTree.parse(Path(cluster_env["HADOOP_CONF_DIR"]) / "hdfs-site.xml")
    properties = {p.findtext("name"): p.findtext("value") for p in site.iter("property")}
    return f"webhdfs://{properties['dfs.namenode.http-address']}"


@pytest.fixture(params=["file", "hdfs", "webhdfs"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    if request.param == "file":
        yield Lake(f"file://{tmp_path}/lake")
        return
    address = request.getfixturevalue(f"{request.param}_url")
    root = Lake(f"{address}/tmp/contract-{uuid.uuid4().hex}")
    yield root
    root.remove()


@pytest.fixture(params=["hdfs", "webhdfs"])
def hdfs_lake(request: pytest.FixtureRequest) -> Iterator[Lake]:
    """A directory that does not exist yet, of the real HDFS."""
    address = request.getfixturevalue(f"{request.param}_url")
    root = Lake(f"{address}/tmp/contract-{uuid.uuid4().hex}")
    yield root
    root.remove()
