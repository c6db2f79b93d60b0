"""Runs of several worlds over the same data, each of ranks that read in step in this process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from hopsgpu.data.argument import DEFAULT_NAME, Data, Datasets
from hopsgpu.data.position import Position, common_position
from hopsgpu.data.rank_data import RankData
from hopsgpu.data.rank_shards import RankShards, open_datasets
from hopsgpu.data.shard_plan import plan_shards
from hopsgpu.data.source import ParquetSource, read_source
from hopsgpu.launcher.data_staging import serialized_shards
from hopsgpu.storage.lake import LakePath

# How a rank reads an epoch: its data and the epoch's number in, batches out.
Way = Callable[[RankData, int], Iterator[Mapping[str, Any]]]


def written(directory: Path, rows: int, group: int = 70) -> ParquetSource:
    """Write rows with ids from 0 in three files, as lists and as columns; return the source."""
    directory.mkdir()
    numbers = np.arange(rows)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 4).astype("f4")), 4)
    table = pa.table({"id": numbers, "x": lists, "y": numbers * 2.0})
    share = -(-rows // 3)
    for number in range(3):
        part = table[number * share : (number + 1) * share]
        parquet.write_table(part, directory / f"{number}.parquet", row_group_size=group)
    return read_source(LakePath(f"file://{directory}"))


def only_rank(lake: Path, kept: Path | None = None, budget: int | None = None) -> RankData:
    """Return all Parquet below a directory as the data of a gang's only rank."""
    (shard,) = plan_shards(read_source(LakePath(f"file://{lake}")), 1)
    return RankData(shard, kept, budget)


@dataclass
class Worlds:
    """A run: the position that its last checkpoint has, and the ids that ranks were handed.

    Attributes:
        source: the data.
        directory: directory for what ranks cache.
        remainder: as in `Data`.
        position: position of the last checkpoint; None before the first one.
        kept: ids by epoch that were handed out before a checkpoint.
        lost: ids by epoch that were handed out after the last checkpoint of a world.
    """

    source: ParquetSource
    directory: Path
    remainder: str = "drop"
    position: Position | None = None
    kept: dict[int, Counter[int]] = field(default_factory=dict)
    lost: dict[int, Counter[int]] = field(default_factory=dict)
    _number: Iterator[int] = field(default_factory=itertools.count)

    def dealt(self, ranks: int) -> list[RankShards]:
        datasets = Datasets({DEFAULT_NAME: Data("/x", self.remainder, seed=3)}, is_single=True)
        parts = serialized_shards(datasets, {DEFAULT_NAME: self.source}, ranks, self.position)
        return [RankShards.load(part) for part in parts]

    def train(
        self, ranks: int, way: Way, *, epochs: int, save_at: int | None = None, then: int = 0
    ) -> list[list[int]]:
        """Train in one world.

        Args:
            ranks: number of ranks.
            way: how each rank reads.
            epochs: number of epochs of the whole run.
            save_at: number of batches in this world after which rank 0 saves, and the others do
                not; None to train to the end.
            then: number of batches after the checkpoint, until the world is lost.

        Returns:
            The ids that each rank was handed, in order.
        """
        found: list[list[int]] = []
        position = None
        for rank, mine in enumerate(self.dealt(ranks)):
            place = self.directory / f"{next(self._number)}"
            view = open_datasets(mine, place, ranks)
            data = view.named[DEFAULT_NAME]
            found.append([])
            with data:
                steps = self._steps(data, way, epochs)
                for number, (epoch, ids) in enumerate(steps, start=1):
                    is_kept = save_at is None or number <= save_at
                    into = self.kept if is_kept else self.lost
                    into.setdefault(epoch, Counter()).update(ids)
                    found[-1] += ids
                    if number == save_at and not rank:
                        fields = view.position().as_fields()
                        position = Position.from_fields(fields)
                    if save_at is not None and number == save_at + then:
                        break
                steps.close()
        if position is not None:
            self.position = common_position([position])
        return found

    @staticmethod
    def _steps(
        data: RankData, way: Way, epochs: int
    ) -> Generator[tuple[int, list[int]], None, None]:
        for epoch in range(data.epoch, epochs):
            for batch in way(data, epoch):
                yield epoch, [int(n) for n in batch["id"]]
