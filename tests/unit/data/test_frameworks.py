"""Batches as torch's and TensorFlow's tensors."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hopsgpu.data.rank_data import RankData
from hopsgpu.errors import ConfigError
from tests.unit.data.worlds import only_rank

ROWS = 250
DENSE = ["id", "x", "yes", "word", "raw", "ragged"]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[RankData]:
    numbers = np.arange(ROWS)
    table = pa.table(
        {
            "id": numbers,
            "x": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 4).astype("f4")), 4),
            "image": pa.array([[n] * 4 for n in numbers], pa.list_(pa.uint8())),
            "yes": pa.array([n % 2 == 0 for n in numbers]),
            "word": [f"ö {n}" for n in numbers],
            "raw": [bytes([n]) for n in numbers],
            "ragged": [list(range(n % 3)) for n in numbers],
            "day": [datetime.date(2024, 1, 1)] * ROWS,
            "hole": pa.array([None, *["a"] * (ROWS - 1)], pa.string()),
        }
    )
    (tmp_path / "lake").mkdir()
    parquet.write_table(table, tmp_path / "lake" / "0.parquet", row_group_size=40)
    with only_rank(tmp_path / "lake", tmp_path / "kept") as rank:
        yield rank


def ids(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in batch["id"]]


def test_torch_tensors(data: RankData) -> None:
    import torch

    dataset = data.torch(64, [*DENSE, "image"], shapes={"image": (1, 2, 2)})
    assert len(dataset) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = list(torch.utils.data.DataLoader(dataset, batch_size=None))
    assert [len(batch["id"]) for batch in batches] == [64, 64, 64, 58]
    first = batches[0]
    numbers = first["id"].tolist()
    kinds = {name: first[name].dtype for name in ("id", "x", "image", "yes")}
    assert kinds == {
        "id": torch.int64,
        "x": torch.float32,
        "image": torch.uint8,
        "yes": torch.bool,
    }
    assert first["image"].shape == (64, 1, 2, 2)
    assert first["x"][:, 3].tolist() == numbers
    assert first["word"] == [f"ö {n}" for n in numbers]
    assert first["raw"] == [bytes([n]) for n in numbers]
    assert [row.tolist() for row in first["ragged"]] == [list(range(n % 3)) for n in numbers]


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_lists_that_could_be_one_tensor_are_warned_of_once(data: RankData, framework: str) -> None:
    dataset = getattr(data, framework)(64, ["image"])
    with pytest.warns(UserWarning, match=r"'image'.*shapes={'image': \(4,\)}$") as told:
        batches = list(dataset)
    assert len(batches) == 4 and len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(getattr(data, framework)(64, ["ragged"]))
        list(getattr(data, framework)(64, ["image"], shapes={"image": (4,)}))


def test_torch_tensors_may_be_changed_in_place(data: RankData) -> None:
    dataset = data.torch(64, ["id", "x"])
    for _ in range(3):
        for batch in dataset:
            assert (batch["x"][:, 0] == batch["id"]).all()
            batch["x"].mul_(0)


def test_each_iteration_of_torch_is_an_epoch(data: RankData) -> None:
    dataset = data.torch(64, ["id"], shuffle=True, seed=7, drop_remainder=True)
    assert len(dataset) == 3
    first, second = ids(dataset), ids(dataset)
    assert first != second
    assert len(set(first)) == 3 * 64
    whole = ids(data.batches(64, ["id"], shuffle=True, seed=7, epochs=2))
    assert (first, second) == (whole[:192], whole[ROWS : ROWS + 192])
    dataset.set_epoch(0)
    assert ids(dataset) == first


def test_torch_refuses_workers_and_dates(data: RankData) -> None:
    import torch

    with pytest.raises(ConfigError, match=r"'day' .*datetime64\[D\].*torch"):
        data.torch(64)
    loader = torch.utils.data.DataLoader(data.torch(64, ["id"]), batch_size=None, num_workers=1)
    with pytest.raises(ConfigError, match="num_workers"):
        next(iter(loader))


def test_tensorflow_tensors(data: RankData) -> None:
    import tensorflow as tf

    dataset = data.tensorflow(64, [*DENSE, "image"], shapes={"image": (2, 2)})
    assert dataset.element_spec == {
        "id": tf.TensorSpec((None,), tf.int64),
        "x": tf.TensorSpec((None, 4), tf.float32),
        "image": tf.TensorSpec((None, 2, 2), tf.uint8),
        "yes": tf.TensorSpec((None,), tf.bool),
        "word": tf.TensorSpec((None,), tf.string),
        "raw": tf.TensorSpec((None,), tf.string),
        "ragged": tf.RaggedTensorSpec((None, None), tf.int64, ragged_rank=1),
    }
    assert int(dataset.cardinality()) == 4
    batches = list(dataset)
    assert [len(batch["id"]) for batch in batches] == [64, 64, 64, 58]
    numbers = batches[0]["id"].numpy().tolist()
    assert batches[0]["word"].numpy().tolist() == [f"ö {n}".encode() for n in numbers]
    assert batches[0]["raw"].numpy().tolist() == [bytes([n]) for n in numbers]
    assert batches[0]["ragged"].to_list() == [list(range(n % 3)) for n in numbers]
    assert batches[0]["x"].numpy()[:, 2].tolist() == numbers


def test_each_iteration_of_tensorflow_is_an_epoch(data: RankData) -> None:
    import tensorflow as tf

    dataset = data.tensorflow(100, ["id"], shuffle=True, drop_remainder=True)
    assert dataset.element_spec == {"id": tf.TensorSpec((100,), tf.int64)}
    first, second = ids(dataset), ids(dataset)
    assert len(first) == len(second) == 200
    assert first != second
    assert int(dataset.cardinality()) == 2


@pytest.fixture
def lists(tmp_path: Path) -> Iterator[RankData]:
    day = datetime.date(2024, 1, 1)
    columns = {
        "days": pa.array([[day], []], pa.list_(pa.date32())),
        "times": pa.array([[0], []], pa.list_(pa.timestamp("us"))),
        "spans": pa.array([[0], []], pa.list_(pa.duration("us"))),
        "spells": pa.array([[[0, 1]], []], pa.list_(pa.list_(pa.timestamp("us"), 2))),
        "boxes": pa.array([[[0, 1], [2, 3]], []], pa.list_(pa.list_(pa.float32(), 2))),
        "words": pa.array([["a", "b"], []], pa.list_(pa.string())),
        "nested": pa.array([[[1], [2, 3]], []], pa.list_(pa.list_(pa.int64()))),
    }
    (tmp_path / "lake").mkdir()
    parquet.write_table(pa.table(columns), tmp_path / "lake" / "0.parquet")
    with only_rank(tmp_path / "lake", tmp_path / "kept") as rank:
        yield rank


@pytest.mark.parametrize("name", ["days", "times", "spans", "spells"])
def test_lists_of_dates_and_times_are_refused_by_name(lists: RankData, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' .*64.*torch"):
        lists.torch(2, [name])
    with pytest.raises(ConfigError, match=f"'{name}' .*lists.*64.*TensorFlow"):
        lists.tensorflow(2, [name])


def test_lists_of_lists_and_of_strings(lists: RankData) -> None:
    (batch,) = lists.torch(2, ["boxes", "words", "nested"])
    assert [tuple(row.shape) for row in batch["boxes"]] == [(2, 2), (0, 2)]
    assert batch["boxes"][0].tolist() == [[0, 1], [2, 3]]
    assert [(type(row), row.tolist()) for row in batch["words"]] == [
        (np.ndarray, ["a", "b"]),
        (np.ndarray, []),
    ]
    assert [type(row) for row in batch["nested"]] == [np.ndarray] * 2
    assert [inner.tolist() for inner in batch["nested"][0]] == [[1], [2, 3]]


def test_tensorflow_has_ragged_tensors_of_lists_of_fixed_length(lists: RankData) -> None:
    import tensorflow as tf

    dataset = lists.tensorflow(1, ["boxes"])
    spec = tf.RaggedTensorSpec((None, None, 2), tf.float32, ragged_rank=1)
    assert dataset.element_spec == {"boxes": spec}
    assert [batch["boxes"].to_list() for batch in dataset] == [[[[0, 1], [2, 3]]], [[]]]
    for name in ("words", "nested"):
        with pytest.raises(ConfigError, match=f"'{name}' .*lists.*TensorFlow"):
            lists.tensorflow(1, [name])


def test_tensorflow_refuses_by_name(data: RankData) -> None:
    import tensorflow as tf

    with pytest.raises(ConfigError, match="'day' .*dates"):
        data.tensorflow(64, ["id", "day"])
    with pytest.raises(tf.errors.OpError, match="'hole' contains nulls"):
        list(data.tensorflow(64, ["hole"]))
