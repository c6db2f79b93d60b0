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
        ConfigError: it is something else, has other numbers of rows, or names of kept columns.
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
    if twice := sorted(kept & columns.keys()):
        raise ConfigError(
            f"predict returned {', '.join(map(repr, twice))}, which keep= also has: name it"
            " differently, or leave it out of keep="
        )
    arrays = {name: _arrow(name, value, rows) for name, value in columns.items()}
    return pa.record_batch(list(arrays.values()), names=list(arrays))


def _arrow(name: str, value: Any, rows: int) -> Any:
    import numpy as np
    import pyarrow as pa

    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, pa.Array):
        _check_rows(name, (len(value),), rows)
        return value
    if hasattr(value, "detach"):  # a tensor of torch, which may be on a GPU
        value = value.detach().cpu()
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (str, bytes)):
        value = np.array(value, dtype=object)
    # A masked array's masked values become null.
    array = value if isinstance(value, np.ma.MaskedArray) else np.asarray(value)
    _check_rows(name, array.shape, rows)
    if array.flags.writeable and array.dtype != object:
        # The function may write to it again, and the file is written while it does.
        array = array.copy()
    flat = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


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
