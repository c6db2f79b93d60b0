"""What a function returned for a batch, as columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.scoring.predictions import first_schema, prediction_batch, with_schema


class Tensor:
    """As torch has it on a GPU: it becomes an array only on the CPU."""

    def __init__(self, values: list[float], where: str = "cuda") -> None:
        self.values, self.where = values, where

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return Tensor(self.values, "cpu")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        assert self.where == "cpu"
        return np.array(self.values)


def test_arrays_become_columns() -> None:
    returned = {
        "number": np.array([1.5, 2.5], dtype=np.float32),
        "vector": np.arange(6).reshape(2, 3),
        "image": np.zeros((2, 2, 2), dtype=np.uint8),
        "label": ["a", "bb"],
        "tensor": Tensor([1.0, 2.0]),
        "arrow": pa.chunked_array([[1], [2]]),
    }
    batch = prediction_batch(returned, 2, ())
    assert batch.to_pylist()[1] == {
        "number": 2.5,
        "vector": [3, 4, 5],
        "image": [[0, 0], [0, 0]],
        "label": "bb",
        "tensor": 2.0,
        "arrow": 2,
    }
    assert batch.schema.field("vector").type == pa.list_(pa.field("item", pa.int64()), 3)
    assert batch.schema.field("number").type == pa.float32()


def test_an_array_that_the_function_uses_again_is_copied() -> None:
    buffer = np.array([1.0, 2.0])
    batch = prediction_batch({"y": buffer}, 2, ())
    buffer[:] = 0.0
    assert batch.to_pydict() == {"y": [1.0, 2.0]}


def test_an_arrow_array_in_memory_of_the_functions_is_copied() -> None:
    buffer = np.array([1.0, 2.0])
    batch = prediction_batch(pa.record_batch({"y": buffer}), 2, ())
    buffer[:] = 0.0
    assert batch.to_pydict() == {"y": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.array([[0.5, 1], [2, 3]], np.float16), pa.list_(pa.float32(), 2)),
        (pa.array([0.5, 1.0], pa.float16()), pa.float32()),
        (np.array(["2026-01-02T03:04:05", "1970-01-01"], "M8[ns]"), pa.timestamp("us")),
        (np.array(["2026-01-02", "1970-01-01"], "M8[s]"), pa.timestamp("ms")),
        (pa.array([0, 86400000], pa.date64()), pa.date32()),
        (pa.array(["a", "b"]).dictionary_encode(), pa.string()),
        (pa.array([["a"], []], pa.list_(pa.large_string())), pa.list_(pa.large_string())),
    ],
)
def test_types_are_such_as_spark_reads(value: Any, kind: pa.DataType) -> None:
    column = prediction_batch({"y": value}, 2, ()).column("y")
    assert column.type == kind
    assert len(column) == 2 and column.null_count == 0


TEXT = pa.string()


@pytest.mark.parametrize(
    ("value", "expected", "kind"),
    [
        (np.array([b"a", "ü".encode()]), ["a", "ü"], TEXT),
        (np.array([b"a", None], object), ["a", None], TEXT),
        ([b"a", b"bb"], ["a", "bb"], TEXT),
        (np.array([[b"a"], [b"b"]]), [["a"], ["b"]], pa.list_(TEXT, 1)),
        (np.array(["a", "b"], np.dtypes.StringDType()), ["a", "b"], TEXT),
        ([None, "b"], [None, "b"], TEXT),
        (["a", None], ["a", None], TEXT),
        (np.array(["a", np.nan], object), ["a", None], TEXT),
        ([["a"], ["b", "c"]], [["a"], ["b", "c"]], pa.list_(TEXT)),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]], pa.list_(pa.int64())),
        ([np.ones(2, np.float32), np.ones(1)], [[1, 1], [1]], pa.list_(pa.float64())),
        ([1, None], [1, None], pa.int64()),
        (pa.array([b"\xff", b"a"]), [b"\xff", b"a"], pa.binary()),
        (
            [{"label": b"a", "score": 0.5}, {"label": b"b", "score": 1.0}],
            [{"label": "a", "score": 0.5}, {"label": "b", "score": 1.0}],
            pa.struct({"label": TEXT, "score": pa.float64()}),
        ),
    ],
)
def test_bytes_are_text_and_rows_may_have_any_length(
    value: Any, expected: list[Any], kind: pa.DataType
) -> None:
    column = prediction_batch({"y": value}, 2, ()).column("y")
    assert (column.type, column.to_pylist()) == (kind, expected)


def test_tensors_of_other_frameworks_become_columns() -> None:
    import tensorflow as tf
    import torch

    texts = tf.constant(["ä", "b"])
    returned = {
        "text": texts,
        "of numpy": texts.numpy(),
        "scalars": list(texts),
        "ragged": tf.ragged.constant([["a", "b"], []]),
        "deep": tf.ragged.constant([[[1], [2, 3]], []], dtype=tf.int16),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
        "listed": [torch.ones(2, dtype=torch.bfloat16), torch.ones(1)],
    }
    batch = prediction_batch(returned, 2, ())
    assert batch.to_pylist() == [
        {"text": "ä", "of numpy": "ä", "scalars": "ä", "ragged": ["a", "b"]}
        | {"deep": [[1], [2, 3]], "nested": [1, 1], "listed": [1, 1]},
        {"text": "b", "of numpy": "b", "scalars": "b", "ragged": []}
        | {"deep": [], "nested": [1], "listed": [1]},
    ]
    assert batch.schema.field("ragged").type == pa.list_(TEXT)
    assert batch.schema.field("deep").type == pa.list_(pa.list_(pa.int16()))


def test_rows_and_data_frames_become_columns() -> None:
    import pandas

    rows = [{"label": "P", "score": 0.5}, {"label": "N", "score": 1.0}]
    assert prediction_batch(rows, 2, ()).to_pylist() == rows
    frame = pandas.DataFrame(rows)
    frame["kind"] = pandas.Categorical(["a", "b"])
    frame["maybe"] = pandas.Series(["x", None], dtype="string")
    frame["count"] = pandas.Series([1, None], dtype="Int64")
    batch = prediction_batch(frame, 2, ())
    assert batch.to_pylist() == [
        {**rows[0], "kind": "a", "maybe": "x", "count": 1},
        {**rows[1], "kind": "b", "maybe": None, "count": None},
    ]
    assert batch.schema.field("kind").type == TEXT
    with pytest.raises(ConfigError, match="'score' .* row 1 "):
        prediction_batch([rows[0], {"label": "N"}], 2, ())


def test_lossy_predictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'y' .*timestamp\[ns\]"):
        prediction_batch({"y": np.array([1], "M8[ns]")}, 1, ())


def test_bfloat16_becomes_float32() -> None:
    import torch

    batch = prediction_batch({"y": torch.tensor([0.5, 1.0], dtype=torch.bfloat16)}, 2, ())
    assert batch.to_pydict() == {"y": [0.5, 1.0]} and batch.schema.field("y").type == pa.float32()


def test_a_first_batch_must_say_its_types() -> None:
    for values in ([None, None], [[], []]):
        batch = prediction_batch({"label": np.array([*values, 0], object)[:2]}, 2, ())
        with pytest.raises(ConfigError, match="'label' .*pyarrow.array"):
            first_schema(batch)
    known = pa.schema([("label", pa.string())])
    nothing = prediction_batch({"label": np.array([None, None])}, 2, ())
    assert with_schema(nothing, known).to_pydict() == {"label": [None, None]}
    assert first_schema(with_schema(nothing, known)).equals(known)


def test_masked_values_become_null() -> None:
    returned = {"y": np.ma.masked_array([[1, 2], [3, 4]], [[False, True], [False, False]])}
    assert prediction_batch(returned, 2, ()).to_pydict() == {"y": [[1, None], [3, 4]]}


def test_a_record_batch_is_taken_as_it_is() -> None:
    batch = pa.record_batch({"y": [1, None]})
    assert prediction_batch(batch, 2, ()).equals(batch)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned a NoneType"),
        ({}, "columns named"),
        ({1: np.zeros(2)}, "columns named"),
        ({"y": np.zeros(3)}, r"'y' of shape \(3,\) for a batch of 2 rows"),
        ({"y": 1.0}, r"'y' of shape \(\)"),
        ({"y": [b"a", b"\xff"]}, r"bytes that are not text in UTF-8.*pyarrow.binary\(\)"),
        ({"y": ["a", 1]}, "no column of one type"),
        ({"y": [1.0, "a"]}, "no column of one type"),
        ([1, 2], "returned a list: return a dict"),
        ({"id": np.zeros(2)}, "'id', which keep= also has"),
        ({"ID": np.zeros(2)}, "'ID', which keep= also has"),
        ({"y": np.zeros(2), "Y": np.zeros(2)}, "y, Y, of which some differ only in upper"),
    ],
)
def test_anything_else_is_refused_with_what_it_was(returned: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prediction_batch(returned, 2, ("id",))


def test_later_batches_have_the_columns_of_the_first() -> None:
    first = pa.schema([("a", pa.float64()), ("b", pa.int64())])
    other = pa.record_batch({"b": [1], "a": pa.array([2.0], pa.float32())})
    assert with_schema(other, first).schema.equals(first)
    with pytest.raises(ConfigError, match="'b' .*double.*int64"):
        with_schema(pa.record_batch({"a": [1.0], "b": [0.5]}), first)
    with pytest.raises(ConfigError, match=" a, .* a, b"):
        with_schema(pa.record_batch({"a": [1.0]}), first)
