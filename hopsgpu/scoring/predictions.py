"""What the user's function returned for a batch, as columns of the output."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hopsgpu.errors import ConfigError

_ACCEPTED = "return a dict of arrays by name, or a pyarrow.RecordBatch"


def predicted(returned: object, rows: int, kept: Collection[str]) -> Any:
    """Return the predictions of a batch as a pyarrow.RecordBatch.

    Args:
        returned: what the function returned: a dict of arrays, whose first dimension is the batch,
            or a pyarrow.RecordBatch. An array of several dimensions becomes lists of fixed length.
        rows: number of rows of the batch.
        kept: names of the input's columns that are in the output as well.

    Raises:
        ConfigError: it is something else, has other numbers of rows, or names of kept columns, or
            names that differ only in case, which Spark does not tell apart.
    """
    import pyarrow as pa

    if isinstance(returned, (pa.RecordBatch, pa.Table)):
        columns = dict(zip(returned.schema.names, returned.columns, strict=True))
    elif isinstance(returned, Mapping):
        columns = dict(returned)
    else:
        raise ConfigError(f"predict returned a {type(returned).__qualname__}: {_ACCEPTED}")
    if not columns or not all(isinstance(name, str) and name for name in columns):
        raise ConfigError(f"predict returned columns named {list(columns)!r}: {_ACCEPTED}")
    folded = {name.casefold() for name in kept}
    if twice := sorted(name for name in columns if name.casefold() in folded):
        raise ConfigError(
            f"predict returned {', '.join(map(repr, twice))}, which keep= also has: name it"
            " differently, or leave it out of keep="
        )
    if len({name.casefold() for name in columns}) < len(columns):
        raise ConfigError(
            f"predict returned the columns {', '.join(columns)}, of which some differ only in upper"
            " and lower case, so that Spark could not read the output: name them differently"
        )
    arrays = {name: _for_spark(name, _arrow(name, value, rows)) for name, value in columns.items()}
    return pa.record_batch(list(arrays.values()), names=list(arrays))


def _arrow(name: str, value: Any, rows: int) -> Any:
    import numpy as np
    import pyarrow as pa

    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, pa.Array):
        _check_rows(name, (len(value),), rows)
        if any(buffer is not None and buffer.is_mutable for buffer in value.buffers()):
            # It may be memory of the function's, as below.
            return value.take(pa.array(np.arange(len(value))))
        return value
    if hasattr(value, "detach"):  # a tensor of torch, which may be on a GPU
        value = value.detach().cpu()
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # NumPy has none
            value = value.float()
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (str, bytes)):
        value = np.array(value, dtype=object)
    # A masked array's masked values become null.
    array = value if isinstance(value, np.ma.MaskedArray) else np.asarray(value)
    _check_rows(name, array.shape, rows)
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.flags.writeable and array.dtype != object:
        # The function may write to it again, and the file is written while it does.
        array = array.copy()
    flat = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _for_spark(name: str, array: Any) -> Any:
    """Return a column with a type that Spark reads from Parquet; others get the next one."""
    import pyarrow as pa

    kind = _spark_type(array.type)
    if kind == array.type:
        return array
    try:
        return array.cast(kind)
    except pa.ArrowException as error:
        raise ConfigError(
            f"predict returned {name!r} as {array.type}, which Spark cannot read, and which cannot"
            f" be converted to {kind} without loss ({error})"
        ) from error


def _spark_type(kind: Any) -> Any:
    import pyarrow as pa

    types = pa.types
    if types.is_float16(kind):
        return pa.float32()
    if types.is_timestamp(kind) and kind.unit in ("s", "ns"):
        return pa.timestamp("us" if kind.unit == "ns" else "ms", kind.tz)
    if types.is_date64(kind):
        return pa.date32()
    if types.is_dictionary(kind):
        return _spark_type(kind.value_type)
    if types.is_fixed_size_list(kind):
        return pa.list_(_spark_type(kind.value_type), kind.list_size)
    if types.is_list(kind):
        return pa.list_(_spark_type(kind.value_type))
    return kind


def first_schema(batch: Any) -> Any:
    """Return the schema of a process's first predictions, which later ones must have.

    Raises:
        ConfigError: a column has nothing from which its type could be known.
    """
    import pyarrow as pa

    for field in batch.schema:
        kind = field.type
        while pa.types.is_nested(kind) and kind.num_fields == 1:
            kind = kind.field(0).type
        if pa.types.is_null(kind):
            raise ConfigError(
                f"predict returned {field.name!r} without a value in the whole first batch, so that"
                " its type is unknown: return an Arrow array, such as pyarrow.array(values,"
                " pyarrow.string())"
            )
    return batch.schema


def _check_rows(name: str, shape: tuple[int, ...], rows: int) -> None:
    if not shape or shape[0] != rows:
        raise ConfigError(
            f"predict returned {name!r} of shape {shape} for a batch of {rows} rows: the first"
            " dimension must be the batch's"
        )


def with_schema(batch: Any, schema: Any) -> Any:
    """Return predictions with the schema that earlier ones had.

    Raises:
        ConfigError: columns have other names, or types that cannot be converted safely.
    """
    import pyarrow as pa

    if batch.schema.equals(schema):
        return batch
    if sorted(batch.schema.names) != sorted(schema.names):
        raise ConfigError(
            f"predict returned the columns {', '.join(batch.schema.names)}, but"
            f" {', '.join(schema.names)} for an earlier batch: return the same for each batch"
        )
    columns = []
    for field in schema:
        array = batch.column(field.name)
        try:
            columns.append(array.cast(field.type))
        except pa.ArrowException as error:
            raise ConfigError(
                f"predict returned {field.name!r} as {array.type}, but as {field.type} for an"
                " earlier batch: return the same types for each batch"
            ) from error
    return pa.record_batch(columns, schema=schema)
