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

# Number of blocks, each from one record batch, that are read ahead.
_AHEAD = 3
# The same for blocks of shuffled rows, and the most bytes of these blocks.
_AHEAD_SHUFFLED = 4
_AHEAD_BYTES = 32 * MIB


@dataclass(frozen=True)
class _BatchRequest:
    """The checked arguments of a request for batches.

    Attributes:
        size: number of rows of a batch.
        seed: seed of the shuffle; None for the shard's order.
        drop_remainder: whether an epoch's last batch is left out if it is smaller.
        is_writeable: whether a batch may write arrays that it does not share with other batches.
    """

    columns: Sequence[Column]
    size: int
    seed: int | None
    drop_remainder: bool
    is_writeable: bool = False


@dataclass(frozen=True)
class DataStart:
    """The place in the data where a gang starts, after the rows that earlier gangs have trained.

    Attributes:
        epoch: number of the present epoch.
        rest: this rank's rows of the present epoch; None if all rows of the shard remain.
        legs: legs of earlier worlds in the present epoch.
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

    A context manager: its exit removes the cache on the local disk. Several iterators may be in use
    at the same time.

    If the gang continues at a checkpoint that was saved within an epoch, the first pass has only
    the rest of that epoch: the rows that no rank received before the checkpoint.

    Args:
        directory: directory on the local disk below which rows are cached; None for TMPDIR.
        budget: the most bytes of the cache; None for this rank's part of the disk's free space
            beyond 15 % of the disk's size. Rows beyond the budget are read from the lake in every
            epoch.
        waiting: entered each time that the training waits for rows, to count the time.
    """

    def __init__(
        self,
        shard: Shard,
        directory: Path | None = None,
        budget: int | None = None,
        start: DataStart | None = None,
        waiting: AbstractContextManager[None] = NOT_COUNTED,
    ) -> None:
        self._shard = shard
        self._waiting = waiting
        self._start = start = DataStart() if start is None else start
        self._is_rest_next = start.rest is not None and not start.legs[-1].numbered
        self._tracker = Tracker(start.name, start.legs, start.epoch, start.ranks)
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
        """Remove the cache on the local disk."""
        # Rename it first, so that a thread that still reads writes nothing into it.
        removed = self._directory.with_name(f"{self._directory.name}-gone")
        with contextlib.suppress(FileNotFoundError):  # closed before
            self._directory.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the shard."""
        return self._shard.num_rows

    @property
    def epoch(self) -> int:
        """Return the number of the epoch with which this gang starts.

        The number is 0, unless the gang continues at a checkpoint. Then it is the epoch of the
        checkpoint, of which only the rest remains, or the next epoch. A loop that starts there
        trains each row of each epoch once: `for epoch in range(data.epoch, epochs)`.
        """
        return self._start.epoch

    def completed(self, epoch: int) -> None:
        """Record that an epoch is trained, if hopsgpu cannot see it, as with Keras's `fit`.

        Checkpoints between this call and the next batch continue with the next epoch.

        Args:
            epoch: number of the epoch.

        Raises:
            ConfigError: the number is not an integer ≥ 0.
        """
        self._tracker.complete(_check_integer(epoch, "epoch", 0))

    @property
    def is_continued(self) -> bool:
        """Return whether earlier gangs have trained rows of this data before a checkpoint."""
        return self.epoch > 0 or self._start.rest is not None

    @property
    def legs(self) -> tuple[Leg, ...]:
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

        The first epoch reads the rows from the lake and caches them on the local disk for later
        epochs. The reading thread ends with the iterator, also if a loop ends early.

        Args:
            batch_size: rows of a batch; the last batch of an epoch may be smaller.
            columns: names, or None for all.
            shuffle: False for the order of the shard, whose row groups the launch has shuffled;
                True to shuffle row groups, and the rows of several within a window of 32 MiB.
            seed: determines, with the epoch, the order of the rows.
            epochs: number of epochs, each of which has all rows; None for no end.
            epoch: number of the first epoch; None for 0. If the gang continues at a checkpoint,
                epochs and rows that were trained before the checkpoint are left out. If neither
                `epochs` nor `epoch` is given, the pass has no number: it only continues a pass that
                a checkpoint has interrupted.
            drop_remainder: whether to leave out an epoch's last batch if it is smaller.
            shapes: shape of a row by column, for columns of lists, as {"image": (28, 28)}.

        Returns:
            An iterator of dicts with an array by column, which has the rows along its first axis.
            The arrays are read-only: copy one to change it.

        Raises:
            ConfigError: an argument is invalid, or a column has a type, dates or timestamps that
                are not converted. From the iterator: a column has such dates or timestamps, or
                nulls, for which its NumPy type has no value.
            StoreError: from the iterator: the lake refused, or the data has changed.
        """
        request = self._check_request(batch_size, columns, shuffle, seed, drop_remainder, shapes)
        first = 0 if epoch is None else _check_integer(epoch, "epoch", 0)
        numbers: Iterable[int] = itertools.count(first)
        if epochs is not None:
            numbers = range(first, first + _check_integer(epochs, "epochs", 1))
        return self._read_epochs(request, numbers, is_numbered=epoch is not None or epochs != 1)

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

        Use the dataset directly, or in `DataLoader(dataset, batch_size=None)` without workers: it
        reads ahead itself. If batches need work in other processes, `dataset.loader(num_workers)`
        is a DataLoader whose workers each read a part of the shard. Each iteration is an epoch,
        with an order of its own if the rows are shuffled. The length of the dataset is the number
        of batches of an epoch.

        Args:
            batch_size, columns, shuffle, seed, drop_remainder, shapes: as for `batches`.
            epoch: number of the first iteration's epoch; None for `RankData.epoch`. `set_epoch()`
                sets the next iteration's epoch. Epochs that were trained before have no batches.
            pin_memory: whether tensors are page-locked, so that copies to the GPU need no wait;
                None for page-locked tensors if there is a GPU.

        Returns:
            A dataset of dicts. Numbers become a tensor. Other columns become lists: of str, of
            bytes, of tensors for lists of numbers of different lengths, of NumPy arrays for other
            lists.

        Raises:
            ConfigError: as for `batches`, or a column has dates or times.
        """
        request = self._check_request(batch_size, columns, shuffle, seed, drop_remainder, shapes)
        # Users may change tensors.
        request = dataclasses.replace(request, is_writeable=True)
        source = torch.BatchSource(
            functools.partial(self._read_epochs, request),
            functools.partial(self._read_part, request),
            functools.partial(self._start_pass, request),
            self._tracker.count_batch,
            self._waiting,
        )
        count = batch_count(self.num_rows, request.size, request.drop_remainder)
        return torch.dataset(source, request.columns, count, self._first_epoch(epoch), pin_memory)

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

        Each iteration is an epoch, with an order of its own if the rows are shuffled. The dataset
        knows its cardinality, except if its first iteration has the rest of an epoch.

        Checkpoints record the position of an eager loop over the dataset, or over a dataset that
        `map`, `prefetch` or `with_options` makes of it. If TensorFlow reads the dataset within a
        graph, as in Keras's `fit`, call `completed` after each epoch.

        Args:
            batch_size, columns, shuffle, seed, shapes: as for `batches`.
            epoch: number of the first iteration's epoch; None for `RankData.epoch`.
            drop_remainder: as for `batches`; if true, the batch dimension is known.

        Returns:
            A dataset of dicts: tensors of numbers, of tf.string for strings and binary, and
            ragged tensors for lists of numbers of different lengths.

        Raises:
            ConfigError: as for `batches`, or a column has dates, times or nested lists.
        """
        request = self._check_request(batch_size, columns, shuffle, seed, drop_remainder, shapes)
        first = self._first_epoch(epoch)
        rows = request.size if drop_remainder else None
        count = batch_count(self.num_rows, request.size, request.drop_remainder)
        source = tensorflow.BatchSource(
            functools.partial(self._read_pass, request),
            functools.partial(self._start_pass, request),
            self._tracker,
            self._waiting,
        )
        is_short = first < self.epoch or (first == self.epoch and self._start.rest is not None)
        cardinality = None if is_short else count
        return tensorflow.dataset(source, request.columns, cardinality, first, rows)

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

    def _check_request(
        self,
        batch_size: int,
        columns: Sequence[str] | None,
        shuffle: bool,
        seed: int,
        drop_remainder: bool,
        shapes: Mapping[str, Any] | None,
    ) -> _BatchRequest:
        size, seed = _check_integer(batch_size, "batch_size", 1), _check_integer(seed, "seed", 0)
        chosen = select_columns(self.schema, columns, shapes or {})
        check_readable(self._shard.refused, (column.name for column in chosen))
        return _BatchRequest(chosen, size, seed if shuffle else None, drop_remainder)

    def _first_epoch(self, epoch: int | None) -> int:
        return self.epoch if epoch is None else _check_integer(epoch, "epoch", 0)

    def _start_pass(
        self, request: _BatchRequest, epoch: int, readers: int = 1, is_numbered: bool = True
    ) -> Pass:
        """Return the pass over an epoch; it has no batches if the epoch is trained already."""
        start = self._start
        is_rest = start.rest is not None and start.legs[-1].numbered and epoch == start.epoch
        if not is_numbered:
            is_rest, self._is_rest_next = self._is_rest_next, False
        leg = Leg(
            start.ranks,
            epoch,
            size=request.size,
            drop_remainder=request.drop_remainder,
            seed=request.seed,
            readers=readers,
            numbered=is_numbered,
        )
        if is_numbered and epoch < start.epoch:
            log.info("epoch %d of %r was trained before: it has no rows", epoch, start.name)
            return Pass(leg, 0)
        shard = self._shard_of(is_rest)
        return Pass(leg, batch_count(shard.num_rows, request.size, request.drop_remainder), is_rest)

    def _shard_of(self, is_rest: bool) -> Shard:
        rest = self._start.rest
        return rest if is_rest and rest is not None else self._shard

    def _read_part(
        self, request: _BatchRequest, pass_: Pass, reader: int
    ) -> Iterator[dict[str, Array]]:
        """Return the batches for one of the processes that share a shard."""
        shard = self._shard_of(pass_.is_rest)
        ends = reader_ends(shard.num_rows, request.size, pass_.leg.readers)
        slices = tuple(cut_slices(shard.slices, ends)[reader])
        return self._read(request, [(pass_, dataclasses.replace(shard, slices=slices))])

    def _read_epochs(
        self, request: _BatchRequest, epochs: Iterable[int], *, is_numbered: bool = True
    ) -> Iterator[dict[str, Array]]:
        passes: deque[Pass] = deque()

        def reads() -> Iterator[tuple[Pass, Shard]]:
            # The reading thread reaches an epoch before the user's code receives its batches.
            for epoch in epochs:
                pass_ = self._start_pass(request, epoch, is_numbered=is_numbered)
                if pass_.total:
                    passes.append(pass_)
                    yield pass_, self._shard_of(pass_.is_rest)

        return self._tracker.count_batches(self._read(request, reads(), self._waiting), passes)

    def _read_pass(self, request: _BatchRequest, pass_: Pass) -> Iterator[dict[str, Array]]:
        return self._read(request, [(pass_, self._shard_of(pass_.is_rest))])

    def _read(
        self,
        request: _BatchRequest,
        reads: Iterable[tuple[Pass, Shard]],
        waiting: AbstractContextManager[None] = NOT_COUNTED,
    ) -> Generator[dict[str, Array], None, None]:
        reader = _PassReader(request, iter(reads), self._cache, self._shard, waiting)
        return rebatch(reader.blocks(), request.size, request.drop_remainder)


