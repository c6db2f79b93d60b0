"""Every lake that a contract is held on: a local directory, and the real HDFS."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu.stores.lake import Lake


@pytest.fixture(params=["file", "hdfs"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    if request.param == "file":
        yield Lake(f"file://{tmp_path}/lake")
        return
    root = Lake(f"{request.getfixturevalue('hdfs_url')}/tmp/contract-{uuid.uuid4().hex}")
    yield root
    root.remove()
