"""Every lake that a contract is held on: a local directory, and the real HDFS by two protocols."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hopsgpu.storage.lake import LakePath

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def webhdfs_url(cluster_env: dict[str, str]) -> str:
    """The same HDFS as `hdfs_url`, over HTTP."""
    site = ElementTree.parse(Path(cluster_env["HADOOP_CONF_DIR"]) / "hdfs-site.xml")
    properties = {p.findtext("name"): p.findtext("value") for p in site.iter("property")}
    return f"webhdfs://{properties['dfs.namenode.http-address']}"


def directory_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LakePath]:
    """A directory that does not exist yet, of the lake that is the parameter."""
    if request.param == "file":
        yield LakePath(f"file://{tmp_path}/lake")
        return
    address = request.getfixturevalue(f"{request.param}_url")
    root = LakePath(f"{address}/tmp/contract-{uuid.uuid4().hex}")
    yield root
    root.remove()


lake = pytest.fixture(params=["file", "hdfs", "webhdfs"], name="lake")(directory_of)
hdfs_lake = pytest.fixture(params=["hdfs", "webhdfs"], name="hdfs_lake")(directory_of)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is built on the lake as the soak's over WebHDFS: its steps are those over RPC.

    test_lake.py holds WebHDFS itself to the contract of all lakes.
    """
    for item in items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(HERE):
            given = item.callspec.params if hasattr(item, "callspec") else {}
            lakes = {given.get("lake"), given.get("hdfs_lake")}
            if "webhdfs" in lakes and item.path.name != "test_lake.py":
                item.add_marker(pytest.mark.soak)
