"""Batches that torch's worker processes read: each once, whatever worlds train them."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.data.rank_data import RankData
from hopsgpu.data.rank_shards import open_datasets
from hopsgpu.data.source import ParquetSource
from hopsgpu.errors import ConfigError
from hopsgpu.units import MIB
from tests.conftest import until
from tests.unit.data.worlds import Way, Worlds, written

ROWS, SIZE = 1_001, 16


@pytest.fixture
def source(tmp_path: Path) -> ParquetSource:
    return written(tmp_path / "lake", ROWS)


@pytest.fixture(autouse=True)
def room_for_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However full this machine's disk is."""
    monkeypatch.setattr("hopsgpu.data.rank_shards.default_budget", lambda *_: 10 * MIB)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield

    def have_ended() -> bool:
        gc.collect()  # an error's traceback may hold a loader, in a circle
        return multiprocessing.active_children() == []

    assert until(have_ended)


def with_process(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {**batch, "process": os.getpid()}


def workers(number: int, shuffle: bool) -> Way:
    def read(data: RankData, epoch: int) -> Iterator[Mapping[str, Any]]:
        dataset = data.torch(SIZE, ["id"], shuffle=shuffle, epoch=epoch)
        return iter(dataset.loader(number, prefetch_factor=4))

    return read


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_batches_that_workers_have_read_ahead_do_not_count(
    source: ParquetSource, tmp_path: Path, shuffle: bool
) -> None:
    run = Worlds(source, tmp_path, "keep")
    run.train(2, workers(3, shuffle), epochs=2, save_at=10, then=2)
    assert sum(run.lost.pop(0).values()) == 2 * 2 * SIZE
    run.train(3, workers(2, shuffle), epochs=2, save_at=5)
    run.train(2, workers(2, shuffle), epochs=2)
    assert run.kept == {0: Counter(range(ROWS)), 1: Counter(range(ROWS))}


def rank_of(source: ParquetSource, directory: Path) -> RankData:
    return open_datasets(Worlds(source, directory).dealt(1)[0], directory / "kept", 1).named["data"]


def test_each_iteration_is_an_epoch_and_has_whole_batches(
    source: ParquetSource, tmp_path: Path
) -> None:
    with rank_of(source, tmp_path) as data:
        loader = data.torch(SIZE, ["id"], shuffle=True).loader(2, collate_fn=with_process)
        orders = []
        for _ in range(2):
            batches = list(loader)
            assert [len(batch["id"]) for batch in batches] == [SIZE] * 62 + [ROWS % SIZE]
            processes = [batch["process"] for batch in batches]
            assert processes[:2] * 31 + processes[:1] == processes
            assert len({*processes, os.getpid()}) == 3
            orders.append([int(n) for batch in batches for n in batch["id"]])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(ROWS)]


def test_the_second_epoch_is_read_from_the_disk(source: ParquetSource, tmp_path: Path) -> None:
    with rank_of(source, tmp_path) as data:
        loader = data.torch(SIZE, ["id"]).loader(2)
        first = [int(n) for batch in loader for n in batch["id"]]
        for file in (tmp_path / "lake").iterdir():
            file.unlink()
        assert [int(n) for batch in loader for n in batch["id"]] == first


def test_a_loop_that_is_left_ends_the_workers(source: ParquetSource, tmp_path: Path) -> None:
    with rank_of(source, tmp_path) as data:
        for _ in itertools.islice(data.torch(SIZE, ["id"]).loader(2), 3):
            pass
        assert [(leg.epoch, leg.batches, leg.readers) for leg in data.legs] == [(0, 3, 2)]


def test_invalid_arguments_of_a_loader_are_refused(source: ParquetSource, tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    with rank_of(source, tmp_path) as data:
        dataset = data.torch(SIZE, ["id"])
        with pytest.raises(ConfigError, match=r"dataset\.loader\(2\)"):
            next(iter(DataLoader(dataset, batch_size=None, num_workers=2)))
        for wrong in (0, -1, True, "2"):
            with pytest.raises(ConfigError, match="num_workers="):
                dataset.loader(wrong)
        with pytest.raises(ConfigError, match="persistent_workers=True"):
            dataset.loader(2, persistent_workers=True)
        with pytest.raises(ConfigError, match="batch_size, shuffle"):
            dataset.loader(2, batch_size=3, shuffle=True)


class Waits:
    """Counts how often the training waited, and in which processes."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended = 0

    def __enter__(self) -> None:
        self.begun.append(os.getpid())

    def __exit__(self, *problem: object) -> None:
        self.ended += 1


def test_the_training_waits_for_each_batch_and_workers_keep_nobody_waiting(
    source: ParquetSource, tmp_path: Path
) -> None:
    waits = Waits()
    dealt = Worlds(source, tmp_path).dealt(1)[0]
    with open_datasets(dealt, tmp_path / "kept", 1, waits).named["data"] as data:
        loader = data.torch(SIZE, ["id"]).loader(2, collate_fn=with_process)
        batches = list(loader)
    # One more for the end.
    assert waits.begun == [os.getpid()] * (len(batches) + 1) and waits.ended == len(waits.begun)
    assert os.getpid() not in {batch["process"] for batch in batches}
