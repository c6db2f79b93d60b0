"""A rank's TMPDIR: short enough for sockets, private, on the container's disk, and not left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.agent import tmpdir_links as links_module
from hopsgpu.agent.daemon_client import DaemonClient
from hopsgpu.agent.tmpdir_links import SHARED, links, sweep
from tests.unit import rank_functions as functions
from tests.unit.containers import ROOT, Container, Rank, container, until

# Leaves room for the names that others give below it: Ray's and wandb's are the longest, some 70.
MOST_BYTES = 35
THREADED = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
# Makes a place, says which it is, and ends without a word, as after kill -9.
KILLED = """
import os, sys
from pathlib import Path
from hopsgpu.agent.tmpdir_links import links
with links(Path(sys.argv[1]), Path(sys.argv[2])) as made:
    print(made.add(Path("/nowhere")).parent, flush=True)
    os._exit(9)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    directory = tmp_path / ("x" * 200) / ("y" * 200)
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """As /tmp is."""
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


@pytest.fixture
def long(own: Path) -> Iterator[Container]:
    """A container with a path of more than 400 characters."""
    with container(own / "container") as here:
        assert len(str(here.directory)) > 400
        yield here


def places() -> set[Path]:
    """The directories of this user's daemons in /tmp."""
    return {path for path in SHARED.glob("hopsgpu-tmp-*") if path.stat().st_uid == os.geteuid()}


def test_a_link_is_short_private_and_removed(own: Path) -> None:
    with links(own) as made:
        first, second = made.add(own), made.add(own)
        place = first.parent
        assert first != second and place.parent == SHARED
        assert first.readlink() == own and first.is_dir()
        assert stat.S_IMODE(place.lstat().st_mode) == 0o700
        made.remove(first)
        assert not os.path.lexists(first) and second.is_dir() and own.is_dir()
    assert not place.exists() and own.is_dir()


def test_links_below_a_directory(own: Path, shared: Path) -> None:
    with links(own, shared) as made:
        one, other = made.add(own / "run" / "rank-1"), made.add(own / "run-2" / "rank-1")
        assert made.below(own / "run") == [one]
        assert made.below(own) == [one, other]


def not_sticky(shared: Path) -> None:
    shared.chmod(0o777)


def of_another(shared: Path) -> None:
    shutil.chown(shared, 65534)


def a_file(shared: Path) -> None:
    shared.rmdir()
    shared.touch()


@pytest.mark.parametrize("spoil", [not_sticky, a_file, Path.rmdir, of_another])
def test_where_the_shared_directory_is_unfit_links_lie_in_the_own_one(
    own: Path, shared: Path, spoil: Any
) -> None:
    if spoil is of_another and os.geteuid() != 0:
        pytest.skip("root alone can give a directory away")
    spoil(shared)
    with links(own, shared) as made:
        link = made.add(own)
        assert link.parent.parent == Path(f"/proc/{os.getpid()}/fd")
        assert len(os.fsencode(link)) < MOST_BYTES
        assert not shared.is_dir() or not list(shared.iterdir())
        # As a rank has it: another process of this user.
        environment = {**os.environ, "TMPDIR": str(link), "PYTHONPATH": str(ROOT)}
        command = "from tests.unit import rank_functions as f; print(f.managed())"
        ran = subprocess.run(
            [sys.executable, "-c", command], env=environment, capture_output=True, text=True
        )
        assert ran.stdout == "[1, 2]\n", ran.stderr
    assert not link.parent.exists()


def test_where_the_shared_directory_goes_away_the_next_link_lies_in_the_own_one(
    own: Path, shared: Path
) -> None:
    with links(own, shared) as made:
        assert made.add(own).is_relative_to(shared)
        shutil.rmtree(shared)
        assert made.add(own).parts[1] == "proc"


