"""The decisive lines that publishing, checkpoints and uploads write to hopsgpu's log."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import pytest

from hopsgpu.artifacts import (
    checkpoint_restore,
    python_environments,
    stale_uploads,
    version_commit,
)
from hopsgpu.artifacts.checkpoint_retention import CheckpointOptions
from hopsgpu.artifacts.checkpoints import Checkpoints, files_of
from hopsgpu.artifacts.log_dir_upload import LogDirUploader
from hopsgpu.artifacts.models import ModelStore
from hopsgpu.artifacts.versions import CLAIMS, STAGING
from hopsgpu.storage.lake import LakePath


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "hopsgpu.artifacts")
    return caplog


@pytest.fixture
def lake(tmp_path: Path) -> LakePath:
    lake = LakePath(f"file://{tmp_path}/lake")
    lake.make()
    return lake


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "weights").write_text("1")
    return directory


def test_a_publish_names_its_version(
    lake: LakePath, files: Path, logged: pytest.LogCaptureFixture
) -> None:
    store = ModelStore(lake.url)
    store.publish(files, "net", tags=["best"])
    published, tagged = logged.messages
    assert f"{lake.url}/net/1" in published and "'best'" in tagged
    store.untag("net", "best")
    store.delete("net", 1)
    assert "version 1" in logged.messages[-1]


def test_a_number_that_another_publisher_has_is_named(
    lake: LakePath, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = lake / "net"
    (home / CLAIMS).make()
    names = LakePath.names

    def names_before_the_other(
        place: LakePath, *, only_directories: bool = False
    ) -> tuple[str, ...]:
        before = names(place, only_directories=only_directories)
        (home / CLAIMS / "1").create()
        return before

    monkeypatch.setattr(LakePath, "names", names_before_the_other)
    assert version_commit.claim(home) == 2
    (message,) = logged.messages
    assert "version 1" in message and home.url in message


def test_removed_leftovers_are_named(lake: LakePath, logged: pytest.LogCaptureFixture) -> None:
    left = lake / STAGING / "dead"
    left.make()
    stale_uploads.sweep(lake, left.stat().modified + 10, age=5)
    (message,) = logged.messages
    assert left.url in message


def test_a_checkpoint_is_named_when_it_is_saved_removed_and_restored(
    lake: LakePath, files: Path, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(lake, 0)
    for step in (1, 2):
        checkpoints.save(files_of(files), CheckpointOptions(step, keep=1))
    checkpoint_restore.download_latest([checkpoints], tmp_path / "copies")
    assert [re.findall(r"step (\d)", message) for message in logged.messages] == [
        ["1"],
        ["2"],
        ["1"],
        ["2"],
    ]
    assert all(lake.url in message for message in logged.messages)


def test_a_python_environment_of_another_process_is_named(
    lake: LakePath, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    archive = tmp_path / "env.zip"
    archive.write_text("archive")
    for _ in range(2):
        python_environments.upload(lake, "key", archive, {"bytes": 7}, threading.Event())
    made, used = logged.messages
    assert f"{lake.url}/environments/key" in made and "another process" in used


def test_a_log_that_cannot_be_uploaded_is_named_once(
    lake: LakePath, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    (directory / "odd?").touch()
    uploads = LogDirUploader(directory, lake, threading.Event())
    (warning,) = uploads.upload_changes()
    assert uploads.upload_changes(is_last=True) == []
    assert logged.messages == [warning] and "'odd?'" in warning
