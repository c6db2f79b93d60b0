"""A container's daemon has Python environments unpacked; the lake is a local directory."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu.agent.environment_unpacker import places_of
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.builder import ensure_built
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.unit.containers import Container, container


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Container]:
    with container(tmp_path / "container") as there:
        yield there


@pytest.fixture
def env(tmp_path: Path) -> PythonEnv:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/mine.py").write_text("A = 1\n")
    return ensure_built(
        recipe_for(tmp_path / "given"), LakePath(f"file://{tmp_path}/lake"), threading.Event()
    )


def test_where_environments_lie(tmp_path: Path) -> None:
    disks = {"LOCAL_DIRS": "/disk1/app,/disk2/app"}
    found = [str(place) for place in places_of(disks, tmp_path)]
    assert found == [f"/disk{n}/app/hopsgpu-environments" for n in (1, 2)]
    assert places_of({}, tmp_path) == [tmp_path / "hopsgpu-environments"]


def test_an_environment_is_unpacked_once_whoever_waits(
    here: Container, env: PythonEnv, tmp_path: Path
) -> None:
    variables = {**os.environ, "LOCAL_DIRS": str(tmp_path / "disk")}
    home = tmp_path / "disk/hopsgpu-environments" / env.digest

    async def scenario() -> None:
        async with here.connect_daemon() as daemon:
            # A holder that is told to end while it waits.
            waiting = asyncio.ensure_future(daemon.prepare(env, variables))
            await asyncio.sleep(0)
            waiting.cancel()
        async with here.connect_daemon() as daemon, asyncio.timeout(HANG_SECONDS):
            homes = await asyncio.gather(*(daemon.prepare(env, variables) for _ in range(2)))
            assert [one.packages for one in homes] == [(str(home),)] * 2
            assert (home / "mine.py").exists()
            LakePath(env.url).remove()
            # The lake is not asked for what is here.
            assert (await daemon.prepare(env, variables)).packages == (str(home),)

    asyncio.run(scenario())


def test_why_an_environment_cannot_be_unpacked_is_told(here: Container, env: PythonEnv) -> None:
    async def scenario() -> None:
        async with here.connect_daemon() as daemon, asyncio.timeout(HANG_SECONDS):
            with pytest.raises(ConfigError, match="vax"):
                await daemon.prepare(dataclasses.replace(env, machine="vax"), os.environ)
            with pytest.raises(OSError, match="SHA-256 mismatch"):
                await daemon.prepare(dataclasses.replace(env, digest="0" * 64), os.environ)
            with pytest.raises(OSError, match="unpacks .* 1"):
                await daemon.prepare(env, {"PYTHONHOME": "/nowhere"})

    asyncio.run(scenario())
