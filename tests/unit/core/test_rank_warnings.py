"""Warnings that code in a rank leaves, from the rank to its agent."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from hopsgpu.agent.rank_logs import follow_warnings
from hopsgpu.core.rank_warnings import (
    CONTEXT_VARIABLE,
    FILE,
    MAX_WARNINGS,
    read_warnings,
    warn_run,
)
from tests.bounds import HANG_SECONDS


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a rank, which is this process."""
    monkeypatch.setenv(CONTEXT_VARIABLE, str(tmp_path / "context.json"))
    return tmp_path


def test_a_warning_is_logged_and_read(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_warnings(directory) == []
    warn_run("each rank\ntrained é")
    warn_run("another")
    assert caplog.messages == ["each rank\ntrained é", "another"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert read_warnings(directory) == ["each rank\ntrained é", "another"]


def test_outside_a_rank_a_warning_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CONTEXT_VARIABLE, raising=False)
    warn_run("alone")
    assert caplog.messages == ["alone"]
    assert list(tmp_path.iterdir()) == []


def test_what_the_users_code_writes_there_is_bounded(directory: Path) -> None:
    deep = b"[" * 100_000
    (directory / FILE).write_bytes(b"\xff\n{}\n" + deep + b"\n" + b'"x"\n' * 1000 + b'"unfini')
    assert read_warnings(directory) == ["x"] * (MAX_WARNINGS - 3)
    (directory / FILE).write_bytes(b'"' + b"x" * 10_000_000 + b'"\n')
    assert read_warnings(directory) == []
    (directory / FILE).write_bytes(b'"' + b"x" * 10_000 + b'"\n')
    assert len(read_warnings(directory)[0]) == 2000


def test_the_agent_sends_each_warning_once(directory: Path) -> None:
    sent: list[str] = []

    async def follow() -> None:
        ended, arrived = asyncio.Event(), asyncio.Event()

        async def send(text: str) -> None:
            sent.append(text)
            arrived.set()

        warn_run("first")
        following = asyncio.create_task(follow_warnings(directory, ended, send))
        async with asyncio.timeout(HANG_SECONDS):
            # The rank still runs.
            await arrived.wait()
        warn_run("second")
        ended.set()
        await following

    asyncio.run(follow())
    assert sent == ["first", "second"]


def test_a_warning_that_cannot_be_written_is_logged(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, for example: a warning must not end a training."""
    (directory / FILE).mkdir()
    warn_run("each rank trained")
    assert caplog.messages[0] == "each rank trained"
    assert "could not be added to those of the run" in caplog.messages[1]
