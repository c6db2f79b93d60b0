"""Arrow's types as NumPy's: each is converted, or refused by name."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hopsgpu.data.batches import convert_chunk
from hopsgpu.data.cache import memory_chunk
from hopsgpu.data.columns import ColumnKind, check_names, column, select_columns
from hopsgpu.errors import ConfigError
from hopsgpu.units import MIB


def convert(values: Any, kind: Any, shape: Any = None) -> np.ndarray[Any, Any]:
    """Through a slice, so that offsets count."""
    array = pa.array([*values[:1], *values], kind)[1:]
    made = column(pa.field("c", kind), shape)
    if made.check is not None:
        made.check(array)
    return made.convert(array)


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"])
def test_integers(name: str) -> None:
    found = convert([1, 2, 3], getattr(pa, name)())
    assert found.dtype == np.dtype(name)
    assert found.tolist() == [1, 2, 3]


def test_floats_have_nan_for_null() -> None:
    for kind, dtype in ((pa.float16(), "f2"), (pa.float32(), "f4"), (pa.float64(), "f8")):
        found = convert([np.float16(1.5), None, np.float16(-2)], kind)
        assert found.dtype == np.dtype(dtype)
        assert found[[0, 2]].tolist() == [1.5, -2]
        assert np.isnan(found[1])


def test_booleans() -> None:
    found = convert([True, False, True], pa.bool_())
    assert found.dtype == np.bool_
    assert found.tolist() == [True, False, True]


@pytest.mark.parametrize("kind", [pa.int32(), pa.bool_()])
def test_nulls_without_a_value_of_numpy_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="'c' .*nulls.*fillna"):
        convert([True, None] if kind == pa.bool_() else [1, None], kind)


def test_dates_and_times() -> None:
    day = datetime.date(2024, 2, 29)
    assert convert([day, None], pa.date32()).tolist() == [day, None]
    assert convert([day], pa.date32()).dtype == np.dtype("M8[D]")
    assert convert([day], pa.date64())[0] == np.datetime64("2024-02-29")
    moment = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    for unit in ("s", "ms", "us", "ns"):
        found = convert([moment, None], pa.timestamp(unit, "UTC"))
        assert found.dtype == np.dtype(f"M8[{unit}]")
        assert found[0] == np.datetime64("2024-02-29T12:30")
        assert np.isnat(found[1])
    assert convert([datetime.timedelta(seconds=3)], pa.duration("ms"))[0] == np.timedelta64(3, "s")


def test_decimals_are_doubles() -> None:
    found = convert([decimal.Decimal("12.50"), None], pa.decimal128(10, 2))
    assert found.dtype == np.float64
    assert found[0] == 12.5
    assert np.isnan(found[1])
    cents = [decimal.Decimal(n) / 100 for n in range(-1000, 1000)]
    assert convert(cents, pa.decimal128(10, 2)).tolist() == [n / 100 for n in range(-1000, 1000)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_strings(kind: Any) -> None:
    assert convert(["ü", None, ""], kind).tolist() == ["ü", None, ""]
    assert column(pa.field("c", kind)).kind is ColumnKind.TEXT


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(2)])
def test_binary(kind: Any) -> None:
    assert convert([b"\x00\xff", None], kind).tolist() == [b"\x00\xff", None]
    assert column(pa.field("c", kind)).kind is ColumnKind.BYTES


def test_lists_of_fixed_length_are_arrays() -> None:
    found = convert([[1, 2], [3, None]], pa.list_(pa.float32(), 2))
    assert found.dtype == np.float32
    assert found.shape == (2, 2)
    assert found[0].tolist() == [1, 2]
    assert np.isnan(found[1, 1])
    nested = pa.list_(pa.list_(pa.int16(), 2), 3)
    value = [[1, 2], [3, 4], [5, 6]]
    assert convert([value, value[::-1]], nested).tolist() == [value, value[::-1]]
    assert column(pa.field("c", nested)).shape == (3, 2)
    assert convert([[1, 2, 3, 4]], pa.list_(pa.int8(), 4), (2, 2)).tolist() == [[[1, 2], [3, 4]]]


def test_tensors() -> None:
    """Those that pyarrow makes have the order of their dimensions written down."""
    values = np.arange(12, dtype="f4").reshape(2, 2, 3)
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    for kind in (array.type, pa.fixed_shape_tensor(pa.float32(), (2, 3))):
        found = column(pa.field("c", kind)).convert(array[1:])
        assert (found == values[1:]).all()
        flat = column(pa.field("c", kind), (3, 2, 1)).convert(array)
        assert (flat == values.reshape(2, 3, 2, 1)).all()
        with pytest.raises(ConfigError, match="'c' .*lists of 5"):
            column(pa.field("c", kind), 5)


@pytest.mark.parametrize("shape", [None, (2, 3)])
def test_tensors_in_another_order_are_refused(shape: Any) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=(1, 0))
    with pytest.raises(ConfigError, match="'c' "):
        column(pa.field("c", kind), shape)


def test_fixed_lists_and_numbers_are_not_copied() -> None:
    array = pa.array(np.arange(8, dtype="f4"))
    whole = column(pa.field("c", pa.float32())).convert(array)
    assert whole.ctypes.data == array.buffers()[1].address
    lists = pa.FixedSizeListArray.from_arrays(array, 4)
    found = column(pa.field("c", lists.type)).convert(lists)
    assert found.ctypes.data == array.buffers()[1].address


@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
def test_lists_of_different_lengths(make: Any) -> None:
    found = convert([[1, 2], [], [3]], make(pa.int64()))
    assert found.dtype == object
    assert [row.tolist() for row in found] == [[1, 2], [], [3]]
    assert found[0].dtype == np.int64
    texts = convert([["a"], ["b", None]], make(pa.string()))
    assert [row.tolist() for row in texts] == [["a"], ["b", None]]
    deep = convert([[[1], [2, 3]], []], make(make(pa.int8())))
    assert [[inner.tolist() for inner in row] for row in deep] == [[[1], [2, 3]], []]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.bool_(), True),
        (pa.int64(), 1),
        (pa.string(), "a"),
        (pa.decimal128(3), decimal.Decimal(1)),
        (pa.list_(pa.bool_()), [True]),
        (pa.list_(pa.bool_(), 1), [True]),
    ],
)
def test_lists_are_read_only(kind: Any, value: Any) -> None:
    batch = pa.record_batch({"c": pa.array([[value]], pa.list_(kind))})
    (block,) = convert_chunk(memory_chunk(batch), [column(batch.schema.field("c"))], MIB, set())
    row = block.arrays["c"][0]
    assert not row.flags.writeable
    assert not (row.dtype == object and kind != pa.string() and row[0].flags.writeable)


def test_sizes_of_a_shape_may_be_numpys() -> None:
    wanted = [np.int64(2), (np.int64(1), 2), np.array([2, 1])]
    shapes = [convert([[1, 2]], pa.list_(pa.float64()), shape).shape for shape in wanted]
    assert shapes == [(1, 2), (1, 1, 2), (1, 2, 1)]


@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
def test_lists_are_arrays_where_the_shape_is_given(make: Any) -> None:
    found = convert([[1, 2, 3, 4], [5, 6, 7, 8]], make(pa.float64()), (2, 2))
    assert found.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert convert([[1, 2]], make(pa.float64()), 2).shape == (1, 2)
    with pytest.raises(ConfigError, match="'c' .* 3 .* 2"):
        convert([[1, 2], [1, 2, 3]], make(pa.float64()), 2)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int8()), pa.list_(pa.float32(), 1), pa.list_(pa.float32())]
)
def test_nulls_in_place_of_lists_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="'c' .*nulls"):
        convert([[1], None], kind)


VECTOR = pa.struct(
    {
        "type": pa.int8(),
        "size": pa.int32(),
        "indices": pa.list_(pa.int32()),
        "values": pa.list_(pa.float64()),
    }
)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (pa.struct({"a": pa.int8()}), "select its fields"),
        (VECTOR, "vector_to_array"),
        (pa.map_(pa.string(), pa.int8()), "select its values"),
        (pa.null(), "leave it out"),
        (pa.time32("s"), "cast it"),
        (pa.time64("us"), "cast it"),
        (pa.list_(pa.struct({"a": pa.int8()})), "select its fields"),
        (pa.list_(pa.string(), 2), "leave it out"),
    ],
)
def test_other_types_are_refused_by_name(kind: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"'c' .*{advice}"):
        column(pa.field("c", kind))


SCHEMA = pa.schema({"a": pa.int8(), "b": pa.list_(pa.float32())})


def test_columns_are_chosen_by_name() -> None:
    assert [one.name for one in select_columns(SCHEMA, None, {})] == ["a", "b"]
    chosen = select_columns(SCHEMA, ["b"], {"b": (2, 3)})
    assert [(one.name, one.shape, one.kind) for one in chosen] == [("b", (2, 3), ColumnKind.NUMBER)]


@pytest.mark.parametrize(
    ("columns", "shapes"),
    [
        (["c"], {}),
        ([], {}),
        (["a", "a"], {}),
        ("a", {}),
        (["a"], {"c": 1}),
        (["b"], {"b": ()}),
        (["b"], {"b": (0, 1)}),
        (["b"], {"b": "22"}),
        (["b"], {"b": (2.0, 1)}),
        (["a"], {"a": (1,)}),
    ],
)
def test_invalid_columns_are_refused(columns: Any, shapes: Any) -> None:
    with pytest.raises(ConfigError, match="columns=|shapes"):
        select_columns(SCHEMA, columns, shapes)


def test_names_that_are_twice_in_the_data_are_no_choice() -> None:
    twice = pa.schema([("a", pa.int8()), ("a", pa.int8()), ("b", pa.int8())])
    with pytest.raises(ConfigError, match="columns=None: .*: a, a, b"):
        check_names(twice, None)
    assert check_names(twice, ["b"]) == ["b"]
