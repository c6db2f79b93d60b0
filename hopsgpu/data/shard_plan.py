"""The plan of the shards: which rank reads which rows. It needs only the footers of the files."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hopsgpu.data.position import Leg
from hopsgpu.data.shard import Shard, ShardFile, Slice
from hopsgpu.data.shuffle import cut_slices, first_rows, window_rows
from hopsgpu.data.source import ParquetSource
from hopsgpu.errors import ConfigError
from hopsgpu.units import count_of

REMAINDERS = ("drop", "pad", "keep")
# A rank's rows come from about this many places in the data: with far fewer places, sorted data
# would bias the rank.
_MIN_PARTS = 32


def check_dealing(remainder: object, seed: object) -> None:
    """Raise a ConfigError for another remainder, or a seed that is no integer ≥ 0."""
    if remainder not in REMAINDERS:
        raise ConfigError(
            f"remainder={remainder!r}: must be 'drop' (some rows are left out), 'pad' (some are"
            " repeated) or 'keep' (some ranks have a row more)"
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"seed={seed!r}: must be an integer ≥ 0")


# Rows of one row group, in order: all of them, a part, or the rest after rows were left out.
GroupRows = tuple[Slice, ...]


def plan_slices(
    groups: Sequence[Sequence[int]], ranks: int, *, remainder: str = "drop", seed: int = 0
) -> tuple[tuple[Slice, ...], ...]:
    """Return the rows of each rank.

    The row groups get a random order, so that sorted data does not bias a rank. The rows in that
    order are cut into one range for each rank. A row group with more than a thirty-second of a
    rank's rows is divided before; several ranks may read it.

    Args:
        groups: number of rows of each row group of each file.
        remainder, seed: as in `argument.Data`.

    Raises:
        ConfigError: there are fewer rows than ranks, or `check_dealing` refuses an argument.
    """
    check_dealing(remainder, seed)
    total = sum(map(sum, groups))
    if total < ranks:
        raise ConfigError(
            f"{count_of(total, 'row')} for {count_of(ranks, 'rank')}: each rank needs at least one"
            " row; use fewer workers"
        )
    return _deal(_row_groups(groups), ranks, remainder, random.Random(seed))


def _row_groups(groups: Sequence[Sequence[int]]) -> list[GroupRows]:
    return [(Slice(f, g, 0, n),) for f, rows in enumerate(groups) for g, n in enumerate(rows) if n]


def _deal(
    groups: Iterable[GroupRows], ranks: int, remainder: str, random_: random.Random
) -> tuple[tuple[Slice, ...], ...]:
    parts = list(groups)
    total = sum(map(_rows, parts))
    if ranks > 1:
        limit = total / (_MIN_PARTS * ranks)
        parts = [part for group in parts for part in _parts(group, round(_rows(group) / limit))]
    random_.shuffle(parts)
    order = [rows for part in parts for rows in part]
    share_rows, surplus = divmod(total, ranks)
    if remainder == "pad" and surplus:
        order += _repeat_rows(order, ranks - surplus)
        share_rows, surplus = share_rows + 1, 0
    longer = surplus if remainder == "keep" else 0
    ends = [rank * share_rows + min(rank, longer) for rank in range(ranks + 1)]
    return tuple(tuple(_join_slices(share)) for share in cut_slices(order, ends))


def _rows(parts: Iterable[Slice]) -> int:
    return sum(part.rows for part in parts)


def _parts(group: GroupRows, parts: int) -> Iterator[GroupRows]:
    """Yield the rows in `parts` parts, but at most one for each row, and at least one."""
    rows = _rows(group)
    parts = max(1, min(parts, rows))
    yield from map(
        tuple, cut_slices(group, [number * rows // parts for number in range(parts + 1)])
    )


def _join_slices(share: Iterable[Slice]) -> Iterator[Slice]:
    """Yield the slices by row group, ordered and joined, so that each group is read once."""
    groups: dict[tuple[int, int], list[Slice]] = {}
    for part in share:
        groups.setdefault((part.file, part.group), []).append(part)
    for parts in groups.values():
        last, *rest = sorted(parts)
        for part in rest:
            if last.first + last.rows == part.first:
                last = last._replace(rows=last.rows + part.rows)
            else:
                yield last
                last = part
        yield last


def _repeat_rows(order: Sequence[Slice], wanted: int) -> list[Slice]:
    """Return the first `wanted` rows, again from the start if there are fewer."""
    repeated = []
    # The rest of an epoch may have fewer rows than there are ranks.
    for part in itertools.cycle(order):
        repeated.append(part._replace(rows=min(part.rows, wanted)))
        wanted -= repeated[-1].rows
        if not wanted:
            break
    return repeated


def remove_rows(groups: Iterable[GroupRows], removed: Iterable[Slice]) -> list[GroupRows]:
    """Return row groups without removed rows, which may be in any order and repeated."""
    of_groups: dict[tuple[int, int], list[Slice]] = {}
    for part in removed:
        of_groups.setdefault((part.file, part.group), []).append(part)
    rests = (
        tuple(_remaining(group, sorted(of_groups.get((group[0].file, group[0].group), ()))))
        for group in groups
    )
    return [rest for rest in rests if rest]


def _remaining(group: GroupRows, removed: Sequence[Slice]) -> Iterator[Slice]:
    number = 0
    for part in group:
        first, end = part.first, part.first + part.rows
        while number < len(removed) and removed[number].first + removed[number].rows <= first:
            number += 1
        at = number
        while at < len(removed) and removed[at].first < end:
            if removed[at].first > first:
                yield part._replace(first=first, rows=removed[at].first - first)
            first = max(first, removed[at].first + removed[at].rows)
            at += 1
        if first < end:
            yield part._replace(first=first, rows=end - first)


@dataclass(frozen=True)
class EpochPlan:
    """The shards of a world, which may continue an epoch that other worlds have started.

    Attributes:
        shards: the whole data's shard of each rank, for later epochs.
        epoch: number of the present epoch.
        rests: the rest of the present epoch, as a shard of each rank; empty if all of it remains.
        legs: the legs of other worlds in the present epoch.
    """

    shards: tuple[Shard, ...]
    epoch: int = 0
    rests: tuple[Shard, ...] = ()
    legs: tuple[Leg, ...] = ()


def plan_epoch(
    source: ParquetSource,
    ranks: int,
    legs: Sequence[Leg] = (),
    *,
    remainder: str = "drop",
    seed: int = 0,
) -> EpochPlan:
    """Return the shards with which a world starts.

    The rest of an epoch is all rows that no rank of an earlier world has received before its last
    checkpoint. The rest is dealt in the same way as the whole data. With "drop", the rest includes
    rows that an earlier world left out; if it has fewer rows than ranks, the epoch has ended.

    Args:
        legs: the legs of earlier worlds in an epoch, in order.
        remainder: as for `plan_slices`.
        seed: as for `plan_slices`; with the number of worlds it determines the order of the rest.

    Raises:
        ConfigError: as for `plan_slices`.
    """
    shards = plan_shards(source, ranks, remainder=remainder, seed=seed)
    if not legs:
        return EpochPlan(shards)
    window = window_rows(source.arrow_schema, source.row_bytes, source.has_even_lists)
    rest = _row_groups([file.groups for file in source.files])
    is_over = False
    for number, leg in enumerate(legs):
        shares = _deal(rest, leg.ranks, remainder, _random_of(seed, number))
        received = [_received_rows(share, leg, source.row_bytes, window) for share in shares]
        is_over = all(is_all for _, is_all in received)
        rest = remove_rows(rest, itertools.chain.from_iterable(rows for rows, _ in received))
    last, total = legs[-1], sum(map(_rows, rest))
    if is_over or total < (ranks if remainder == "drop" else 1):
        return EpochPlan(shards, last.epoch + 1 if last.numbered else 0)
    if not any(leg.batches for leg in legs):
        return EpochPlan(shards, last.epoch)
    shares = _deal(rest, ranks, remainder, _random_of(seed, len(legs)))
    return EpochPlan(
        shards, last.epoch, tuple(_shard(source, share) for share in shares), tuple(legs)
    )


def _random_of(seed: int, worlds: int) -> random.Random:
    return random.Random(f"{seed} {worlds}" if worlds else seed)


def _received_rows(
    share: Sequence[Slice], leg: Leg, row_bytes: int, window: int
) -> tuple[list[Slice], bool]:
    """Return the rows that a rank has received, and whether it has received all batches."""
    order = None if leg.seed is None else (leg.seed, leg.epoch)
    rows: list[Slice] = []
    ends = reader_ends(_rows(share), leg.size, leg.readers)
    for number, part in enumerate(cut_slices(share, ends)):
        batches = len(range(number, leg.batches, leg.readers))
        total = _rows(part)
        if leg.drop_remainder:
            total -= total % leg.size
        rows += first_rows(part, min(batches * leg.size, total), row_bytes, window, order)
    return rows, leg.batches >= batch_count(_rows(share), leg.size, leg.drop_remainder)


def reader_ends(rows: int, size: int, readers: int) -> list[int]:
    """Return the bounds of each reader's part of a shard: 0, then the end of each part.

    Reader n modulo `readers` reads batch n of the shard. The last batch may be smaller than `size`.
    """
    whole_batches, last = divmod(rows, size)
    ends = [0]
    for number in range(readers):
        batches = len(range(number, whole_batches, readers))
        has_last = number == whole_batches % readers
        ends.append(ends[-1] + batches * size + (last if has_last else 0))
    return ends


def batch_count(rows: int, size: int, drop_remainder: bool) -> int:
    return rows // size if drop_remainder else -(-rows // size)


def plan_shards(
    source: ParquetSource, ranks: int, *, remainder: str = "drop", seed: int = 0
) -> tuple[Shard, ...]:
    """Return the shard of each rank; arguments and errors as for `plan_slices`."""
    shares = plan_slices(
        [file.groups for file in source.files], ranks, remainder=remainder, seed=seed
    )
    return tuple(_shard(source, share) for share in shares)


def _shard(source: ParquetSource, share: Sequence[Slice]) -> Shard:
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
        has_even_lists=source.has_even_lists,
    )
