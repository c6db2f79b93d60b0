"""What all tests that play an attacker share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared_dir() -> Iterator[Path]:
    """A directory in which all users may create files, as an administrator makes a shared root."""
    # pytest's directories are closed to other users.
    directory = Path(tempfile.mkdtemp(prefix="hopsgpu-shared-", dir="/tmp"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    return directory
