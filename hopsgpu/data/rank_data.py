"""A rank's view of its data: `context().data`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hopsgpu.data import tensorflow_batches as tensorflow
from hopsgpu.data import torch_batches as torch
from hopsgpu.data.batches import Block, rebatch
from hopsgpu.data.cache import Cache, default_budget
from hopsgpu.data.calendars import check_readable
from hopsgpu.data.columns import Column, checked_names, select
from hopsgpu.data.prefetch import PrefetchIterator
from hopsgpu.data.shard import Shard
from hopsgpu.data.stream import Stream
from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# Blocks, each from one record batch, that are read before they are asked for.
_AHEAD = 3


@dataclass(frozen=True)
class _Wanted:
    """The checked arguments of a request for batches.

    Attributes:
        columns: columns of each batch.
        size: number of rows of a batch.
        seed: seed of the shuffle; None for the shard's order.
        drop_remainder: whether an epoch's last batch is left out if it is smaller.
    """

    columns: Sequence[Column]
    size: int
    seed: int | None
    drop_remainder: bool


class RankData:
    """A rank's shard of the data.

    A context manager: its exit removes what was cached on the local disk. Its methods may be called
    any number of times, and several iterators may be in use at the same time.

    Args:
        shard: the rows.
        directory: directory on the local disk below which they are cached; None for TMPDIR.
        budget: the most bytes that may be cached; None for this rank's part of the disk's free
            space beyond 15 % of its size. Rows beyond the budget are read from the lake in every
            epoch.
    """

    def __init__(
        self, shard: Shard, directory: Path | None = None, budget: int | None = None
    ) -> None:
        self._shard = shard
        directory = Path(tempfile.gettempdir()) if directory is None else directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix="hopsgpu-data-", dir=directory))
        if budget is None:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            budget = default_budget(self._directory, ranks)
        self._cache = Cache(self._directory, budget)

    def __enter__(self) -> RankData:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what was cached on the local disk."""
        # Renamed first, so that a thread that still reads writes nothing into it.
        gone = self._directory.with_name(f"{self._directory.name}-gone")
        with contextlib.suppress(FileNotFoundError):  # it is closed already
            self._directory.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the shard."""
        return self._shard.num_rows

    @property
    def schema(self) -> Any:
        """Return the columns as a pyarrow.Schema."""
        return self._shard.arrow_schema

    def batches(
        self,
        batch_size: int,
        columns: Sequence[str] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        epoch: int = 0,
        drop_remainder: bool = False,
        shapes: Mapping[str, Any] | None = None,
    ) -> Iterator[dict[str, Array]]:
        """Return the rows in batches of NumPy arrays, which are read ahead.

        In the first epoch the rows come from the lake and are cached on the local disk, from which
        later epochs read them. The thread that reads ends with the iterator, also if a loop over
        it ends early.

        Args:
            batch_size: rows of a batch; the last batch of an epoch may be smaller.
            columns: names, or None for all.
            shuffle: False for the order of the shard, whose row groups the launch has shuffled;
                True to shuffle row groups, and the rows of several within a window of 32 MiB.
            seed: determines, with the epoch, the order of the rows.
            epochs: number of epochs, each of which has all rows; None for no end.
            epoch: number of the first epoch.
            drop_remainder: whether to leave out an epoch's last batch if it is smaller.
            shapes: shape of a row by column, for columns of lists, as {"image": (28, 28)}.

        Returns:
            An iterator of dicts with an array by column, which has the rows along its first axis.
            The arrays are read-only: copy one to change it.

        Raises:
            ConfigError: an argument is invalid, or a column has a type, dates or timestamps that
                are not converted; from the iterator: a column has such dates or timestamps, or
                nulls for which its NumPy type has no value.
            StoreError: from the iterator: the lake refused, or the data has changed.
        """
        wanted = self._wanted(batch_size, columns, shuffle, seed, drop_remainder, shapes)
        first = _whole(epoch, "epoch", 0)
        numbers: Iterable[int] = itertools.count(first)
        if epochs is not None:
            numbers = range(first, first + _whole(epochs, "epochs", 1))
        return self._batches(wanted, numbers)

    def torch(
        self,
        batch_size: int,
        columns: Sequence[str] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        drop_remainder: bool = False,
        shapes: Mapping[str, Any] | None = None,
        pin_memory: bool | None = None,
    ) -> Any:
        """Return the rows as a torch IterableDataset of batches.

        Use it directly, or in `DataLoader(dataset, batch_size=None)` without workers: it reads
        ahead itself. Each iteration over it is an epoch, with its own order if the rows are
        shuffled. Its length is the number of batches.

        Args:
            batch_size: as for `batches`.
            columns: as for `batches`.
            shuffle: as for `batches`.
            seed: as for `batches`.
            epoch: number of the first iteration's epoch; `set_epoch()` sets that of the next one.
            drop_remainder: as for `batches`.
            shapes: as for `batches`.
            pin_memory: whether tensors are page-locked, so that copies to the GPU need no wait;
                None to have them page-locked if there is a GPU.

        Returns:
            A dataset of dicts: tensors of numbers, lists of str for strings, of bytes for binary,
            of tensors for lists of numbers of different lengths, and of NumPy arrays for other
            lists.

        Raises:
            ConfigError: as for `batches`, or a column has dates or times.
        """
        wanted = self._wanted(batch_size, columns, shuffle, seed, drop_remainder, shapes)
        first = _whole(epoch, "epoch", 0)
        batches = functools.partial(self._batches, wanted)
        return torch.dataset(batches, wanted.columns, self._count(wanted), first, pin_memory)

    def tensorflow(
        self,
        batch_size: int,
        columns: Sequence[str] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        drop_remainder: bool = False,
        shapes: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the rows as a tf.data.Dataset of batches.

        Each iteration over it is an epoch, with its own order if the rows are shuffled. The dataset
        knows its cardinality.

        Args:
            batch_size: as for `batches`.
            columns: as for `batches`.
            shuffle: as for `batches`.
            seed: as for `batches`.
            epoch: number of the first iteration's epoch.
            drop_remainder: as for `batches`; if true, the batch dimension is known.
            shapes: as for `batches`.

        Returns:
            A dataset of dicts: tensors of numbers, of tf.string for strings and binary, and
            ragged tensors for lists of numbers of different lengths.

        Raises:
            ConfigError: as for `batches`, or a column has dates, times or nested lists.
        """
        wanted = self._wanted(batch_size, columns, shuffle, seed, drop_remainder, shapes)
        first = _whole(epoch, "epoch", 0)
        batches = functools.partial(self._batches, wanted)
        rows = wanted.size if drop_remainder else None
        return tensorflow.dataset(batches, wanted.columns, self._count(wanted), first, rows)

    def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        """Return all rows of the shard as a pyarrow.Table, in memory.

        Raises:
            ConfigError: the names are not those of columns, each once, or a column has dates or
                timestamps that are not converted.
            StoreError: the lake refused, or the data has changed.
        """
        import pyarrow as pa

        names = checked_names(self.schema, columns)
        check_readable(self._shard.refused, names)
        with Stream(self._shard, self._cache, names, self.schema) as stream:
            return pa.Table.from_batches([chunk.batch for chunk in stream.chunks()]).select(names)

    def _wanted(
        self,
        batch_size: int,
        columns: Sequence[str] | None,
        shuffle: bool,
        seed: int,
        drop_remainder: bool,
        shapes: Mapping[str, Any] | None,
    ) -> _Wanted:
        size, seed = _whole(batch_size, "batch_size", 1), _whole(seed, "seed", 0)
        chosen = select(self.schema, columns, shapes or {})
        check_readable(self._shard.refused, (column.name for column in chosen))
        return _Wanted(chosen, size, seed if shuffle else None, drop_remainder)

    def _count(self, wanted: _Wanted) -> int:
        whole, rest = divmod(self.num_rows, wanted.size)
        return whole + bool(rest and not wanted.drop_remainder)

    def _batches(self, wanted: _Wanted, epochs: Iterable[int]) -> Iterator[dict[str, Array]]:
        names = [column.name for column in wanted.columns]

        def blocks() -> Iterator[Block | None]:
            with Stream(self._shard, self._cache, names, self.schema) as stream:
                for epoch in epochs:
                    if wanted.seed is None:
                        yield from stream.blocks(wanted.columns)
                    else:
                        yield from stream.shuffled(wanted.columns, wanted.seed, epoch)
                    yield None

        with contextlib.closing(
            PrefetchIterator(blocks, _AHEAD if wanted.seed is None else 1)
        ) as ahead:
            yield from rebatch(ahead, wanted.size, wanted.drop_remainder)


def _whole(value: object, name: str, least: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be an integer ≥ {least}")
    return number