class _PassReader:
    """Reads the blocks of several passes: each pass ahead in a thread, or in the caller's thread.

    The caller's thread reads a pass whose rows are views of cached files: to make such a block is
    faster than to hand it over.

    Args:
        reads: the passes and their rows.
        cache: caches the rows, except of a pass that has the rest of an epoch.
        shard: the shard of passes that have all rows.
        waiting: entered while the caller waits for the thread.
    """

    def __init__(
        self,
        request: _BatchRequest,
        reads: Iterator[tuple[Pass, Shard]],
        cache: Cache,
        shard: Shard,
        waiting: AbstractContextManager[None],
    ) -> None:
        self._request = request
        self._reads = reads
        self._cache = cache
        self._schema = shard.arrow_schema
        self._waiting = waiting
        self._are_views = request.seed is None and all(c.is_view for c in request.columns)
        self._capacity = _AHEAD
        if request.seed is not None:
            window = window_rows(shard.arrow_schema, shard.row_bytes, shard.has_even_lists)
            size = block_bytes(request.columns, request.size, window, shard.row_bytes)
            self._capacity = max(1, min(_AHEAD_SHUFFLED, _AHEAD_BYTES // size))
        # The current or next pass, if any. One thread at a time changes the deque.
        self._next: deque[tuple[Pass, Shard]] = deque()

    def blocks(self) -> Generator[Block | None, None, None]:
        """Yield the blocks, with None after each pass."""
        self._advance()
        while self._next:
            if self._are_views:
                yield from self._read_directly()
            if self._next:
                items = PrefetchIterator(self._read_ahead, self._capacity, self._waiting)
                with contextlib.closing(items):
                    yield from items

    def _advance(self) -> None:
        self._next.extend(itertools.islice(self._reads, 1))

    def _read_directly(self) -> Iterator[Block | None]:
        """Yield the blocks up to a pass that should be read ahead."""
        with contextlib.ExitStack() as stack:
            for _, stream in self._streams(stack):
                if not stream.is_cached():
                    return
                yield from stream.blocks(self._request.columns, should_touch=False)
                yield None

    def _read_ahead(self) -> Iterator[Block | None]:
        """Yield the blocks up to a pass that should be read directly."""
        request = self._request
        with contextlib.ExitStack() as stack:
            for pass_, stream in self._streams(stack):
                if self._are_views and stream.is_cached():
                    return
                if request.seed is None:
                    yield from stream.blocks(request.columns)
                else:
                    order = request.seed, pass_.leg.epoch
                    yield from stream.shuffled_blocks(
                        request.columns, *order, request.size, is_writeable=request.is_writeable
                    )
                yield None

    def _streams(self, stack: contextlib.ExitStack) -> Iterator[tuple[Pass, ShardStream]]:
        """Yield the passes from the next one on, each with the stream that reads it."""
        names = [column.name for column in self._request.columns]
        streams: dict[bool, ShardStream] = {}
        while self._next:
            pass_, shard = self._next[0]
            if pass_.is_rest not in streams:
                cache = None if pass_.is_rest else self._cache
                stream = ShardStream(shard, cache, names, self._schema)
                streams[pass_.is_rest] = stack.enter_context(stream)
            yield pass_, streams[pass_.is_rest]
            self._next.popleft()
            self._advance()


def _check_integer(value: object, name: str, minimum: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = minimum - 1
    if number < minimum or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be an integer ≥ {minimum}")
    return number
