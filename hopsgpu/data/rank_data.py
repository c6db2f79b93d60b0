"""A rank's view of its data: `context().data`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import operator
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hopsgpu.data import tensorflow_batches as tensorflow
from hopsgpu.data import torch_batches as torch
from hopsgpu.data.batches import Block, block_bytes, rebatch
from hopsgpu.data.cache import Cache, default_budget
from hopsgpu.data.calendars import check_readable
from hopsgpu.data.columns import Column, check_names, select_columns
from hopsgpu.data.position import Leg, Pass, Tracker
from hopsgpu.data.prefetch import NOT_COUNTED, PrefetchIterator
from hopsgpu.data.shard import Shard
from hopsgpu.data.shard_plan import batch_count, reader_ends
from hopsgpu.data.shuffle import cut_slices, window_rows
from hopsgpu.data.stream import ShardStream
from hopsgpu.errors import ConfigError
from hopsgpu.units import MIB

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

log = logging.getLogger(__name__)

# Blocks, each from one record batch, that are read before they are asked for.
_AHEAD = 3
# The same for blocks of shuffled rows, and the most bytes of them.
_AHEAD_SHUFFLED = 4
_AHEAD_BYTES = 32 * MIB


@dataclass(frozen=True)
class _Wanted:
    """The checked arguments of a request for batches.

    Attributes:
        columns: columns of each batch.
        size: number of rows of a batch.
        seed: seed of the shuffle; None for the shard's order.
        drop_remainder: whether an epoch's last batch is left out if it is smaller.
        is_own: whether arrays that no other batch reads may be changed.
    """

    columns: Sequence[Column]
    size: int
    seed: int | None
    drop_remainder: bool
    is_own: bool = False


@dataclass(frozen=True)
class DataStart:
    """Where in the data a gang begins: after what earlier gangs of the run have trained.

    Attributes:
        epoch: number of the present epoch.
        rest: this rank's rows of the present epoch; None if all rows of the shard remain.
        legs: what earlier worlds trained of the present epoch.
        ranks: number of ranks of the gang.
        name: name of the data in messages.
    """

    epoch: int = 0
    rest: Shard | None = None
    legs: tuple[Leg, ...] = ()
    ranks: int = 1
    name: str = "data"


class RankData:
    """A rank's shard of the data.

    A context manager: its exit removes what was cached on the local disk. Its methods may be called
    any number of times, and several iterators may be in use at the same time.

    If the gang continues at a checkpoint that was saved within an epoch, with another number of
    ranks or the same, the first pass has the rest of that epoch only: the rows that no rank was
    handed before the checkpoint.

    Args:
        shard: the rows.
        directory: directory on the local disk below which they are cached; None for TMPDIR.
        budget: the most bytes that may be cached; None for this rank's part of the disk's free
            space beyond 15 % of its size. Rows beyond the budget are read from the lake in every
            epoch.
        beginning: where the gang begins.
        waiting: counts the time that the training waits for rows: entered and left again each time.
    """

    def __init__(
        self,
        shard: Shard,
        directory: Path | None = None,
        budget: int | None = None,
        beginning: DataStart | None = None,
        waiting: AbstractContextManager[None] = NOT_COUNTED,
    ) -> None:
        self._shard = shard
        self._waiting = waiting
        self._beginning = begins = DataStart() if beginning is None else beginning
        self._continues = begins.rest is not None and not begins.legs[-1].numbered
        self._tracker = Tracker(begins.name, begins.legs, begins.epoch, begins.ranks)
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
    def epoch(self) -> int:
        """Return the number of the epoch with which this gang begins.

        It is 0, unless the gang continues at a checkpoint: then it is the epoch that the checkpoint
        was saved in, of which only the rest remains, or the next one. A loop that begins there
        trains each row of each epoch once: `for epoch in range(data.epoch, epochs)`.
        """
        return self._beginning.epoch

    def completed(self, epoch: int) -> None:
        """Record that an epoch is trained, where hopsgpu cannot see it, as with Keras's `fit`.

        Checkpoints that are saved after the call, and before the next batch is read, continue with
        the next epoch.

        Args:
            epoch: number of the epoch.

        Raises:
            ConfigError: the number is not an integer ≥ 0.
        """
        self._tracker.complete(_whole(epoch, "epoch", 0))

    @property
    def is_continued(self) -> bool:
        """Return whether rows before the first one here were trained before a checkpoint."""
        return self.epoch > 0 or self._beginning.rest is not None

    @property
    def legs(self) -> tuple[Leg, ...]:
        """Return what all gangs of the run have trained of the present epoch, up to now."""
        return self._tracker.legs()

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
        epoch: int | None = None,
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
            epoch: number of the first epoch; None for 0. Epochs that were trained before the
                checkpoint at which the gang continues are left out, and of the present one the rows
                that were. If neither `epochs` nor `epoch` is given, the pass has no number: it only
                continues one that a checkpoint has interrupted.
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
        first = 0 if epoch is None else _whole(epoch, "epoch", 0)
        numbers: Iterable[int] = itertools.count(first)
        if epochs is not None:
            numbers = range(first, first + _whole(epochs, "epochs", 1))
        return self._batches(wanted, numbers, numbered=epoch is not None or epochs != 1)

    def torch(
        self,
        batch_size: int,
        columns: Sequence[str] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int | None = None,
        drop_remainder: bool = False,
        shapes: Mapping[str, Any] | None = None,
        pin_memory: bool | None = None,
    ) -> Any:
        """Return the rows as a torch IterableDataset of batches.

        Use it directly, or in `DataLoader(dataset, batch_size=None)` without workers: it reads
        ahead itself. If batches need work in other processes, `dataset.loader(num_workers)` is a
        DataLoader whose workers each read a part of the shard. Each iteration over it is an epoch,
        with its own order if the rows are shuffled. Its length is the number of batches of an
        epoch.

        Args:
            batch_size: as for `batches`.
            columns: as for `batches`.
            shuffle: as for `batches`.
            seed: as for `batches`.
            epoch: number of the first iteration's epoch, None for that of `RankData.epoch`;
                `set_epoch()` sets that of the next one. Epochs that were trained before have no
                batches.
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
        # Tensors are the user's to change.
        wanted = dataclasses.replace(wanted, is_own=True)
        source = torch.Source(
            functools.partial(self._batches, wanted),
            functools.partial(self._part, wanted),
            functools.partial(self._pass, wanted),
            self._tracker.handed,
            self._waiting,
        )
        count = batch_count(self.num_rows, wanted.size, wanted.drop_remainder)
        return torch.dataset(source, wanted.columns, count, self._first(epoch), pin_memory)

    def tensorflow(
        self,
        batch_size: int,
        columns: Sequence[str] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int | None = None,
        drop_remainder: bool = False,
        shapes: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the rows as a tf.data.Dataset of batches.

        Each iteration over it is an epoch, with its own order if the rows are shuffled. The dataset
        knows its cardinality, except if its first iteration has the rest of an epoch.

        A checkpoint knows the position of a loop over the dataset, or over one that `map`,
        `prefetch` or `with_options` makes of it, in eager mode. Where TensorFlow reads it within a
        graph, as in Keras's `fit`, `completed` tells which epochs are trained.

        Args:
            batch_size: as for `batches`.
            columns: as for `batches`.
            shuffle: as for `batches`.
            seed: as for `batches`.
            epoch: number of the first iteration's epoch, None for that of `RankData.epoch`.
            drop_remainder: as for `batches`; if true, the batch dimension is known.
            shapes: as for `batches`.

        Returns:
            A dataset of dicts: tensors of numbers, of tf.string for strings and binary, and
            ragged tensors for lists of numbers of different lengths.

        Raises:
            ConfigError: as for `batches`, or a column has dates, times or nested lists.
        """
        wanted = self._wanted(batch_size, columns, shuffle, seed, drop_remainder, shapes)
        first = self._first(epoch)
        rows = wanted.size if drop_remainder else None
        count = batch_count(self.num_rows, wanted.size, wanted.drop_remainder)
        source = tensorflow.Source(
            functools.partial(self._uncounted, wanted),
            functools.partial(self._pass, wanted),
            self._tracker,
            self._waiting,
        )
        is_short = first < self.epoch or (first == self.epoch and self._beginning.rest is not None)
        known = None if is_short else count
        return tensorflow.dataset(source, wanted.columns, known, first, rows)

    def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        """Return all rows of the shard as a pyarrow.Table, in memory.

        Raises:
            ConfigError: the names are not those of columns, each once, or a column has dates or
                timestamps that are not converted.
            StoreError: the lake refused, or the data has changed.
        """
        import pyarrow as pa

        names = check_names(self.schema, columns)
        check_readable(self._shard.refused, names)
        with self._waiting, ShardStream(self._shard, self._cache, names, self.schema) as stream:
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
        chosen = select_columns(self.schema, columns, shapes or {})
        check_readable(self._shard.refused, (column.name for column in chosen))
        return _Wanted(chosen, size, seed if shuffle else None, drop_remainder)

    def _first(self, epoch: int | None) -> int:
        return self.epoch if epoch is None else _whole(epoch, "epoch", 0)

    def _pass(self, wanted: _Wanted, epoch: int, readers: int = 1, numbered: bool = True) -> Pass:
        """Return the next pass over the data; it has no batches if the epoch is trained already."""
        begins = self._beginning
        is_rest = begins.rest is not None and begins.legs[-1].numbered and epoch == begins.epoch
        if not numbered:
            is_rest, self._continues = self._continues, False
        leg = Leg(
            begins.ranks,
            epoch,
            size=wanted.size,
            drop_remainder=wanted.drop_remainder,
            seed=wanted.seed,
            readers=readers,
            numbered=numbered,
        )
        if numbered and epoch < begins.epoch:
            log.info("epoch %d of %r was trained before: it has no rows", epoch, begins.name)
            return Pass(leg, 0)
        shard = self._shard_of(is_rest)
        return Pass(leg, batch_count(shard.num_rows, wanted.size, wanted.drop_remainder), is_rest)

    def _shard_of(self, is_rest: bool) -> Shard:
        rest = self._beginning.rest
        return rest if is_rest and rest is not None else self._shard

    def _part(self, wanted: _Wanted, one: Pass, reader: int) -> Iterator[dict[str, Array]]:
        """Return the batches of one of the processes that read a shard in turn."""
        shard = self._shard_of(one.is_rest)
        ends = reader_ends(shard.num_rows, wanted.size, one.leg.readers)
        slices = tuple(cut_slices(shard.slices, ends)[reader])
        return self._read(wanted, [(one, dataclasses.replace(shard, slices=slices))])

    def _batches(
        self, wanted: _Wanted, epochs: Iterable[int], *, numbered: bool = True
    ) -> Iterator[dict[str, Array]]:
        begun: deque[Pass] = deque()

        def reads() -> Iterator[tuple[Pass, Shard]]:
            # In the thread that reads, which comes to an epoch before its batches are handed out.
            for epoch in epochs:
                one = self._pass(wanted, epoch, numbered=numbered)
                if one.total:
                    begun.append(one)
                    yield one, self._shard_of(one.is_rest)

        return self._tracker.counted(self._read(wanted, reads(), self._waiting), begun)

    def _uncounted(self, wanted: _Wanted, one: Pass) -> Iterator[dict[str, Array]]:
        return self._read(wanted, [(one, self._shard_of(one.is_rest))])

    def _read(
        self,
        wanted: _Wanted,
        reads: Iterable[tuple[Pass, Shard]],
        waiting: AbstractContextManager[None] = NOT_COUNTED,
    ) -> Generator[dict[str, Array], None, None]:
        turns = _Turns(wanted, iter(reads), self._cache, self._shard, waiting)
        return rebatch(turns.blocks(), wanted.size, wanted.drop_remainder)


class _Turns:
    """The blocks of several passes, which a thread reads ahead, in turn with the caller's thread.

    The caller's thread reads a pass for which there is nothing to do ahead: the rows are views of
    what is on the local disk. To hand such a block over takes longer than to make it.

    Args:
        wanted: what is read of each pass.
        reads: the passes and their rows.
        cache: caches the rows, except of a pass that has the rest of an epoch.
        shard: the shard of passes that have all rows.
        waiting: entered while the caller waits for the thread.
    """

    def __init__(
        self,
        wanted: _Wanted,
        reads: Iterator[tuple[Pass, Shard]],
        cache: Cache,
        shard: Shard,
        waiting: AbstractContextManager[None],
    ) -> None:
        self._wanted = wanted
        self._reads = reads
        self._cache = cache
        self._schema = shard.arrow_schema
        self._waiting = waiting
        self._are_views = wanted.seed is None and all(c.is_view for c in wanted.columns)
        self._room = _AHEAD
        if wanted.seed is not None:
            window = window_rows(shard.arrow_schema, shard.row_bytes)
            most = block_bytes(wanted.columns, wanted.size, window, shard.row_bytes)
            self._room = max(1, min(_AHEAD_SHUFFLED, _AHEAD_BYTES // most))
        # The pass that is read, or is to be read next. One thread at a time changes it.
        self._next: deque[tuple[Pass, Shard]] = deque()

    def blocks(self) -> Generator[Block | None, None, None]:
        """Yield the blocks, with None after each pass."""
        self._advance()
        while self._next:
            if self._are_views:
                yield from self._here()
            if self._next:
                items = PrefetchIterator(self._ahead, self._room, self._waiting)
                with contextlib.closing(items):
                    yield from items

    def _advance(self) -> None:
        self._next.extend(itertools.islice(self._reads, 1))

    def _here(self) -> Iterator[Block | None]:
        """Yield the blocks up to a pass that is to be read ahead."""
        with contextlib.ExitStack() as stack:
            for _, stream in self._streams(stack):
                if not stream.is_cached():
                    return
                yield from stream.blocks(self._wanted.columns, touched=False)
                yield None

    def _ahead(self) -> Iterator[Block | None]:
        """Yield the blocks up to a pass that is not."""
        wanted = self._wanted
        with contextlib.ExitStack() as stack:
            for one, stream in self._streams(stack):
                if self._are_views and stream.is_cached():
                    return
                if wanted.seed is None:
                    yield from stream.blocks(wanted.columns)
                else:
                    order = wanted.seed, one.leg.epoch
                    yield from stream.shuffled_blocks(
                        wanted.columns, *order, wanted.size, is_own=wanted.is_own
                    )
                yield None

    def _streams(self, stack: contextlib.ExitStack) -> Iterator[tuple[Pass, ShardStream]]:
        """Yield the passes from the next one on, each with the stream that reads it."""
        names = [column.name for column in self._wanted.columns]
        streams: dict[bool, ShardStream] = {}
        while self._next:
            one, shard = self._next[0]
            if one.is_rest not in streams:
                cache = None if one.is_rest else self._cache
                stream = ShardStream(shard, cache, names, self._schema)
                streams[one.is_rest] = stack.enter_context(stream)
            yield one, streams[one.is_rest]
            self._next.popleft()
            self._advance()


def _whole(value: object, name: str, least: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be an integer ≥ {least}")
    return number
