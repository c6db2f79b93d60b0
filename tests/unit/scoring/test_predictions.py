"""What a function returned for a batch, as columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.scoring.predictions import predicted, with_schema


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
    batch = predicted(returned, 2, ())
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
    batch = predicted({"y": buffer}, 2, ())
    buffer[:] = 0.0
    assert batch.to_pydict() == {"y": [1.0, 2.0]}


def test_masked_values_become_null() -> None:
    returned = {"y": np.ma.masked_array([[1, 2], [3, 4]], [[False, True], [False, False]])}
    assert predicted(returned, 2, ()).to_pydict() == {"y": [[1, None], [3, 4]]}


def test_a_record_batch_is_taken_as_it_is() -> None:
    batch = pa.record_batch({"y": [1, None]})
    assert predicted(batch, 2, ()).equals(batch)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned a NoneType"),
        ({}, "columns named"),
        ({1: np.zeros(2)}, "columns named"),
        ({"y": np.zeros(3)}, r"'y' of shape \(3,\) for a batch of 2 rows"),
        ({"y": 1.0}, r"'y' of shape \(\)"),
        ({"id": np.zeros(2)}, "'id', which keep= also has"),
    ],
)
def test_anything_else_is_refused_with_what_it_was(returned: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        predicted(returned, 2, ("id",))


def test_later_batches_have_the_columns_of_the_first() -> None:
    first = pa.schema([("a", pa.float64()), ("b", pa.int64())])
    other = pa.record_batch({"b": [1], "a": pa.array([2.0], pa.float32())})
    assert with_schema(other, first).schema.equals(first)
    with pytest.raises(ConfigError, match="'b' as double, but as int64"):
        with_schema(pa.record_batch({"a": [1.0], "b": [0.5]}), first)
    with pytest.raises(ConfigError, match="returned the columns a, but a, b"):
        with_schema(pa.record_batch({"a": [1.0]}), first)
