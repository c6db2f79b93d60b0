"""Signatures: what is inferred from samples, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.serving.model_signature import Signature, Tensor, infer, infer_if_samples, load, parse


def test_arrays_have_names_types_and_shapes() -> None:
    assert infer(np.zeros((8, 32), np.float32), np.zeros(8, np.int64)) == {
        "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 32]}],
        "outputs": [{"name": "output", "datatype": "INT64", "shape": [-1]}],
    }


def test_mappings_lists_and_frames_have_several() -> None:
    frame = pd.DataFrame({"age": [1, 2], "name": ["a", "b"]})
    lists = [np.zeros((2, 1), bool), np.zeros((2, 3), np.uint8)]
    found = infer(frame, lists)
    assert [(t["name"], t["datatype"], t["shape"]) for t in found["inputs"]] == [
        ("age", "INT64", [-1]),
        ("name", "BYTES", [-1]),
    ]
    assert [(t["name"], t["datatype"], t["shape"]) for t in found["outputs"]] == [
        ("output_0", "BOOL", [-1, 1]),
        ("output_1", "UINT8", [-1, 3]),
    ]
    named = infer({"image": np.zeros((2, 28, 28), np.float16)}, {"loss": np.float64(1)})
    assert named["inputs"] == [{"name": "image", "datatype": "FP16", "shape": [-1, 28, 28]}]
    assert named["outputs"] == [{"name": "loss", "datatype": "FP64", "shape": []}]


class TorchLike:
    """A tensor whose type has no name, as torch's has none."""

    def __init__(self, printed: str, *shape: int | None) -> None:
        self.dtype = Printed(printed)
        self.shape = shape


class Printed:
    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("printed", "datatype"), [("torch.float32", "FP32"), ("torch.bfloat16", "BF16")]
)
def test_types_without_a_name_are_read_as_printed(printed: str, datatype: str) -> None:
    (tensor,) = infer(TorchLike(printed, 4, None), np.zeros(4))["inputs"]
    assert (tensor["datatype"], tensor["shape"]) == (datatype, [-1, -1])


@pytest.mark.parametrize("sample", [np.array(["a", "bcd"]), np.array([b"a"]), np.array([None])])
def test_strings_are_bytes(sample: Any) -> None:
    assert infer(sample, sample)["inputs"][0]["datatype"] == "BYTES"


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([1.0, 2.0], r"inputs\['input_0'\] is a float"),
        (3, "inputs is a int"),
        ({}, "inputs has no sample"),
        ([], "inputs has no sample"),
        ({1: np.zeros(2)}, "names must be strings"),
        (np.zeros(2, "datetime64[s]"), "the Open Inference Protocol lacks"),
        (np.zeros(2, np.complex64), "the Open Inference Protocol lacks"),
        (np.zeros((3, 2)), r"must have one size: inputs\['input'\] 3, outputs\['output'\] 2"),
    ],
)
def test_what_is_no_batch_of_samples_is_refused(inputs: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        infer(inputs, np.zeros(2))


def test_a_publisher_gives_samples_or_json() -> None:
    x, y = np.zeros((2, 3)), np.zeros(2)
    assert infer_if_samples((x, y)) == infer_if_samples({"inputs": x, "outputs": y}) == infer(x, y)
    assert infer_if_samples(({"a": x}, [y])) == infer({"a": x}, [y])
    for as_is in (None, 7, [1, 2], {"inputs": {"x": [None, 3]}, "outputs": ["y"]}, {"x": "FP32"}):
        assert infer_if_samples(as_is) is as_is
    with pytest.raises(ConfigError, match="outputs is a str"):
        infer_if_samples((x, "y"))


def test_a_signature_is_read_back() -> None:
    x, y = np.zeros((2, 3)), np.zeros(2)
    assert parse(infer({"x": x}, {"y": y})) == Signature(
        (Tensor("x", "FP64", (-1, 3)),), (Tensor("y", "FP64", (-1,)),)
    )
    odd = [None, 7, [], {"inputs": []}, {"inputs": ["x"], "outputs": []}]
    odd.append({"inputs": [{"name": "x", "datatype": "float", "shape": [1]}], "outputs": []})
    for other in odd:
        assert parse(other) is None


def test_a_file_is_json_of_limited_size() -> None:
    assert load(b'{"a": 1}') == {"a": 1}
    for odd in (b"{", b"NaN", b" " * (2**20 + 1)):
        with pytest.raises(ValueError):
            load(odd)
