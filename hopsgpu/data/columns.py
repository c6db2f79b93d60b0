"""The conversion of Arrow columns to NumPy arrays; other types are refused with their names."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from hopsgpu.data.sizes import elements
from hopsgpu.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_UNSUPPORTED = "which hopsgpu does not convert"


class ColumnKind(Enum):
    """The kind of a column's values, as frameworks distinguish them."""

    NUMBER = "numbers"
    TIME = "dates or times"
    TEXT = "strings"
    BYTES = "binary"
    RAGGED = "lists of different lengths"


@dataclass(frozen=True)
class Column:
    """The conversion of a column to NumPy.

    Attributes:
        dtype: dtype of the array; if the kind is RAGGED, that of the lists' elements.
        shape: shape of a row, () for a number; if the kind is RAGGED, that of a list's element.
        convert: converts an Arrow array to the NumPy array.
        is_view: whether the NumPy array is a view of the Arrow array, if that has no nulls.
        check: raises an error if an Arrow array cannot be converted; None if `convert` does so.
    """

    name: str
    kind: ColumnKind
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    convert: Callable[[Any], Array]
    is_view: bool = False
    check: Callable[[Any], None] | None = None


def select_columns(
    schema: Any, columns: Sequence[str] | None, shapes: Mapping[str, Any]
) -> list[Column]:
    """Return the columns that a rank requests; None requests all.

    Args:
        shapes: shape of a row by column, for lists: (28, 28) for lists of 784 elements.

    Raises:
        ConfigError: a column does not exist, its type is not converted, or its shape does not fit.
    """
    names = check_names(schema, columns, shapes)
    return [column(schema.field(name), shapes.get(name)) for name in names]


def warn_of_missing_shapes(columns: Iterable[Column], batch: Mapping[str, Array]) -> None:
    """Warn of lists of equal length whose type has no length: with `shapes` they become one array.

    Spark writes every array as a list without a fixed length. A model cannot be called with a list
    of tensors.
    """
    for column_ in columns:
        is_numbers = column_.kind is ColumnKind.RAGGED and column_.dtype.kind in "biuf"
        lengths = {len(row) for row in batch[column_.name]} if is_numbers else set()
        if len(lengths) != 1 or lengths == {0} or len(batch[column_.name]) == 1:
            continue
        shape = (*lengths, *column_.shape)
        warnings.warn(
            f"column {column_.name!r}: the type of its lists has no length, so a batch has a tensor"
            f" for each row, although all rows of the first batch have the shape {shape}. To get"
            f" one tensor, give shapes={{{column_.name!r}: {shape}}}",
            stacklevel=3,
        )


def check_names(
    schema: Any, columns: Sequence[str] | None, shapes: Collection[str] = (), what: str = "columns"
) -> list[str]:
    """Return the names of the columns that a rank requests; None requests all.

    Args:
        shapes: names of columns that have a shape.
        what: name of the argument, for errors.

    Raises:
        ConfigError: the names are not those of columns, each once.
    """
    if isinstance(columns, str):
        raise ConfigError(f"{what}={columns!r}: must be a list of names, such as [{columns!r}]")
    names = list(schema.names if columns is None else columns)
    absent = [name for name in (*names, *shapes) if schema.names.count(name) != 1]
    if absent or not names or len(set(names)) < len(names):
        shaped = f", shapes of {sorted(shapes)}" if shapes else ""
        raise ConfigError(
            f"{what}={columns!r}{shaped}: must be different names of these columns:"
            f" {', '.join(schema.names)}"
        )
    return names


