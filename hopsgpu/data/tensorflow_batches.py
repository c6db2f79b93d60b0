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
class BatchSource:
    """The source of a dataset's batches.

    Attributes:
        read: returns the batches of a pass.
        start_pass: returns the pass of an epoch.
        tracker: counts the batches that the user's code receives.
        waiting: entered each time that an eager loop waits for batches, to count the time.
    """

    read: Callable[[Pass], Iterator[Mapping[str, Array]]]
    start_pass: Callable[[int], Pass]
    tracker: Tracker
    waiting: AbstractContextManager[None]


def dataset(
    source: BatchSource, columns: Sequence[Column], count: int | None, epoch: int, rows: int | None
) -> Any:
    """Return a tf.data.Dataset.

    Args:
        count: number of batches of every epoch; None if the first one has fewer.
        epoch: number of the first epoch.
        rows: number of rows of every batch, or None if the last one may be smaller.

    Raises:
        ConfigError: a column has dates, times or nested lists.
    """
    tf = importlib.import_module("tensorflow")
    specs = {column.name: _spec(tf, column, rows) for column in columns}
    numbers = itertools.count(epoch)
    # Passes that tf.data reads, and that no eager loop has received a batch of yet.
    uncounted: list[Pass] = []
    # Passes of which tf.data has read all batches. Keras also starts passes that it does not use.
    finished: list[Pass] = []

    def generate() -> Iterator[dict[str, Any]]:
        pass_ = source.start_pass(next(numbers))
        if not pass_.total:
            return
        # tf.data reads ahead: within a graph, which batches were trained is unknown.
        pass_.is_known, pass_.fallback = False, epoch + len(finished)
        uncounted[:] = [pass_]
        source.tracker.begin(pass_)
        for number, batch in enumerate(source.read(pass_), start=1):
            if number == 1:
                warn_of_missing_shapes(columns, batch)
            if number == pass_.total:
                finished.append(pass_)
            yield {c.name: _values(tf, c, batch[c.name]) for c in columns}

    tf_dataset = tf.data.Dataset.from_generator(generate, output_signature=specs)
    if count is not None:
        tf_dataset = tf_dataset.apply(tf.data.experimental.assert_cardinality(count))
    return _count_eager_batches(tf, tf_dataset, uncounted, source)


# Methods of a dataset that keep the number of its elements and their order.
_ONE_TO_ONE = ("map", "prefetch", "with_options")


def _count_eager_batches(
    tf: Any, tf_dataset: Any, uncounted: list[Pass], source: BatchSource
) -> Any:
    """Return the dataset with iterators that count the batches of an eager loop."""
    kind = type(tf_dataset)

    def iterate(self: Any) -> Any:
        iterator = kind.__iter__(self)
        counted: list[Pass] = []
        base = type(iterator)

        def receive(self: Any) -> Any:
            with source.waiting:
                batch = base.__next__(self)
            if tf.executing_eagerly():
                if not counted and uncounted:
                    counted.append(uncounted.pop())
                    counted[0].is_known = counted[0].is_open = True
                for pass_ in counted:
                    source.tracker.count_batch(pass_)
            return batch

        iterator.__class__ = type(base.__name__, (base,), {"__next__": receive})
        weakref.finalize(iterator, _close_passes, counted)
        return iterator

    def derive(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            return _count_eager_batches(
                tf, getattr(kind, name)(self, *args, **options), uncounted, source
            )

        return method

    # A subclass per dataset: the class of a dataset depends on its transformation.
    methods: dict[str, Any] = {name: derive(name) for name in _ONE_TO_ONE}
    tf_dataset.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate, **methods})
    return tf_dataset


def _close_passes(passes: Sequence[Pass]) -> None:
    for pass_ in passes:
        pass_.is_open = False


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
