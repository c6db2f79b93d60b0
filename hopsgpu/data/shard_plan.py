"""The plan of which rank reads which rows: exact ranges, from footers alone, without a shuffle."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from hopsgpu.data.shard import Shard, ShardFile, Slice
from hopsgpu.data.source import Source
from hopsgpu.errors import ConfigError
from hopsgpu.units import counted

REMAINDERS = ("drop", "pad", "keep")
# Places in the data that a rank's rows come from: with far fewer, sorted data would bias the rank.
_PLACES = 32


def check_dealing(remainder: object, seed: object) -> None:
    """Raise an error unless rows can be dealt with these arguments.

    Raises:
        ConfigError: the remainder is another string, or the seed is not an integer ≥ 0.
    """
    if remainder not in REMAINDERS:
        raise ConfigError(
            f"remainder={remainder!r}: must be 'drop' (some rows are left out), 'pad' (some are"
            " repeated) or 'keep' (some ranks have a row more)"
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"seed={seed!r}: must be an integer ≥ 0")


def plan_slices(
    groups: Sequence[Sequence[int]], ranks: int, *, remainder: str = "drop", seed: int = 0
) -> tuple[tuple[Slice, ...], ...]:
    """Return the rows of each rank.

    The row groups are put into an order that the seed determines, so that sorted data does not bias
    a rank, and the rows in that order are cut into one range for each rank. A row group with more
    than a thirty-second of a rank's rows is put into that order in parts, which several ranks
    read.

    Args:
        groups: number of rows of each row group of each file.
        ranks: number of ranks of the gang.
        remainder: what happens to the rows beyond a multiple of the number of ranks: "drop" leaves
            them out and "pad" repeats other rows, so that all ranks have equally many rows; with
            "keep" every row is read once, and some ranks have one row more than others.
        seed: determines the order of the row groups, or of their parts.

    Raises:
        ConfigError: there are fewer rows than ranks, or `check_dealing` refuses an argument.
    """
    check_dealing(remainder, seed)
    total = sum(map(sum, groups))
    if total < ranks:
        raise ConfigError(
            f"{counted(total, 'row')} for {counted(ranks, 'rank')}: each rank needs at least one"
            " row; use fewer workers"
        )
    order = [Slice(f, g, 0, n) for f, rows in enumerate(groups) for g, n in enumerate(rows) if n]
    if ranks > 1:
        most = total / (_PLACES * ranks)
        order = [part for whole in order for part in _parts(whole, round(whole.rows / most))]
    random.Random(seed).shuffle(order)
    least, over = divmod(total, ranks)
    if remainder == "pad" and over:
        order += _first_rows(order, ranks - over)
        least, over = least + 1, 0
    longer = over if remainder == "keep" else 0
    ends = [rank * least + min(rank, longer) for rank in range(ranks + 1)]
    return tuple(tuple(_gathered(share)) for share in _ranges(order, ends))


def _parts(whole: Slice, parts: int) -> Iterator[Slice]:
    """Yield the slice in `parts` parts, but at most one for each row, and at least one."""
    parts = max(1, min(parts, whole.rows))
    begins = [whole.first + number * whole.rows // parts for number in range(parts + 1)]
    for begin, end in itertools.pairwise(begins):
        yield whole._replace(first=begin, rows=end - begin)


def _gathered(share: Iterable[Slice]) -> Iterator[Slice]:
    """Yield the slices by row group and in its order, joined, so that each group is read once."""
    groups: dict[tuple[int, int], list[Slice]] = {}
    for part in share:
        groups.setdefault((part.file, part.group), []).append(part)
    for parts in groups.values():
        last, *others = sorted(parts)
        for part in others:
            if last.first + last.rows == part.first:
                last = last._replace(rows=last.rows + part.rows)
            else:
                yield last
                last = part
        yield last


def _first_rows(order: Iterable[Slice], wanted: int) -> list[Slice]:
    repeated = []
    for part in order:
        repeated.append(part._replace(rows=min(part.rows, wanted)))
        wanted -= repeated[-1].rows
        if not wanted:
            break
    return repeated


def _ranges(order: Sequence[Slice], ends: Sequence[int]) -> Iterator[tuple[Slice, ...]]:
    """Yield the rows from each end to the next; the ends count the rows of all slices."""
    begins = [0, *itertools.accumulate(part.rows for part in order)]
    for begin, end in itertools.pairwise(ends):
        first = bisect.bisect_right(begins, begin) - 1
        last = bisect.bisect_left(begins, end)
        share = list(order[first:last])
        share[-1] = share[-1]._replace(rows=end - begins[last - 1])
        skipped = begin - begins[first]
        head = share[0]
        share[0] = head._replace(first=head.first + skipped, rows=head.rows - skipped)
        yield tuple(share)


def plan_shards(
    source: Source, ranks: int, *, remainder: str = "drop", seed: int = 0
) -> tuple[Shard, ...]:
    """Return the shard of each rank.

    Args:
        source: the data.
        ranks: number of ranks of the gang.
        remainder: as for `plan_slices`.
        seed: as for `plan_slices`.

    Raises:
        ConfigError: as for `plan_slices`.
    """
    shares = plan_slices(
        [file.groups for file in source.files], ranks, remainder=remainder, seed=seed
    )
    return tuple(_shard(source, share) for share in shares)


def _shard(source: Source, share: Sequence[Slice]) -> Shard:
    # A rank receives the names of its own files only.
    numbers = {number: place for place, number in enumerate(sorted({s.file for s in share}))}
    files = (source.files[number] for number in numbers)
    return Shard(
        url=source.url,
        files=tuple(ShardFile(file.name, file.size) for file in files),
        slices=tuple(Slice(numbers[s.file], s.group, s.first, s.rows) for s in share),
        row_bytes=source.row_bytes,
        schema=source.schema,
        refused=source.refused,
    )