def column(field: Any, shape: Any = None) -> Column:
    """Return the conversion of an Arrow field, whose lists may get another shape.

    Raises:
        ConfigError: the type is not converted, or the shape does not fit it.
    """
    import pyarrow as pa

    types, name, kind = pa.types, field.name, field.type
    if shape is not None:
        return _shaped_column(name, kind, _check_shape(name, shape))
    if types.is_list(kind) or types.is_large_list(kind):
        inner = column(field.with_type(kind.value_type))
        dtype = inner.dtype if inner.kind is not ColumnKind.RAGGED else _object()
        shape = inner.shape if inner.kind is not ColumnKind.RAGGED else ()
        return Column(
            name, ColumnKind.RAGGED, dtype, shape, lambda array: _convert_ragged(name, array, inner)
        )
    if types.is_fixed_size_list(kind):
        return _fixed_list_column(name, kind, None)
    if _is_tensor(kind):
        return _fixed_list_column(name, kind.storage_type, tuple(kind.shape))
    if types.is_string(kind) or types.is_large_string(kind) or kind == pa.string_view():
        return Column(name, ColumnKind.TEXT, _object(), (), _convert_objects)
    if types.is_binary(kind) or types.is_large_binary(kind) or kind == pa.binary_view():
        return Column(name, ColumnKind.BYTES, _object(), (), _convert_objects)
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return Column(name, ColumnKind.BYTES, _object(), (), _convert_objects)
    return _scalar_column(name, kind)


def _is_tensor(kind: Any) -> bool:
    """Return whether values are tensors in row-major order, as NumPy's."""
    import pyarrow as pa

    if not isinstance(kind, pa.FixedShapeTensorType):
        return False
    order = kind.permutation
    return order is None or list(order) == list(range(len(order)))


def _scalar_column(name: str, kind: Any) -> Column:
    import numpy as np
    import pyarrow as pa

    types = pa.types
    if types.is_decimal(kind):
        # Convert to text first: Arrow's cast of a decimal does not always give the nearest double.
        text, doubles = pa.string(), pa.float64()
        return Column(
            name,
            ColumnKind.NUMBER,
            np.dtype("f8"),
            (),
            lambda array: _convert_scalars(name, array.cast(text).cast(doubles)),
        )
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        # `to_pandas_dtype` of pyarrow 18 requires pandas.
        dtype = pa.array([], kind).to_numpy(zero_copy_only=False).dtype
        is_view = not types.is_boolean(kind)
        return Column(
            name, ColumnKind.NUMBER, dtype, (), lambda array: _convert_scalars(name, array), is_view
        )
    if types.is_date(kind):
        dtype = np.dtype("M8[D]" if types.is_date32(kind) else "M8[ms]")
        return Column(name, ColumnKind.TIME, dtype, (), lambda array: _convert_scalars(name, array))
    if types.is_timestamp(kind) or types.is_duration(kind):
        dtype = np.dtype(f"{'M' if types.is_timestamp(kind) else 'm'}8[{kind.unit}]")
        return Column(
            name,
            ColumnKind.TIME,
            dtype,
            (),
            lambda array: _convert_scalars(name, array),
            is_view=True,
        )
    raise ConfigError(f"column {name!r} has the type {kind}, {_advice(kind)}")


def _advice(kind: Any) -> str:
    import pyarrow as pa

    types = pa.types
    if types.is_struct(kind):
        names = [field.name for field in kind]
        if names == ["type", "size", "indices", "values"]:
            return (
                "a vector of Spark ML: convert it to an array with"
                " pyspark.ml.functions.vector_to_array"
            )
        return f"{_UNSUPPORTED}: select its fields in Spark, or leave it out of columns="
    if types.is_map(kind):
        return f"{_UNSUPPORTED}: select its values in Spark, or leave it out of columns="
    if types.is_null(kind):
        return "which has no values: leave it out of columns="
    return f"{_UNSUPPORTED}: cast it in Spark, or leave it out of columns="


def _object() -> np.dtype[Any]:
    import numpy as np

    return np.dtype(object)


def _convert_objects(array: Any) -> Array:
    values: Array = array.to_numpy(zero_copy_only=False)
    return values


def _convert_scalars(name: str, array: Any) -> Array:
    import pyarrow as pa

    if array.null_count and (pa.types.is_integer(array.type) or pa.types.is_boolean(array.type)):
        raise ConfigError(
            f"column {name!r} ({array.type}) contains nulls, which NumPy's {array.type} does not"
            " have: fill or drop them in Spark (fillna, dropna), or cast the column to double,"
            " where they become NaN"
        )
    values: Array = array.to_numpy(zero_copy_only=False)
    return values


