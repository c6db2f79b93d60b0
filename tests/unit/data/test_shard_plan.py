"""Shards: every row once, whatever the row groups."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from hopsgpu.data.shard import Shard, ShardFile, Slice
from hopsgpu.data.shard_plan import plan_shards, plan_slices
from hopsgpu.data.shuffle import split_into_pieces
from hopsgpu.data.source import ParquetSource, SourceFile
from hopsgpu.errors import ConfigError, StoreError

Rows = list[tuple[int, int, int]]


def rows_of(share: tuple[Slice, ...]) -> Rows:
    return [(s.file, s.group, row) for s in share for row in range(s.first, s.first + s.rows)]


def some_groups(chance: random.Random) -> tuple[list[list[int]], Rows]:
    groups = [
        [chance.choice((0, 1, 2, chance.randrange(50))) for _ in range(chance.randrange(5))]
        for _ in range(chance.randrange(1, 6))
    ]
    rows = [
        (f, g, row) for f, own in enumerate(groups) for g, n in enumerate(own) for row in range(n)
    ]
    return groups, rows


@pytest.mark.parametrize("seed", range(150))
def test_every_row_goes_to_one_rank(seed: int) -> None:
    chance = random.Random(seed)
    groups, rows = some_groups(chance)
    ranks = chance.randrange(1, max(2, min(len(rows), 9) + 1))
    if len(rows) < ranks:
        with pytest.raises(ConfigError, match=f"{len(rows)} rows? for {ranks} ranks?"):
            plan_slices(groups, ranks)
        return
    kept = plan_slices(groups, ranks, remainder="keep", seed=seed)
    assert sorted(row for share in kept for row in rows_of(share)) == rows
    lengths = [len(rows_of(share)) for share in kept]
    assert max(lengths) - min(lengths) <= 1
    dropped = plan_slices(groups, ranks, remainder="drop", seed=seed)
    assert {len(rows_of(share)) for share in dropped} == {len(rows) // ranks}
    once = Counter(row for share in dropped for row in rows_of(share))
    assert set(once.values()) == {1}
    padded = plan_slices(groups, ranks, remainder="pad", seed=seed)
    assert {len(rows_of(share)) for share in padded} == {-(-len(rows) // ranks)}
    times = Counter(row for share in padded for row in rows_of(share))
    assert set(times) == set(rows)
    assert sum(times.values()) - len(rows) < ranks
    assert all(part.rows > 0 for plan in (kept, dropped, padded) for s in plan for part in s)


def test_sorted_data_does_not_bias_a_rank() -> None:
    """Of files sorted by label no rank is given one half only."""
    shares = plan_slices([[10] * 100, [10] * 100], 4, seed=1)
    for share in shares:
        of_first = sum(part.rows for part in share if part.file == 0)
        assert 100 < of_first < 400
    assert plan_slices([[10] * 100, [10] * 100], 4, seed=1) == shares
    assert plan_slices([[10] * 100, [10] * 100], 4, seed=2) != shares


@pytest.mark.parametrize("groups", [[[6400]], [[1600], [1600], [1600], [1600]], [[640] * 10]])
@pytest.mark.parametrize("seed", range(3))
def test_sorted_data_in_few_row_groups_does_not_bias_a_rank(
    groups: list[list[int]], seed: int
) -> None:
    """Of 6,400 rows sorted by two labels, each rank of two and of four has both."""
    begins = [0, *itertools.accumulate(itertools.chain(*groups))]
    numbers = [(file, group) for file, rows in enumerate(groups) for group in range(len(rows))]
    for ranks in (2, 4):
        for share in plan_slices(groups, ranks, seed=seed):
            rows = [begins[numbers.index((f, g))] + row for f, g, row in rows_of(share)]
            of_first = sum(row < 3200 for row in rows) / len(rows)
            assert 0.2 < of_first < 0.8
            # Each row group is read once, and in its order.
            order = [(part.file, part.group) for part in share]
            assert [next(run) for _, run in itertools.groupby(order)] == list(dict.fromkeys(order))
            for one, other in itertools.pairwise(share):
                if one[:2] == other[:2]:
                    assert one.first + one.rows < other.first


def test_a_large_row_group_beside_small_ones_does_not_bias_a_rank() -> None:
    """As where what was appended lies beside one compacted file."""
    for share in plan_slices([[64_000], *[[1]] * 64], 2, seed=1):
        of_large = [part for part in share if part.file == 0]
        first = sum(
            min(part.first + part.rows, 32_000) - part.first
            for part in of_large
            if part.first < 32_000
        )
        assert 0.2 < first / 32_000 < 0.8
        assert len(share) < 100, "small row groups are not cut"


def test_slices_of_a_row_group_stay_in_one_piece() -> None:
    """However large it is: each piece reads it from its first row on."""
    slices = [Slice(0, 0, 1000 * n, 900) for n in range(20)]
    slices += [Slice(0, 1, 0, 10), Slice(0, 2, 0, 10)]
    whole, rest = split_into_pieces(slices, 10_000)
    assert (whole, rest) == (tuple(slices[:20]), tuple(slices[20:]))


def test_another_remainder_is_refused() -> None:
    with pytest.raises(ConfigError, match="'drop'.*'pad'.*'keep'"):
        plan_slices([[4]], 2, remainder="none")


def source() -> ParquetSource:
    files = tuple(SourceFile(f"part-{n}.parquet", 1000 + n, (5, 5)) for n in range(4))
    return ParquetSource("file:///lake/x", files, 24, b"\x00schema\xff")


def test_shards_name_their_own_files_only() -> None:
    planned = plan_shards(source(), 4, seed=3)
    whole = source().files
    for shard in planned:
        assert shard.num_rows == 10
        assert {part.file for part in shard.slices} == set(range(len(shard.files)))
        assert all(file in {ShardFile(f.name, f.size) for f in whole} for file in shard.files)
    rows = [
        (shard.files[file].name, group, row)
        for shard in planned
        for file, group, row in rows_of(shard.slices)
    ]
    assert len(set(rows)) == len(rows) == 40


def test_a_shard_travels_as_json() -> None:
    shard = plan_shards(source(), 3, remainder="pad")[1]
    assert Shard.load(shard.dump()) == shard
    many = ParquetSource("file:///x", (SourceFile("", 9, (1000,) * 10_000),), 8, b"")
    assert len(plan_shards(many, 1)[0].dump()) < 200_000


@pytest.mark.parametrize("dumped", [b"", b"{}", b"[1]", b'{"version": 0}', b"\xff"])
def test_invalid_shard_is_refused(dumped: bytes) -> None:
    with pytest.raises(StoreError, match="one version"):
        Shard.load(dumped)
