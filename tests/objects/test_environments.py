"""Python environments on an object store: there once their description is."""

from __future__ import annotations

import concurrent.futures
import json
from pathlib import Path

from hopsgpu.artifacts import python_environments
from hopsgpu.storage.lake import LakePath
from tests.contract.test_environments import MAKERS, NEVER, made


def put(lake: LakePath, archive: Path, **more: int) -> python_environments.Description:
    described = {"bytes": archive.stat().st_size, **more}
    return python_environments.upload(LakePath(lake.url), "key", archive, described, NEVER)


def test_of_several_that_make_the_same_one_is_taken(lake: LakePath, tmp_path: Path) -> None:
    archives = [made(tmp_path, number) for number in range(MAKERS)]
    assert python_environments.find(lake, "key") is None
    with concurrent.futures.ThreadPoolExecutor(MAKERS) as pool:
        told = list(pool.map(lambda n: put(lake, archives[n], maker=n), range(MAKERS)))
    assert len({json.dumps(one) for one in told}) == 1
    assert python_environments.find(lake, "key") == told[0]
    archive = python_environments.archive_of(lake, "key", told[0])
    assert archive.url.endswith(".tar.gz")
    assert archive.read() == b"made by %d" % told[0]["maker"]
    # Those of the others are gone.
    assert len((lake / "environments/key").names()) == 2


def test_one_that_lost_its_archive_is_none(lake: LakePath, tmp_path: Path) -> None:
    archive = made(tmp_path, 1)
    python_environments.archive_of(lake, "key", put(lake, archive)).remove()
    assert python_environments.find(lake, "key") is None
    told = put(lake, archive)
    assert python_environments.find(lake, "key") == told
    assert python_environments.archive_of(lake, "key", told).exists()


def test_what_nobody_used_is_swept(lake: LakePath, tmp_path: Path) -> None:
    put(lake, made(tmp_path, 1))
    home = lake / "environments"
    now = (home / "key/environment.json").stat().modified
    unused = python_environments.UNUSED_MILLISECONDS
    assert python_environments.sweep(home, now + unused // 2) == []
    assert python_environments.sweep(home, now + 2 * unused) == ["key"]
    assert python_environments.find(lake, "key") is None
