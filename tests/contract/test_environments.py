"""Environments on every lake: whole or not there, whoever makes the same at the same time."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from pathlib import Path

from hopsgpu.artifacts import python_environments
from hopsgpu.storage.lake import LakePath

NEVER = threading.Event()
MAKERS = 4


def made(directory: Path, number: int) -> Path:
    archive = directory / str(number) / "environment.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(b"made by %d" % number)
    return archive


def test_of_several_that_make_the_same_one_is_taken(lake: LakePath, tmp_path: Path) -> None:
    """Each of several makers gets what the first of them has put there, whole."""
    archives = [made(tmp_path, number) for number in range(MAKERS)]
    assert python_environments.find(lake, "key") is None

    def put(number: int) -> python_environments.Description:
        described = {"bytes": archives[number].stat().st_size, "maker": number}
        return python_environments.upload(
            LakePath(lake.url), "key", archives[number], described, NEVER
        )

    with concurrent.futures.ThreadPoolExecutor(MAKERS) as pool:
        told = list(pool.map(put, range(MAKERS)))
    assert len({json.dumps(one) for one in told}) == 1
    maker = told[0]["maker"]
    assert python_environments.find(lake, "key") == told[0]
    archive = python_environments.archive_of(lake, "key", told[0])
    assert archive.url.endswith("/environments/key/archive.tar.gz")
    assert archive.read() == b"made by %d" % maker
    assert (lake / "environments/_staging").names() == ()
    assert (lake / "environments").names() == ("_staging", "key")


def test_one_that_lost_its_archive_is_none(lake: LakePath, tmp_path: Path) -> None:
    archive = made(tmp_path, 1)
    described = {"bytes": archive.stat().st_size}
    told = python_environments.upload(lake, "key", archive, described, NEVER)
    python_environments.archive_of(lake, "key", told).remove()
    assert python_environments.find(lake, "key") is None
    assert python_environments.upload(lake, "key", archive, described, NEVER) == told
    assert python_environments.find(lake, "key") == told


def test_what_nobody_used_is_swept(lake: LakePath, tmp_path: Path) -> None:
    archive = made(tmp_path, 1)
    python_environments.upload(lake, "key", archive, {"bytes": archive.stat().st_size}, NEVER)
    home = lake / "environments"
    now = (home / "key/environment.json").stat().modified
    assert python_environments.sweep(home, now + python_environments.UNUSED_MILLISECONDS // 2) == []
    assert python_environments.sweep(home, now + 2 * python_environments.UNUSED_MILLISECONDS) == [
        "key"
    ]
    assert python_environments.find(lake, "key") is None
