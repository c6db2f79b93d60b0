"""The shards that a rank receives, and the data that it opens from them: `context().data`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.data.cache import default_budget
from hopsgpu.data.rank_data import RankData
from hopsgpu.data.shard import Shard
from hopsgpu.errors import StoreError
from hopsgpu.units import MIB

# The most bytes of all ranks' shards, which the driver has in memory: some millions of row groups.
MOST_SHARD_BYTES = 64 * MIB
# File names differ in little, so more effort saves little.
_EFFORT = 1


@dataclass(frozen=True)
class RankShards:
    """The shards of one rank.

    Attributes:
        shards: the shards, by the name of the data.
        single: whether the data was given without a name.
    """

    shards: Mapping[str, Shard]
    single: bool

    def dump(self) -> bytes:
        """Return the shards as compressed JSON, which is sent to the rank."""
        shards = {name: shard.dump().decode() for name, shard in self.shards.items()}
        content = {"single": self.single, "shards": shards}
        return zlib.compress(json.dumps(content).encode(), _EFFORT)

    @classmethod
    def load(cls, dumped: bytes) -> RankShards:
        """Return the shards that `dump` encoded.

        Raises:
            StoreError: the bytes are of another version of hopsgpu, or damaged.
        """
        try:
            content = json.loads(zlib.decompress(dumped))
            shards = {name: Shard.load(s.encode()) for name, s in content["shards"].items()}
            return cls(shards, bool(content["single"]))
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"these shards are of another version of hopsgpu ({error!r}): use one version at"
                " the driver and in the ranks"
            ) from error


def parts(budget: int, sizes: Sequence[int]) -> list[int]:
    """Return the parts of a budget, in proportion to the sizes.

    So the parts suffice for all of the data, or each is too small for its own.
    """
    whole = max(sum(sizes), 1)
    return [budget * size // whole for size in sizes]


def opened(dealt: RankShards, directory: Path, sharers: int) -> RankData | dict[str, RankData]:
    """Return a rank's data, which is cached below a directory.

    Args:
        dealt: the rank's shards.
        directory: the directory, created if it does not exist; the caller removes it.
        sharers: number of ranks that cache their data on this disk.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    sizes = [shard.num_rows * shard.row_bytes for shard in dealt.shards.values()]
    budgets = parts(default_budget(directory, sharers), sizes)
    found = {
        name: RankData(shard, directory, budget)
        for (name, shard), budget in zip(dealt.shards.items(), budgets, strict=True)
    }
    return next(iter(found.values())) if dealt.single else found