def _convert_ragged(name: str, array: Any, inner: Column) -> Array:
    import numpy as np

    values, offsets = _elements_and_offsets(name, array)
    converted = inner.convert(values)
    converted.flags.writeable = False  # makes the rows, which are views, read-only too
    rows = np.empty(len(array), dtype=object)
    for row in range(len(array)):
        rows[row] = converted[offsets[row] : offsets[row + 1]]
    return rows


def _elements_and_offsets(name: str, array: Any) -> tuple[Any, Array]:
    """Return the elements of variable-length lists, and where each list begins among them."""
    _refuse_null_lists(name, array)
    offsets: Array = array.offsets.to_numpy()
    first = int(offsets[0])
    return elements(array), offsets - first if first else offsets


def _refuse_other_lengths(name: str, offsets: Array, shape: tuple[int, ...]) -> None:
    import numpy as np

    size = math.prod(shape)
    lengths = np.subtract(offsets[1:], offsets[:-1])
    if (differ := lengths != size).any():
        raise ConfigError(
            f"shapes: column {name!r} contains a list of {int(lengths[differ][0])} elements, but"
            f" the shape {shape} has {size}"
        )


def _refuse_null_lists(name: str, array: Any) -> None:
    if array.null_count:
        raise ConfigError(
            f"column {name!r} ({array.type}) contains nulls instead of lists: fill or drop them in"
            " Spark (coalesce, dropna)"
        )


def _fixed_list_column(name: str, kind: Any, shape: tuple[int, ...] | None) -> Column:
    """Return a column of lists of fixed length; `shape` replaces the shape of the type."""
    import pyarrow as pa

    inner = column(pa.field(name, kind.value_type))
    if inner.kind not in (ColumnKind.NUMBER, ColumnKind.TIME):
        raise ConfigError(
            f"column {name!r} has the type {kind}, but lists of fixed length must contain numbers:"
            " leave it out of columns="
        )
    row_shape = shape if shape is not None else (kind.list_size, *inner.shape)

    def convert(array: Any) -> Array:
        storage = array.storage if isinstance(array, pa.ExtensionArray) else array
        _refuse_null_lists(name, storage)
        return inner.convert(elements(storage)).reshape(len(array), *row_shape)

    return Column(name, inner.kind, inner.dtype, row_shape, convert, inner.is_view)


def _shaped_column(name: str, kind: Any, shape: tuple[int, ...]) -> Column:
    """Return a column of lists as arrays of a shape that the user gives."""
    import pyarrow as pa

    size = math.prod(shape)
    if _is_tensor(kind):
        kind = kind.storage_type
    if pa.types.is_fixed_size_list(kind) and kind.list_size == size:
        return _fixed_list_column(name, kind, shape)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise ConfigError(
            f"shapes: column {name!r} has the type {kind}; it must contain lists of {size} elements"
            f" for the shape {shape}"
        )
    inner = column(pa.field(name, kind.value_type))
    if inner.kind not in (ColumnKind.NUMBER, ColumnKind.TIME) or inner.shape:
        raise ConfigError(
            f"shapes: column {name!r} has the type {kind}; only lists of numbers can have a shape"
        )

    def check(array: Any) -> None:
        _refuse_null_lists(name, array)
        _refuse_other_lengths(name, array.offsets.to_numpy(), shape)

    def convert(array: Any) -> Array:
        return inner.convert(elements(array)).reshape(len(array), *shape)

    return Column(name, inner.kind, inner.dtype, shape, convert, inner.is_view, check)


def _check_shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        sizes = shape if isinstance(shape, Iterable) else (shape,)
        checked = tuple(map(operator.index, sizes))
    except TypeError:
        checked = ()
    if not checked or min(checked) < 1:
        raise ConfigError(
            f"shapes: {name!r} has {shape!r}; must be a tuple of sizes, such as (28, 28)"
        )
    return checked