def test_only_links_of_killed_processes_are_removed(own: Path, shared: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(own), str(shared)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    left = Path(ran.stdout.strip())
    assert ran.returncode == 9 and left.is_dir() and left.parent == shared
    kept = own / "file"
    kept.touch()
    (left / "7").symlink_to(own)
    # A link is not followed, nor is a file taken for one.
    (shared / "hopsgpu-tmp-link").symlink_to(own)
    (shared / "hopsgpu-tmp-file").touch()
    (shared / "other").mkdir()
    with links(own, shared) as made:
        living = made.add(own)
        assert not left.exists() and kept.exists()
        sweep(shared)
        assert living.is_dir()
    assert {path.name for path in shared.iterdir()} == {
        "hopsgpu-tmp-link",
        "hopsgpu-tmp-file",
        "other",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give a directory away")
def test_other_users_directories_stay(own: Path, shared: Path) -> None:
    others = shared / "hopsgpu-tmp-others"
    others.mkdir(mode=0o700)
    shutil.chown(others, 65534)
    sweep(shared)
    assert others.is_dir()


def test_a_place_that_is_swept_before_it_is_locked_is_made_again(
    own: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = links_module.tempfile.mkdtemp, []

    def made_and_swept(**options: Any) -> str:
        made.append(make(**options))
        if len(made) == 1:
            sweep(shared)
        return made[-1]

    monkeypatch.setattr(links_module.tempfile, "mkdtemp", made_and_swept)
    with links(own, shared) as short:
        assert short.add(own).parent == Path(made[1])
    assert len(made) == 2


def test_cleaners_of_old_files_are_kept_off(own: Path, shared: Path) -> None:
    with links(own, shared) as made:
        link = made.add(own)
        for path in (link, link.parent):
            os.utime(path, (0, 0), follow_symlinks=False)
        now = time.monotonic()
        made.refresh(now)
        assert link.lstat().st_mtime == 0 and 0 < made.seconds_until_due(now) <= 3600
        made.refresh(now + 3601)
        assert min(path.lstat().st_mtime for path in (link, link.parent)) > time.time() - 60
        assert made.seconds_until_due(now + 3601) == pytest.approx(3600)
        link.unlink()
        made.refresh(now + 7203)


# In ranks.


@pytest.mark.parametrize("modules", [(), ("threaded",)], ids=["forked", "fresh"])
def test_a_rank_can_bind_sockets_in_tmpdir_however_long_its_path_is(
    long: Container, modules: tuple[str, ...]
) -> None:
    long.module("threaded", THREADED)

    async def scenario() -> None:
        async with long.connect_daemon() as daemon:
            # The third is forked ahead.
            for _ in range(3):
                rank = await long.start(daemon, long.spec(*modules), functions.temporary)
                assert (rank.started.warning is None) == (modules == ())
                seen = await rank.value()
                assert len(seen["TMPDIR"]) < MOST_BYTES
                assert seen["real"] == str(rank.directory / "tmp")
                assert seen["mode"] == 0o40700
                assert seen["tempfile"] == seen["TMPDIR"]
                assert seen["managed"] == [1, 2]

    asyncio.run(scenario())


def test_the_fork_servers_tmpdir_is_short_too(long: Container) -> None:
    long.module("remembers", "import tempfile\nDIRECTORY = tempfile.gettempdir()")

    def remembered() -> str:
        import remembers

        return str(remembers.DIRECTORY)

    async def scenario() -> None:
        remembers = await long.value(long.spec("remembers"), remembered)
        assert len(remembers) < MOST_BYTES and remembers.startswith(str(SHARED))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "context",
    ["fork", *(pytest.param(c, marks=pytest.mark.soak) for c in ("spawn", "forkserver"))],
)
def test_a_data_loader_with_workers_however_long_the_path_is(long: Container, context: str) -> None:
    async def scenario() -> None:
        squares, processes = await long.value(long.spec("torch"), functions.loads, context)
        assert (sorted(squares), processes) == ([n * n for n in range(8)], 2)

    asyncio.run(scenario())


async def linked(here: Container, daemon: DaemonClient) -> tuple[Rank, Path]:
    """A rank that runs, and the link to its directory."""
    file = here.directory / f"tmpdir-{here.ranks}"
    rank = await here.start(daemon, here.spec(), functions.tells_tmpdir_and_waits, str(file))
    assert await asyncio.to_thread(until, file.exists)
    link = Path(json.loads(file.read_text())).parent
    assert link.is_dir()
    return rank, link


def test_a_link_stays_until_it_is_given_up(long: Container) -> None:
    async def scenario() -> None:
        async with long.connect_daemon() as daemon:
            one, first = await linked(long, daemon)
            two, second = await linked(long, daemon)
            for rank in (one, two):
                daemon.signal(rank.pid, signal.SIGKILL, "tree")
                await rank.end()
            # What it has left may lead there by it.
            assert first.is_dir()
            daemon.remove_links(one.directory)
            gone = lambda: not os.path.lexists(first)  # noqa: E731
            assert await asyncio.to_thread(until, gone)
            assert second.is_dir()

    asyncio.run(scenario())


def test_a_tasks_links_go_with_it_and_not_others(long: Container) -> None:
    async def scenario() -> None:
        async with long.connect_daemon() as other:
            _, stays = await linked(long, other)
            async with long.connect_daemon() as daemon:
                _, goes = await linked(long, daemon)
                # It may not give up another's.
                daemon.remove_links(long.directory)
                gone = lambda: not os.path.lexists(goes)  # noqa: E731
                assert await asyncio.to_thread(until, gone)
                _, goes = await linked(long, daemon)
            assert await asyncio.to_thread(until, gone)
            assert stays.is_dir()

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", ["jvm", "daemon", "task and daemon"])
def test_killed_process_leaves_no_link(tmp_path: Path, victim: str) -> None:
    async def scenario(here: Container) -> Path:
        async with here.connect_daemon() as daemon:
            rank, link = await linked(here, daemon)
            if victim == "task and daemon":
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
            os.kill(here.jvm if victim == "jvm" else daemon.pid, signal.SIGKILL)
            if victim != "task and daemon":
                await rank.end()
            return link.parent

    with container(tmp_path / "container") as here:
        place = asyncio.run(scenario(here))
        if victim == "task and daemon":
            assert place.is_dir()
            # The next daemon, of whichever container.
            with container(tmp_path / "another") as another:
                asyncio.run(another.value(another.spec(), str.upper, "next"))
        assert until(lambda: not place.exists())
        if victim != "jvm":
            assert asyncio.run(here.value(here.spec(), str.upper, "again")) == "AGAIN"


def leads_to(place: Path, directory: Path) -> bool:
    """Whether links in a place lead there; others, who run tests too, may remove it meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return any(str(directory) in str(link.readlink()) for link in place.iterdir())
    return False


def test_nothing_is_left_in_tmp(tmp_path: Path) -> None:
    before = places()
    with container(tmp_path / "container") as here:
        asyncio.run(here.value(here.spec(), str.upper, "value"))
        assert places() - before
    assert not [place for place in places() - before if leads_to(place, tmp_path)]
