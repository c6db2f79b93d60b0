"""The plan of which rank reads which rows: exact ranges, from footers alone, without a shuffle."""

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


# A row group's rows, or a part of them: consecutive in the file, but for rows that are left out.
Bundle = tuple[Slice, ...]


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
            f"{count_of(total, 'row')} for {count_of(ranks, 'rank')}: each rank needs at least one"
            " row; use fewer workers"
        )
    return _dealt(_whole(groups), ranks, remainder, random.Random(seed))


def _whole(groups: Sequence[Sequence[int]]) -> list[Bundle]:
    return [(Slice(f, g, 0, n),) for f, rows in enumerate(groups) for g, n in enumerate(rows) if n]


def _dealt(
    bundles: Iterable[Bundle], ranks: int, remainder: str, chance: random.Random
) -> tuple[tuple[Slice, ...], ...]:
    """Return the rows of each rank, of row groups of which rows may be left out."""
    whole = list(bundles)
    total = sum(map(_rows, whole))
    if ranks > 1:
        most = total / (_PLACES * ranks)
        whole = [part for one in whole for part in _parts(one, round(_rows(one) / most))]
    chance.shuffle(whole)
    order = [part for bundle in whole for part in bundle]
    least, over = divmod(total, ranks)
    if remainder == "pad" and over:
        order += _first_rows(order, ranks - over)
        least, over = least + 1, 0
    longer = over if remainder == "keep" else 0
    ends = [rank * least + min(rank, longer) for rank in range(ranks + 1)]
    return tuple(tuple(_gathered(share)) for share in cut_slices(order, ends))


def _rows(parts: Iterable[Slice]) -> int:
    return sum(part.rows for part in parts)


def _parts(whole: Bundle, parts: int) -> Iterator[Bundle]:
    """Yield the bundle in `parts` parts, but at most one for each row, and at least one."""
    rows = _rows(whole)
    parts = max(1, min(parts, rows))
    yield from map(
        tuple, cut_slices(whole, [number * rows // parts for number in range(parts + 1)])
    )


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


def _first_rows(order: Sequence[Slice], wanted: int) -> list[Slice]:
    repeated = []
    # The rest of an epoch may have fewer rows than there are ranks.
    for part in itertools.cycle(order):
        repeated.append(part._replace(rows=min(part.rows, wanted)))
        wanted -= repeated[-1].rows
        if not wanted:
            break
    return repeated


def without(bundles: Iterable[Bundle], gone: Iterable[Slice]) -> list[Bundle]:
    """Return row groups without the rows of some slices.

    Args:
        bundles: one for each row group, with its rows in order.
        gone: rows to leave out, in any order; some may be given several times.
    """
    of_groups: dict[tuple[int, int], list[Slice]] = {}
    for part in gone:
        of_groups.setdefault((part.file, part.group), []).append(part)
    left = []
    for bundle in bundles:
        parts = sorted(of_groups.get((bundle[0].file, bundle[0].group), ()))
        if rest := tuple(_outside(bundle, parts)):
            left.append(rest)
    return left


def _outside(bundle: Bundle, gone: Sequence[Slice]) -> Iterator[Slice]:
    number = 0
    for part in bundle:
        first, end = part.first, part.first + part.rows
        while number < len(gone) and gone[number].first + gone[number].rows <= first:
            number += 1
        at = number
        while at < len(gone) and gone[at].first < end:
            if gone[at].first > first:
                yield part._replace(first=first, rows=gone[at].first - first)
            first = max(first, gone[at].first + gone[at].rows)
            at += 1
        if first < end:
            yield part._replace(first=first, rows=end - first)


@dataclass(frozen=True)
class EpochPlan:
    """The shards of a world that may continue an epoch which other worlds have begun.

    Attributes:
        shards: the whole data's shard of each rank, for later epochs.
        epoch: number of the present epoch.
        rests: the rest of the present epoch, as a shard of each rank; empty if all of it remains.
        legs: what other worlds have trained of the present epoch.
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
    """Return the shards with which a world begins.

    The rest of an epoch is all its rows that no rank of an earlier world was handed, up to the
    checkpoint from which the next world continued. It is dealt as the whole data is. With "drop",
    rows that an earlier world left out are in the rest too; if it has fewer rows than there are
    ranks, the epoch is over.

    Args:
        source: the data.
        ranks: number of ranks of the world.
        legs: what earlier worlds trained of an epoch, in order.
        remainder: as for `plan_slices`.
        seed: as for `plan_slices`; with the number of worlds it determines the order of the rest.

    Raises:
        ConfigError: as for `plan_slices`.
    """
    shards = plan_shards(source, ranks, remainder=remainder, seed=seed)
    if not legs:
        return EpochPlan(shards)
    window = window_rows(source.arrow_schema, source.row_bytes)
    rest = _whole([file.groups for file in source.files])
    is_over = False
    for number, leg in enumerate(legs):
        shares = _dealt(rest, leg.ranks, remainder, _chance(seed, number))
        handed = [_handed(share, leg, source.row_bytes, window) for share in shares]
        is_over = all(over for _, over in handed)
        rest = without(rest, itertools.chain.from_iterable(rows for rows, _ in handed))
    last, total = legs[-1], sum(map(_rows, rest))
    if is_over or total < (ranks if remainder == "drop" else 1):
        return EpochPlan(shards, last.epoch + 1 if last.numbered else 0)
    if not any(leg.batches for leg in legs):
        return EpochPlan(shards, last.epoch)
    shares = _dealt(rest, ranks, remainder, _chance(seed, len(legs)))
    return EpochPlan(
        shards, last.epoch, tuple(_shard(source, share) for share in shares), tuple(legs)
    )


def _chance(seed: int, worlds: int) -> random.Random:
    return random.Random(f"{seed} {worlds}" if worlds else seed)


def _handed(
    share: Sequence[Slice], leg: Leg, row_bytes: int, window: int
) -> tuple[list[Slice], bool]:
    """Return the rows of its shard that a rank was handed, and whether those are all batches."""
    order = None if leg.seed is None else (leg.seed, leg.epoch)
    rows: list[Slice] = []
    ends = reader_ends(_rows(share), leg.size, leg.readers)
    for number, part in enumerate(cut_slices(share, ends)):
        batches = len(range(number, leg.batches, leg.readers))
        handed = min(batches * leg.size, whole_rows(_rows(part), leg.size, leg.drop_remainder))
        rows += first_rows(part, handed, row_bytes, window, order)
    return rows, leg.batches >= batch_count(_rows(share), leg.size, leg.drop_remainder)


def reader_ends(rows: int, size: int, readers: int) -> list[int]:
    """Return where each reader's part of a shard ends, after 0 for where the first one begins.

    Batch n of the shard is one of reader n modulo `readers`. All batches have `size` rows, except
    the last one.
    """
    whole, last = divmod(rows, size)
    ends = [0]
    for number in range(readers):
        batches = len(range(number, whole, readers))
        ends.append(ends[-1] + batches * size + (last if number == whole % readers else 0))
    return ends


def whole_rows(rows: int, size: int, drop_remainder: bool) -> int:
    """Return the number of rows in an epoch's batches."""
    return rows // size * size if drop_remainder else rows


def batch_count(rows: int, size: int, drop_remainder: bool) -> int:
    """Return the number of batches of an epoch."""
    whole, rest = divmod(rows, size)
    return whole + bool(rest and not drop_remainder)


def plan_shards(
    source: ParquetSource, ranks: int, *, remainder: str = "drop", seed: int = 0
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
    )
