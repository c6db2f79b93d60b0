"""Checkpoints on their way from a rank's call to the lake: complete, and in order."""

from __future__ import annotations

import asyncio
import errno
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import hopsgpu
from hopsgpu.agent.uploader import RankUploads, UploadLimits
from hopsgpu.artifacts import checkpoint_upload
from hopsgpu.artifacts.checkpoint_restore import download_latest
from hopsgpu.artifacts.checkpoint_retention import CheckpointOptions
from hopsgpu.artifacts.checkpoint_upload import PendingCheckpoints
from hopsgpu.artifacts.checkpoints import Checkpoints, SaveResult, files_of
from hopsgpu.errors import Cancelled, ConfigError, StoreError
from hopsgpu.rank.blocked_time import BlockedTime
from hopsgpu.rank.checkpoint_agreement import ProposalWords
from hopsgpu.rank.context import VARIABLE, Context, _local_directory
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    directory = tmp_path / "rank-0"
    directory.mkdir()
    return directory


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state.pt"
    path.write_text("first")
    return path


@pytest.fixture
def lake(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/lake")


def bring_all(rank: Path, lake: LakePath) -> list[str | None]:
    saves = PendingCheckpoints(rank)
    place = Checkpoints(lake, 0)
    return [saves.upload(handed, place, threading.Event())[1] for handed in saves.pending()]


def read(lake: LakePath, into: Path) -> str | None:
    found = download_latest([Checkpoints(lake, 0)], into)
    return None if found is None else found.read_text()


def test_handed_over_checkpoint_is_a_copy(
    rank: Path, file: Path, lake: LakePath, tmp_path: Path
) -> None:
    assert not PendingCheckpoints(rank).has_saved
    PendingCheckpoints(rank).hand_over(file, CheckpointOptions(1))
    assert PendingCheckpoints(rank).has_saved
    file.write_text("written anew in its place")
    assert bring_all(rank, lake) == [None]
    assert read(lake, tmp_path / "got") == "first"
    assert PendingCheckpoints(rank).pending() == []


def test_third_save_waits_for_the_first_and_all_are_uploaded_in_order(
    rank: Path, file: Path, lake: LakePath
) -> None:
    saves = PendingCheckpoints(rank)
    for step in (2, 1):
        saves.hand_over(file, CheckpointOptions(step))
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(saves.hand_over, file, CheckpointOptions(0))
        with pytest.raises(TimeoutError):
            third.result(0.3)
        uploaded = saves.upload(saves.pending()[0], Checkpoints(lake, 0), threading.Event())
        assert uploaded == (SaveResult(2, is_complete=True), None)
        assert "2" in lake.names() and "1" not in lake.names()
        third.result(HANG_SECONDS)
    assert len(saves.pending()) == 2
    assert bring_all(rank, lake) == [None, None]
    assert {"0", "1", "2"} < set(lake.names())


def test_problem_is_raised_once_by_the_next_save(rank: Path, file: Path, lake: LakePath) -> None:
    saves = PendingCheckpoints(rank)
    saves.hand_over(file, CheckpointOptions(1))
    Path(lake.path).write_text("in the way")
    (problem,) = bring_all(rank, lake)
    assert problem is not None and "step 1" in problem
    with pytest.raises(StoreError, match=re.escape(problem)):
        saves.hand_over(file, CheckpointOptions(2))
    assert saves.pending() == []
    Path(lake.path).unlink()
    saves.hand_over(file, CheckpointOptions(2))
    assert bring_all(rank, lake) == [None]


def test_linked_directories_are_saved_and_dangling_links_refused(
    rank: Path, lake: LakePath, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shard").write_text("linked")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "shards").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "state" / "nowhere").symlink_to(tmp_path / "absent")
    with pytest.raises(ConfigError, match="state/nowhere"):
        PendingCheckpoints(rank).hand_over(tmp_path / "state", CheckpointOptions(1))
    assert not PendingCheckpoints(rank).has_saved
    (tmp_path / "state" / "nowhere").unlink()
    PendingCheckpoints(rank).hand_over(tmp_path / "state", CheckpointOptions(1))
    assert bring_all(rank, lake) == [None]
    found = download_latest([Checkpoints(lake, 0)], tmp_path / "got")
    assert found is not None and (found / "shards" / "shard").read_text() == "linked"


def test_failed_copy_leaves_nothing(
    rank: Path, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/absent"):
        PendingCheckpoints(rank).hand_over(tmp_path / "absent", CheckpointOptions(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError) as raised:
        PendingCheckpoints(rank).hand_over(file, CheckpointOptions(1))
    assert raised.value.errno == errno.ENOSPC
    assert list((rank / "saves").iterdir()) == []


def test_rank_that_is_killed_while_it_copies_hands_nothing_over(
    rank: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Stands for a signal without a handler."""

    def killed(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(shutil, "copyfile", killed)
    with pytest.raises(Killed):
        PendingCheckpoints(rank).hand_over(file, CheckpointOptions(1))
    assert [path.name[:6] for path in (rank / "saves").iterdir()] == ["draft-"]
    assert PendingCheckpoints(rank).pending() == []


def test_save_outside_a_gang_is_complete_on_return(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("RANK", "0")
    context = hopsgpu.context()
    for step, loss in ((1, 0.2), (2, 0.1), (3, 0.3)):
        file.write_text(f"step {step}")
        context.save_checkpoint(file, step, keep=1, metric=loss)
    file.unlink()
    newest, best = context.latest_checkpoint(), context.best_checkpoint()
    assert newest is not None and newest.read_text() == "step 3"
    assert best is not None and best.read_text() == "step 2"
    with pytest.raises(ConfigError, match="keep=0"):
        context.save_checkpoint(newest, 4, keep=0)


@pytest.mark.parametrize("path", ["", None, 7])
def test_value_that_is_no_path_is_refused(
    monkeypatch: pytest.MonkeyPatch, file: Path, path: Any
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError, match="path="):
        hopsgpu.context().save_checkpoint(path, 1)


@pytest.mark.parametrize("step", [-1, 2**63, 10**300, 10**5000], ids="abcd")
def test_step_out_of_bounds_is_refused(
    monkeypatch: pytest.MonkeyPatch, file: Path, step: int
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="step="):
        hopsgpu.context().save_checkpoint(file, step)


def test_directories_outside_a_gang_belong_to_this_process_alone(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("RANK", "0")
    temporary = tmp_path / "with spaces"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    # A process has one of each, and earlier tests have made them elsewhere.
    _local_directory.cache_clear()
    request.addfinalizer(_local_directory.cache_clear)
    made = hopsgpu.context()
    assert Path(LakePath(made.checkpoint_dir).path).stat().st_mode & 0o777 == 0o700
    assert Path(LakePath(made.log_dir_url).path).parent == temporary
    made.save_checkpoint(file, 1)
    found = made.latest_checkpoint()
    assert found is not None and found.is_relative_to(temporary)
    top = temporary / found.relative_to(temporary).parts[0]
    assert top.stat().st_mode & 0o777 == 0o700
    assert top.name != "hopsgpu-checkpoints" and top.name.startswith("hopsgpu-copies-")


def test_copies_in_a_gang_are_in_the_directory_of_the_rank(
    rank: Path, file: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = (lake.url, f"{lake.url}/logs")
    Context(0, 0, 1, "here", (), "worker", "r", 0, rank / "model", *urls).dump(rank / "context")
    monkeypatch.setenv(VARIABLE, str(rank / "context"))
    ProposalWords(rank)  # as the agent has made them
    BlockedTime(rank)
    hopsgpu.context().save_checkpoint(file, 1)
    assert bring_all(rank, lake) == [None]
    found = hopsgpu.context().latest_checkpoint()
    assert found is not None and found.is_relative_to(rank / "copies")


class Panic(BaseException):
    """Clients in Rust raise such errors."""


def test_unexpected_errors_of_an_upload_are_returned_and_raised(
    rank: Path, file: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panics(*_: object) -> None:
        raise Panic("index out of bounds")

    saves = PendingCheckpoints(rank)
    for step in (1, 2):
        saves.hand_over(file, CheckpointOptions(step))
    (saves.pending()[1] / "saving.json").write_text("half a fi")
    monkeypatch.setattr(Checkpoints, "save", panics)
    panic, unread = bring_all(rank, lake)
    assert panic is not None and "step 1" in panic and "Panic('index" in panic
    assert unread is not None and "unknown step" in unread and "JSONDecode" in unread
    assert saves.pending() == []
    with pytest.raises(StoreError, match="unknown step"):
        saves.hand_over(file, CheckpointOptions(3))


def test_rank_that_saves_alone_is_warned_once(rank: Path, file: Path, lake: LakePath) -> None:
    for one in (0, 1):
        Checkpoints(lake, one).save(files_of(file), CheckpointOptions(0))
    saves, problems = PendingCheckpoints(rank), []
    for step in range(1, 8):
        saves.hand_over(file, CheckpointOptions(step, keep=4))
        uploaded = saves.upload(saves.pending()[0], Checkpoints(lake, 0), threading.Event())
        problems.append(uploaded[1])
    (warning,) = filter(None, problems)
    assert problems.index(warning) == 4
    assert "step 1: 1; step 0" in warning


# The agent's side.


class AgentRecord:
    """Records what an agent received, and how often it sent a heartbeat."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.signs = 0
        self.saves: list[tuple[int, bool]] = []

    async def saved(self, saved: SaveResult) -> None:
        self.saves.append((saved.step, saved.is_complete))

    async def warn(self, text: str) -> None:
        self.warnings.append(text)

    async def sign(self) -> None:
        self.signs += 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Uploads end when the event is set, or when they are abandoned."""
    go = threading.Event()
    save = Checkpoints.save

    def slowly(
        place: Checkpoints,
        files: Mapping[str, Path],
        options: CheckpointOptions,
        stop: threading.Event,
    ) -> SaveResult:
        while not go.wait(0.01):
            if stop.is_set():
                raise Cancelled("stopped")
        return save(place, files, options, stop)

    monkeypatch.setattr(Checkpoints, "save", slowly)
    return go


def finish(
    rank: Path,
    lake: LakePath,
    *,
    returned: bool,
    then: Callable[[AgentRecord, asyncio.Event], Any],
    drops: bool = False,
    limits: UploadLimits = UploadLimits(report_seconds=0.1),  # noqa: B008 - immutable
) -> AgentRecord:
    """End a rank that has handed over its checkpoints; call `then` during the end."""
    agent = AgentRecord()

    async def act() -> None:
        stopping, dropping = asyncio.Event(), asyncio.Event()
        if drops:
            dropping.set()
        urls = (lake.url, f"{lake.url}/logs")
        context = Context(0, 0, 1, "here", (), "worker", "r", 0, rank / "model", *urls)
        events = stopping, dropping
        async with RankUploads(rank, context, *events, agent.warn, agent.saved, limits) as both:
            ending = asyncio.create_task(both.finish(agent.sign, has_returned=returned))
            while agent.signs < 2 and not ending.done():
                await asyncio.sleep(0.01)  # poll: nothing reports a heartbeat
            then(agent, stopping)
            await ending

    asyncio.run(asyncio.wait_for(act(), HANG_SECONDS))
    return agent


def test_end_of_a_rank_waits_for_its_uploads(
    rank: Path, file: Path, lake: LakePath, slow: threading.Event, tmp_path: Path
) -> None:
    PendingCheckpoints(rank).hand_over(file, CheckpointOptions(1))

    def go(*_: object) -> None:
        assert read(lake, tmp_path / "got") is None
        slow.set()

    agent = finish(rank, lake, returned=True, then=go)
    assert agent.warnings == [] and agent.signs >= 2
    assert read(lake, tmp_path / "got") == "first"


def test_checkpoints_that_no_attempt_resumes_from_are_dropped(
    rank: Path, file: Path, lake: LakePath, slow: threading.Event, tmp_path: Path
) -> None:
    for step in (1, 2):
        PendingCheckpoints(rank).hand_over(file, CheckpointOptions(step))
    agent = finish(rank, lake, returned=False, then=lambda *_: None, drops=True)
    assert agent.warnings == []
    assert read(lake, tmp_path / "got") is None
    assert not slow.is_set()


def test_upload_of_a_large_checkpoint_may_take_longer(
    rank: Path, file: Path, lake: LakePath, slow: threading.Event, tmp_path: Path
) -> None:
    PendingCheckpoints(rank).hand_over(file, CheckpointOptions(1))
    assert PendingCheckpoints(rank).pending_bytes() > len("first")
    limits = UploadLimits(0.0, save_bytes_per_second=0.001, report_seconds=0.1)
    agent = finish(rank, lake, returned=True, then=lambda *_: slow.set(), limits=limits)
    assert agent.warnings == []
    assert read(lake, tmp_path / "got") == "first"


def test_rank_does_not_wait_for_a_thread_that_cannot_start(
    rank: Path, file: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    agent = AgentRecord()

    async def act() -> None:
        urls = (lake.url, f"{lake.url}/logs")
        context = Context(0, 0, 1, "here", (), "worker", "r", 0, rank / "model", *urls)
        (rank / "logs").mkdir()
        for step in (1, 2):
            PendingCheckpoints(rank).hand_over(file, CheckpointOptions(step))
        monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
        events = asyncio.Event(), asyncio.Event()
        async with RankUploads(rank, context, *events, agent.warn, agent.saved) as both:
            await both.finish(agent.sign, has_returned=True)

    asyncio.run(asyncio.wait_for(act(), HANG_SECONDS))
    assert sorted("step" in text for text in agent.warnings) == [False, True, True]
    assert all("can't start new thread" in text for text in agent.warnings)
    with pytest.raises(StoreError, match="can't start new thread"):
        PendingCheckpoints(rank).hand_over(file, CheckpointOptions(3))


@pytest.mark.parametrize("returned", [True, False])
def test_upload_that_takes_too_long_is_abandoned(
    rank: Path, file: Path, lake: LakePath, slow: threading.Event, tmp_path: Path, returned: bool
) -> None:
    for step in (1, 2):
        PendingCheckpoints(rank).hand_over(file, CheckpointOptions(step))

    def stop(agent: AgentRecord, stopping: asyncio.Event) -> None:
        assert agent.warnings == []
        if returned:
            stopping.set()

    # A rank that returned has time until the attempt must end. All logs are uploaded, so their
    # upload is not abandoned though its time is over.
    limits = UploadLimits(1000.0, failed_save_seconds=0.5, log_seconds=0.0, report_seconds=0.1)
    agent = finish(rank, lake, returned=returned, then=stop, limits=limits)
    (warning,) = agent.warnings
    assert "2 of rank 0's" in warning
    assert read(lake, tmp_path / "got") is None
    assert lake.names() == ()


def test_saves_are_uploaded_while_the_rank_continues(
    rank: Path, file: Path, lake: LakePath, tmp_path: Path
) -> None:
    agent = AgentRecord()

    async def act() -> None:
        urls = (lake.url, f"{lake.url}/logs")
        context = Context(0, 0, 1, "here", (), "worker", "r", 0, rank / "model", *urls)
        events = asyncio.Event(), asyncio.Event()
        async with RankUploads(rank, context, *events, agent.warn, agent.saved) as both:
            for step in range(4):
                file.write_text(f"step {step}")
                await asyncio.to_thread(
                    PendingCheckpoints(rank).hand_over, file, CheckpointOptions(step, keep=1)
                )
            await both.finish(agent.sign, has_returned=True)

    asyncio.run(asyncio.wait_for(act(), HANG_SECONDS))
    assert agent.warnings == []
    assert agent.saves == [(step, True) for step in range(4)]
    assert read(lake, tmp_path / "got") == "step 3"
    assert checkpoint_upload.MAX_PENDING == 2 and PendingCheckpoints(rank).pending() == []
