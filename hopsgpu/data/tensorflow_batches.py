"""Batches as TensorFlow tensors."""

from __future__ import annotations

import importlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopsgpu.data.columns import Column, ColumnKind, warn_of_missing_shapes
from hopsgpu.data.position import Pass, Tracker
from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Source:
    """Where a dataset has its batches from.

    Attributes:
        batches: returns the batches of a pass.
        begin: returns the pass of an epoch.
        tracker: counts the batches that are handed out.
        waiting: counts the time that an eager loop waits for batches.
    """

    batches: Callable[[Pass], Iterator[Mapping[str, Array]]]
    begin: Callable[[int], Pass]
    tracker: Tracker
    waiting: AbstractContextManager[None]


def dataset(
    source: Source, columns: Sequence[Column], count: int | None, epoch: int, rows: int | None
) -> Any:
    """Return a tf.data.Dataset.

    Args:
        source: where the batches are from.
        columns: columns of the batches.
        count: number of batches of every epoch; None if the first one has fewer.
        epoch: number of the first epoch.
        rows: number of rows of every batch, or None if the last one may be smaller.

    Raises:
        ConfigError: a column has dates, times or nested lists.
    """
    tf = importlib.import_module("tensorflow")
    specs = {column.name: _spec(tf, column, rows) for column in columns}
    numbers = itertools.count(epoch)
    # Passes whose batches tf.data reads, and that no loop has counted yet.
    begun: list[Pass] = []
    # Passes of which tf.data has read all batches. Keras also begins some that it does not use.
    read: list[Pass] = []

    def generate() -> Iterator[dict[str, Any]]:
        one = source.begin(next(numbers))
        if not one.total:
            return
        # tf.data reads ahead, and within a graph nobody sees which batches were trained.
        one.is_known, one.fallback = False, epoch + len(read)
        begun[:] = [one]
        source.tracker.begin(one)
        for number, batch in enumerate(source.batches(one), start=1):
            if number == 1:
                warn_of_missing_shapes(columns, batch)
            if number == one.total:
                read.append(one)
            yield {c.name: _values(tf, c, batch[c.name]) for c in columns}

    made = tf.data.Dataset.from_generator(generate, output_signature=specs)
    if count is not None:
        made = made.apply(tf.data.experimental.assert_cardinality(count))
    return _counting(tf, made, begun, source)


# Methods of a dataset that keep the number of its elements and their order.
_ONE_TO_ONE = ("map", "prefetch", "with_options")


def _counting(tf: Any, made: Any, begun: list[Pass], source: Source) -> Any:
    """Return the dataset with iterators that count what an eager loop receives."""
    kind = type(made)

    def iterate(self: Any) -> Any:
        iterator = kind.__iter__(self)
        own: list[Pass] = []
        base = type(iterator)

        def receive(self: Any) -> Any:
            with source.waiting:
                batch = base.__next__(self)
            if tf.executing_eagerly():
                if not own and begun:
                    own.append(begun.pop())
                    own[0].is_known = own[0].is_open = True
                for one in own:
                    source.tracker.handed(one)
            return batch

        iterator.__class__ = type(base.__name__, (base,), {"__next__": receive})
        weakref.finalize(iterator, _close, own)
        return iterator

    def derive(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            return _counting(tf, getattr(kind, name)(self, *args, **options), begun, source)

        return method

    # A subclass that is made here, since the class of a dataset depends on what it is made of.
    methods: dict[str, Any] = {name: derive(name) for name in _ONE_TO_ONE}
    made.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate, **methods})
    return made


def _close(passes: Sequence[Pass]) -> None:
    for one in passes:
        one.is_open = False


def _spec(tf: Any, column: Column, rows: int | None) -> Any:
    if column.kind is ColumnKind.NUMBER:
        return tf.TensorSpec((rows, *column.shape), tf.as_dtype(column.dtype))
    if column.kind in (ColumnKind.TEXT, ColumnKind.BYTES):
        return tf.TensorSpec((rows,), tf.string)
    if column.kind is ColumnKind.RAGGED and column.dtype != object and column.dtype.kind in "biuf":
        shape = (rows, None, *column.shape)
        return tf.RaggedTensorSpec(shape, tf.as_dtype(column.dtype), ragged_rank=1)
    raise ConfigError(
        f"column {column.name!r} contains {column.kind.value} ({column.dtype}), which hopsgpu does"
        " not convert for TensorFlow: make them numbers in Spark, or leave it out of columns="
    )


def _values(tf: Any, column: Column, array: Array) -> Any:
    import numpy as np

    if column.kind in (ColumnKind.TEXT, ColumnKind.BYTES) and any(value is None for value in array):
        raise ConfigError(
            f"column {column.name!r} contains nulls, which TensorFlow's strings do not have: fill"
            " or drop them in Spark (fillna, dropna)"
        )
    if column.kind is not ColumnKind.RAGGED:
        return array
    lengths = np.fromiter(map(len, array), np.int64, len(array))
    return tf.RaggedTensor.from_row_lengths(np.concatenate(list(array)), lengths)
