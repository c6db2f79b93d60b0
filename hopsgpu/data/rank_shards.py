"""The shards that a rank receives, and the datasets that the rank makes of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from hopsgpu.data.cache import default_budget
from hopsgpu.data.position import Position
from hopsgpu.data.prefetch import NOT_COUNTED
from hopsgpu.data.rank_data import DataStart, RankData
from hopsgpu.data.shard import Shard
from hopsgpu.errors import StoreError
from hopsgpu.units import MIB

# The most bytes of all ranks' shards, which the driver has in memory: some millions of row groups.
MAX_SHARD_BYTES = 64 * MIB
# File names differ in little, so more effort saves little.
_COMPRESSION_LEVEL = 1


@dataclass(frozen=True)
class RankShards:
    """The shards of one rank.

    Attributes:
        shards: the shards, by the name of the data.
        is_single: whether the data was passed without a name.
        ranks: number of ranks of the gang.
        epochs: number of the present epoch, by name; 0 for missing names.
        rests: the rest of the present epoch, by name, if a part of it is trained.
        position: position of earlier worlds in the present epochs.
    """

    shards: Mapping[str, Shard]
    is_single: bool
    ranks: int = 1
    epochs: Mapping[str, int] = field(default_factory=dict)
    rests: Mapping[str, Shard] = field(default_factory=dict)
    position: Position = field(default_factory=lambda: Position({}))

    def start_of(self, name: str) -> DataStart:
        legs = self.position.legs.get(name, ())
        return DataStart(self.epochs.get(name, 0), self.rests.get(name), legs, self.ranks, name)

    def dump(self) -> bytes:
        """Return the shards as compressed JSON, which is sent to the rank."""
        content = {
            "single": self.is_single,
            "ranks": self.ranks,
            "shards": {name: shard.dump().decode() for name, shard in self.shards.items()},
            "epochs": dict(self.epochs),
            "rests": {name: shard.dump().decode() for name, shard in self.rests.items()},
            "position": self.position.as_fields(),
        }
        return zlib.compress(json.dumps(content).encode(), _COMPRESSION_LEVEL)

    @classmethod
    def load(cls, dumped: bytes) -> RankShards:
        """Return the shards that `dump` encoded.

        Raises:
            StoreError: the bytes are of another version of hopsgpu, or damaged.
        """
        try:
            content = json.loads(zlib.decompress(dumped))
            shards, rests = (
                {name: Shard.load(s.encode()) for name, s in content[key].items()}
                for key in ("shards", "rests")
            )
            return cls(
                shards,
                bool(content["single"]),
                content["ranks"],
                content["epochs"],
                rests,
                Position.from_fields(content["position"]),
            )
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"these shards are of another version of hopsgpu ({error!r}): use one version at"
                " the driver and in the ranks"
            ) from error


def split_budget(budget: int, sizes: Sequence[int]) -> list[int]:
    """Divide a budget in proportion to sizes: all parts suffice for their data, or none."""
    total = max(sum(sizes), 1)
    return [budget * size // total for size in sizes]


@dataclass(frozen=True)
class RankDatasets:
    """A rank's data by name; `is_single` and `digests` as in `RankShards` and `Position`."""

    named: dict[str, RankData]
    is_single: bool
    digests: Mapping[str, str]

    @property
    def view(self) -> RankData | dict[str, RankData]:
        return next(iter(self.named.values())) if self.is_single else self.named

    @property
    def continued_epochs(self) -> dict[str, int]:
        """Return the first epochs of datasets that continue at a checkpoint, by name."""
        return {name: data.epoch for name, data in self.named.items() if data.is_continued}

    def position(self) -> Position:
        """Return the gang's position, from this rank's point of view."""
        return Position({name: data.legs for name, data in self.named.items()}, self.digests)


def open_datasets(
    shards: RankShards,
    directory: Path,
    sharers: int,
    waiting: AbstractContextManager[None] = NOT_COUNTED,
) -> RankDatasets:
    """Return a rank's data, which is cached below a directory.

    Args:
        directory: created if it does not exist; the caller removes it.
        sharers: number of ranks that cache their data on this disk.
        waiting: entered each time that the training waits for rows, to count the time.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    sizes = [shard.num_rows * shard.row_bytes for shard in shards.shards.values()]
    budgets = split_budget(default_budget(directory, sharers), sizes)
    named = {
        name: RankData(shard, directory, budget, shards.start_of(name), waiting)
        for (name, shard), budget in zip(shards.shards.items(), budgets, strict=True)
    }
    return RankDatasets(named, shards.is_single, shards.position.digests)
