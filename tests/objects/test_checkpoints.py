"""Checkpoints on an object store, to which parts are uploaded in place."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hopsgpu.artifacts.checkpoint_retention import CheckpointOptions
from hopsgpu.artifacts.checkpoints import Checkpoints
from hopsgpu.errors import Cancelled
from hopsgpu.storage import transfer
from hopsgpu.storage.lake import LakePath
from tests.contract import test_checkpoints
from tests.contract.test_checkpoints import found, save, saved
from tests.objects.contracts import contracts_of

# They look at the staging directory, or at a directory without files.
WITHOUT = (
    "test_the_latest_comes_back_as_it_was_saved",
    "test_what_an_earlier_attempt_left_half_done_goes",
    "test_a_damaged_file_is_named",
)
globals().update(contracts_of(test_checkpoints, WITHOUT))


def test_a_part_is_there_once_its_record_is(
    lake: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Checkpoints(lake, 0)
    saved(place, "first", tmp_path)
    write = LakePath.write

    def look_first(self: LakePath, content: bytes) -> None:
        if self.url.endswith(".complete"):
            assert (lake / "2" / "rank-0.0.0" / "state").exists()
            assert found(place, tmp_path / "got") == "first"
        write(self, content)

    monkeypatch.setattr(LakePath, "write", look_first)
    saved(place, "second", tmp_path, step=2)
    assert found(place, tmp_path / "got") == "second"
    assert lake.names() == ("1", "2", "_ranks")
    assert (lake / "2").names() == ("rank-0.0.0", "rank-0.0.0.complete")


def test_what_a_killed_save_left_goes_with_its_step(lake: LakePath, tmp_path: Path) -> None:
    (lake / "2" / "rank-0.0.0" / "state").write(b"half")
    place = Checkpoints(lake, 0, attempt=1)
    saved(place, "again", tmp_path, step=2)
    assert found(place, tmp_path / "got") == "again"
    save(place, tmp_path / "state", 3, keep=1)
    assert lake.names() == ("3", "_ranks")


def test_a_save_that_is_stopped_leaves_nothing(
    lake: LakePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    upload = transfer.upload_files

    def stop_after(*args: object, **named: object) -> object:
        try:
            return upload(*args, **named)  # type: ignore[arg-type]
        finally:
            stop.set()

    monkeypatch.setattr("hopsgpu.artifacts.checkpoints.upload_files", stop_after)
    file = tmp_path / "weights"
    file.write_text("new")
    with pytest.raises(Cancelled):
        Checkpoints(lake, 0).save({"state": file}, CheckpointOptions(1), stop)
    assert lake.names() == ("_ranks",)
    monkeypatch.undo()
    saved(Checkpoints(lake, 0), "new", tmp_path)
    assert found(Checkpoints(lake, 0), tmp_path / "got") == "new"
