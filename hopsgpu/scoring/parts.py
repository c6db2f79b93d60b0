"""The parts of a table that are scored one by one: consecutive rows, in the table's order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hopsgpu.data.shard import Shard, ShardFile, Slice
from hopsgpu.data.shuffle import cut_slices
from hopsgpu.data.source import ParquetSource
from hopsgpu.units import MIB

# Largest size of a part in memory.
_MAX_BYTES = 64 * MIB
# Parts for each executor: enough that all executors end at about the same time, and so few that
# their files and messages cost little.
_PARTS_PER_EXECUTOR = 8


@dataclass(frozen=True)
class Part:
    """Consecutive rows of the table.

    Attributes:
        number: number of the part, from 0, in the table's order.
        first: number of its first row in the table, from 0.
        rows: number of rows, at least 1.
        slices: the row groups, whole, or a piece of one.
    """

    number: int
    first: int
    rows: int
    slices: tuple[Slice, ...]


def plan_bounds(source: ParquetSource, executors: int) -> tuple[int, ...]:
    """Return where to divide a table: the rows at which parts begin.

    Parts are whole row groups. Only a row group with more rows than an executor's share is divided,
    into one piece for each share: a row group can only be decoded from its first row on.

    Args:
        executors: the most executors that score at a time.

    Returns:
        The first row of each part, and at the end the number of rows.
    """
    total = source.num_rows
    most = min(_MAX_BYTES, total * source.row_bytes // (executors * _PARTS_PER_EXECUTOR))
    bounds, at = [0], 0
    for rows in (rows for file in source.files for rows in file.groups):
        pieces = min(-(-rows * executors // total), rows)
        size = (at + rows - bounds[-1]) * source.row_bytes
        if at > bounds[-1] and rows and (size > most or pieces > 1):
            bounds.append(at)
        if pieces > 1:
            bounds += [at + rows * number // pieces for number in range(1, pieces + 1)]
        at += rows
    return tuple(bounds) if bounds[-1] == total else (*bounds, total)


def parts_of(source: ParquetSource, bounds: Sequence[int]) -> tuple[Part, ...]:
    """Return the parts of a table, divided as `plan_bounds` returned it."""
    groups = [group for group in _groups(source) if group.rows]
    shares = zip(itertools.pairwise(bounds), cut_slices(groups, bounds), strict=True)
    return tuple(
        Part(number, begin, end - begin, tuple(slices))
        for number, ((begin, end), slices) in enumerate(shares)
    )


def _groups(source: ParquetSource) -> Iterator[Slice]:
    for number, file in enumerate(source.files):
        for group, rows in enumerate(file.groups):
            yield Slice(number, group, 0, rows)


def smallest_batch(bounds: Sequence[int], batch_size: int) -> int:
    """Return the number of rows of the smallest batch of all parts.

    Args:
        bounds: as for `parts_of`.
        batch_size: number of rows of a part's batches, except the last one.
    """
    sizes = (last - first for first, last in itertools.pairwise(bounds) if last > first)
    return min(size % batch_size or batch_size for size in sizes)


def shard_of(source: ParquetSource) -> Shard:
    """Return a shard from which any part can be read."""
    files = tuple(ShardFile(file.name, file.size) for file in source.files)
    return Shard(source.url, files, (), source.row_bytes, source.schema, source.refused)


def place_of(source: ParquetSource, part: Part) -> str:
    """Return in words which rows a part has, and where they are on the lake."""
    rows = f"rows {part.first:,} to {part.first + part.rows - 1:,} of {source.url}"
    spans = []
    for file, slices in itertools.groupby(part.slices, key=lambda piece: piece.file):
        numbers = [piece.group for piece in slices]
        name = source.files[file].name or source.url.rpartition("/")[2]
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        spans.append(f"{name}, row group{'s' * (len(numbers) > 1)} {span}")
    piece = part.slices[0]
    if piece.rows < source.files[piece.file].groups[piece.group]:
        spans[0] += f", its rows {piece.first:,} to {piece.first + piece.rows - 1:,}"
    more = f" and {len(spans) - 2} more files" if len(spans) > 2 else ""
    return f"{rows} ({'; '.join(spans[:2])}{more})"
