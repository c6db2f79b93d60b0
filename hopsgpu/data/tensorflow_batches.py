"""Batches as TensorFlow tensors."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hopsgpu.data.columns import Column, Kind
from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def dataset(
    batches: Callable[[Sequence[int]], Iterator[Mapping[str, Array]]],
    columns: Sequence[Column],
    count: int,
    epoch: int,
    rows: int | None,
) -> Any:
    """Return a tf.data.Dataset.

    Args:
        batches: returns the batches of some epochs.
        columns: columns of the batches.
        count: number of batches of an epoch.
        epoch: number of the first epoch.
        rows: number of rows of every batch, or None if the last one may be smaller.

    Raises:
        ConfigError: a column has dates, times or nested lists.
    """
    tf = importlib.import_module("tensorflow")
    specs = {column.name: _spec(tf, column, rows) for column in columns}
    numbers = itertools.count(epoch)

    def generate() -> Iterator[dict[str, Any]]:
        for batch in batches([next(numbers)]):
            yield {c.name: _values(tf, c, batch[c.name]) for c in columns}

    made = tf.data.Dataset.from_generator(generate, output_signature=specs)
    return made.apply(tf.data.experimental.assert_cardinality(count))


def _spec(tf: Any, column: Column, rows: int | None) -> Any:
    if column.kind is Kind.NUMBER:
        return tf.TensorSpec((rows, *column.shape), tf.as_dtype(column.dtype))
    if column.kind in (Kind.TEXT, Kind.BYTES):
        return tf.TensorSpec((rows,), tf.string)
    if column.kind is Kind.RAGGED and column.dtype != object and column.dtype.kind in "biuf":
        shape = (rows, None, *column.shape)
        return tf.RaggedTensorSpec(shape, tf.as_dtype(column.dtype), ragged_rank=1)
    raise ConfigError(
        f"column {column.name!r} contains {column.kind.value} ({column.dtype}), which hopsgpu does"
        " not convert for TensorFlow: make them numbers in Spark, or leave it out of columns="
    )


def _values(tf: Any, column: Column, array: Array) -> Any:
    import numpy as np

    if column.kind in (Kind.TEXT, Kind.BYTES) and any(value is None for value in array):
        raise ConfigError(
            f"column {column.name!r} contains nulls, which TensorFlow's strings do not have: fill"
            " or drop them in Spark (fillna, dropna)"
        )
    if column.kind is not Kind.RAGGED:
        return array
    lengths = np.fromiter(map(len, array), np.int64, len(array))
    return tf.RaggedTensor.from_row_lengths(np.concatenate(list(array)), lengths)
