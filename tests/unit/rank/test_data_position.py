"""A checkpoint of a gang with data: what its record has, and how the next gang continues."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

import hopsgpu
from hopsgpu.artifacts.checkpoint_positions import latest_positions
from hopsgpu.artifacts.checkpoint_retention import CheckpointOptions
from hopsgpu.artifacts.checkpoint_upload import PendingCheckpoints
from hopsgpu.artifacts.checkpoints import Checkpoints
from hopsgpu.data.argument import DEFAULT_NAME, Data, Datasets
from hopsgpu.data.position import Position, common_position
from hopsgpu.data.source import ParquetSource, read_source
from hopsgpu.errors import StoreError
from hopsgpu.launcher.data_staging import serialized_shards
from hopsgpu.rank.blocked_time import BlockedTime
from hopsgpu.rank.checkpoint_agreement import ProposalWords
from hopsgpu.rank.context import DATA, VARIABLE, Context
from hopsgpu.storage.lake import LakePath

ROWS, SIZE = 500, 10
DATASETS = Datasets({DEFAULT_NAME: Data("/x", "keep")}, is_single=True)


@pytest.fixture
def source(tmp_path: Path) -> ParquetSource:
    parquet.write_table(pa.table({"id": range(ROWS)}), tmp_path / "0.parquet", row_group_size=60)
    return read_source(LakePath(f"file://{tmp_path}/0.parquet"))


@pytest.fixture
def lake(tmp_path: Path) -> LakePath:
    return LakePath(f"file://{tmp_path}/lake")


class Ranks:
    """The ranks of one attempt, each with its directory, which this process is in turn."""

    def __init__(self, directory: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._lake = lake
        self._monkeypatch = monkeypatch

    def run(self, attempt: int, parts: tuple[bytes, ...], act: Callable[[], None]) -> None:
        for rank, part in enumerate(parts):
            place = self._directory / f"{attempt}-{rank}"
            place.mkdir()
            ProposalWords(place)
            BlockedTime(place)
            (place / DATA).write_bytes(part)
            urls = (self._lake.url, f"{self._lake.url}/logs")
            model = place / "model"
            Context(rank, 0, len(parts), "here", (), "worker", "r", attempt, model, *urls).dump(
                place / "context"
            )
            self._monkeypatch.setenv(VARIABLE, str(place / "context"))
            act()
            saves = PendingCheckpoints(place)
            for handed in saves.pending():
                there = Checkpoints(self._lake, rank, attempt, len(parts))
                assert saves.upload(handed, there, threading.Event())[1] is None


@pytest.fixture
def ranks(tmp_path: Path, lake: LakePath, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, lake, monkeypatch)


def next_parts(
    source: ParquetSource, ranks: int, lake: LakePath, resumed: LakePath | None = None
) -> tuple[bytes, ...]:
    places = [Checkpoints(place, 0) for place in (lake, resumed) if place is not None]
    found = [Position.from_fields(fields) for fields in latest_positions(places)]
    return serialized_shards(
        DATASETS, {DEFAULT_NAME: source}, ranks, common_position(found) if found else None
    )


@pytest.mark.parametrize("savers", [{0}, {1}, {0, 1, 2, 3}])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_next_gang_has_the_rest_of_the_epoch(
    source: ParquetSource,
    lake: LakePath,
    ranks: Ranks,
    tmp_path: Path,
    savers: set[int],
    is_resumed: bool,
) -> None:
    trained: Counter[int] = Counter()
    state = tmp_path / "state"
    state.write_text("x")

    def train(batches: int) -> None:
        gang = hopsgpu.context()
        data = gang.data
        assert data is not None and not isinstance(data, dict)
        for step, batch in enumerate(data.batches(SIZE, shuffle=True, epoch=data.epoch), start=1):
            if step <= batches:
                trained.update(batch["id"].tolist())
            if step == batches and gang.rank in savers:
                gang.save_checkpoint(state, step + 1000 * gang.attempt)
            if step == batches + 2:
                break

    ranks.run(0, next_parts(source, 2, lake), lambda: train(7))
    record = next((tmp_path / "lake" / "7").glob("*.complete"))
    assert set(json.loads(record.read_text())) == {"files", "position"}
    ranks.run(1, next_parts(source, 3, lake), lambda: train(5))
    into = LakePath(f"file://{tmp_path}/new") if is_resumed else lake
    resumed = lake if is_resumed else None
    ranks.run(2, next_parts(source, 4, into, resumed), lambda: train(1000))
    assert trained == Counter(range(ROWS))


@pytest.mark.parametrize("batches", [7, ROWS // SIZE // 2], ids=["in an epoch", "after an epoch"])
@pytest.mark.parametrize("does_load", [True, False])
def test_rank_that_does_not_load_the_checkpoint_is_warned(
    source: ParquetSource,
    lake: LakePath,
    ranks: Ranks,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    batches: int,
    does_load: bool,
) -> None:
    state = tmp_path / "state"
    state.write_text("x")

    def train() -> None:
        gang = hopsgpu.context()
        data = gang.data
        assert data is not None and not isinstance(data, dict)
        if does_load and gang.rank == 0:  # the others get its weights
            gang.latest_checkpoint()
        for epoch in (data.epoch, data.epoch + 1):
            for step, _ in enumerate(data.batches(SIZE, epoch=epoch), start=1):
                if step == batches:
                    break
            gang.save_checkpoint(state, 1000 * gang.attempt + epoch)

    ranks.run(0, next_parts(source, 2, lake), train)
    assert "latest_checkpoint()" not in caplog.text
    ranks.run(1, next_parts(source, 2, lake), train)
    told = [one for one in caplog.messages if "has not called latest_checkpoint()" in one]
    assert len(told) == (0 if does_load else 1)


def test_without_a_complete_step_the_data_begins_anew(
    source: ParquetSource, lake: LakePath
) -> None:
    assert latest_positions([Checkpoints(lake, 0)]) == []


def test_a_checkpoint_without_data_has_no_position(lake: LakePath, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("x")
    place = Checkpoints(lake, 0)
    place.save({"state": tmp_path / "state"}, CheckpointOptions(3))
    (record,) = (tmp_path / "lake" / "3").glob("*.complete")
    assert set(json.loads(record.read_text())) == {"files"}
    assert latest_positions([place]) == []
    record.write_text("half a fi")
    with pytest.raises(StoreError, match="complete"):
        latest_positions([place])
