"""Columns of the output from the values that the user's function returns for a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hopsgpu.errors import ConfigError
from hopsgpu.units import count_of

_ACCEPTED = (
    "return a dict of arrays by name, a list of dicts (one for each row), a pandas DataFrame, or a"
    " pyarrow.RecordBatch"
)


def prediction_batch(returned: object, rows: int, kept: Collection[str]) -> Any:
    """Return the predictions of a batch as a pyarrow.RecordBatch.

    Args:
        returned: what the function returned: a dict of arrays, whose first dimension is the batch,
            a list of dicts with the same keys, a pandas DataFrame or a pyarrow.RecordBatch. An
            array of several dimensions becomes lists of fixed length, a ragged one lists. Bytes
            that are no Arrow array are text in UTF-8.
        kept: names of the input's columns that are in the output as well.

    Raises:
        ConfigError: it is something else, or has another number of rows, values of different types
            or names of kept columns. Or names differ only in case, which Spark ignores.
    """
    import pyarrow as pa

    columns = _columns(returned)
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


def _columns(returned: Any) -> dict[Any, Any]:
    import pyarrow as pa

    if isinstance(returned, (pa.RecordBatch, pa.Table)):
        return dict(zip(returned.schema.names, returned.columns, strict=True))
    if isinstance(returned, Mapping):
        return dict(returned)
    if hasattr(returned, "columns") and hasattr(returned, "items"):  # a DataFrame of pandas
        return dict(returned.items())
    if not isinstance(returned, (list, tuple)) or not all(
        isinstance(row, Mapping) for row in returned
    ):
        raise ConfigError(f"predict returned a {type(returned).__qualname__}: {_ACCEPTED}")
    names = dict.fromkeys(name for row in returned for name in row)
    for number, row in enumerate(returned):
        if missing := [name for name in names if name not in row]:
            raise ConfigError(
                f"predict returned a dict without {missing[0]!r} for row {number} of the batch, but"
                " others have it: return dicts with the same keys, with None where a value is"
                " missing"
            )
    return {name: [row[name] for row in returned] for name in names}


def _arrow(name: str, value: Any, rows: int) -> Any:
    import numpy as np
    import pyarrow as pa

    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, pa.Array):
        _check_rows(name, (len(value),), rows)
        if any(buffer is not None and buffer.is_mutable for buffer in value.buffers()):
            # Copy: the function may own this memory, and write to it later.
            return value.take(pa.array(np.arange(len(value))))
        return value
    try:
        converted = _convert(name, value, rows)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise ConfigError(
            f"predict returned {name!r} with values that are no column of one type ({error}):"
            " return an Arrow array, such as pyarrow.array(values, type)"
        ) from error
    return _cast(
        converted,
        _text_type(converted.type),
        f"predict returned {name!r} with bytes that are not text in UTF-8",
        ": for a column of bytes return pyarrow.array(values, pyarrow.binary())",
    )


def _convert(name: str, value: Any, rows: int) -> Any:
    """Return an array, a tensor, a Series or a list as an Arrow array of as many rows."""
    import numpy as np
    import pyarrow as pa

    if getattr(value, "is_nested", False):  # a tensor of torch with rows of different lengths
        value = list(value.unbind())
    if hasattr(value, "row_splits"):  # a ragged tensor of TensorFlow
        _check_rows(name, (int(value.shape[0]),), rows)
        return _ragged_to_lists(name, value)
    # A Series of pandas; those of numbers without missing values are arrays.
    if hasattr(value, "iloc") and not isinstance(value.dtype, np.dtype):
        _check_rows(name, (len(value),), rows)
        return pa.Array.from_pandas(value)
    if isinstance(value, (list, tuple)):
        value = _list_to_array(value)
    # A masked array's masked values become null.
    array = value if isinstance(value, np.ma.MaskedArray) else np.asarray(_on_host(value))
    _check_rows(name, array.shape, rows)
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.dtype.kind == "T":  # NumPy's strings of different lengths
        array = array.astype(object)
    if array.flags.writeable and array.dtype != object:
        # The function may write to the array while the file is written.
        array = array.copy()
    # Among objects, pandas' NA and NaN stand for missing values.
    is_masked = isinstance(array, np.ma.MaskedArray)
    may_have_na = array.dtype == object and not is_masked
    flat = pa.array(array.reshape(-1), from_pandas=True if may_have_na else None)
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _list_to_array(values: Any) -> Any:
    """Return a list as an array: of objects where NumPy would change or refuse the values.

    Rows that are lists stay objects, because rows of later batches may have other lengths.
    """
    import numpy as np

    rows = [_on_host(row) for row in values]
    if not any(
        row is None
        or isinstance(row, (str, bytes, Mapping, list, tuple))
        or (isinstance(row, np.ndarray) and row.ndim == 1)
        for row in rows
    ):
        return np.asarray(rows)
    array = np.empty(len(rows), dtype=object)
    for number, row in enumerate(rows):
        array[number] = row
    return array


def _on_host(value: Any) -> Any:
    """Return a tensor as an array of NumPy's; any other value as it is."""
    import numpy as np

    if hasattr(value, "detach"):  # a tensor of torch, which may be on a GPU
        value = value.detach().cpu()
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # NumPy has none
            value = value.float()
    # TensorFlow's tensors of strings have scalars that are bytes.
    return np.asarray(value)[()] if hasattr(value, "__array__") else value


def _ragged_to_lists(name: str, value: Any) -> Any:
    """Return a ragged tensor as lists, with the type that its elements have."""
    import numpy as np
    import pyarrow as pa

    inner = value.values
    flat = (
        _ragged_to_lists(name, inner)
        if hasattr(inner, "row_splits")
        else _arrow(name, inner, len(inner))
    )
    return pa.ListArray.from_arrays(pa.array(np.asarray(value.row_splits), pa.int32()), flat)


def _text_type(kind: Any) -> Any:
    """Return a type with text in place of bytes, at any depth of lists and structs."""
    import pyarrow as pa

    types = pa.types
    if types.is_binary(kind) or types.is_fixed_size_binary(kind):
        return pa.string()
    if types.is_large_binary(kind):
        return pa.large_string()
    if types.is_fixed_size_list(kind):
        return pa.list_(_text_type(kind.value_type), kind.list_size)
    if types.is_list(kind):
        return pa.list_(_text_type(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_text_type(field.type)) for field in kind])
    return kind


def _for_spark(name: str, array: Any) -> Any:
    """Return a column with a type that Spark reads from Parquet; others get the next one."""
    kind = _spark_type(array.type)
    return _cast(
        array,
        kind,
        f"predict returned {name!r} as {array.type}, which Spark cannot read, and which cannot be"
        f" converted to {kind} without loss",
    )


def _cast(array: Any, kind: Any, problem: str, advice: str = "") -> Any:
    import pyarrow as pa

    try:
        return array if array.type == kind else array.cast(kind)
    except pa.ArrowException as error:
        raise ConfigError(f"{problem} ({error}){advice}") from error


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
        squeezed = "; squeeze() removes that of one row too: use squeeze(-1)" if rows == 1 else ""
        raise ConfigError(
            f"predict returned {name!r} of shape {shape} for a batch of {count_of(rows, 'row')}:"
            f" the first dimension must be the batch's{squeezed}"
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
