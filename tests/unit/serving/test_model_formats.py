"""Formats: what is recognised by name and content, without loading anything."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import BinaryIO

import pytest

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.serving.model_formats import ModelFormat, chosen, pickle_warning, recognised


def archive(*names: str) -> bytes:
    """An archive as torch writes them, by the names of what is in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as written:
        for name in names:
            written.writestr(f"model/{name}", b"")
    return buffer.getvalue()


STATE = archive("data.pkl", "data/0", "version")
SCRIPT = archive("data.pkl", "constants.pkl", "code/__torch__.py")
BOOSTER = b'{"learner":{"attributes":{}}, "version":[3,0,0]}'


def found(files: Mapping[str, bytes]) -> list[tuple[str, str]]:
    opened: list[BinaryIO] = []

    def open_file(path: str) -> BinaryIO:
        opened.append(io.BytesIO(files[path]))
        return opened[-1]

    formats = [(one.name, one.path) for one in recognised(files, open_file)]
    assert all(file.closed for file in opened)
    return formats


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.pt": SCRIPT}, [("TorchScript", "a.pt")]),
        ({"a.pt": STATE, "log.txt": b""}, [("state_dict", "a.pt")]),
        ({"old.pth": b"\x80\x02\x8a"}, [("state_dict", "old.pth")]),
        ({"exported.pt": archive("archive_format", "models/model.json")}, []),
        ({"net/model.onnx": b"", "net/model.onnx_data": b""}, [("ONNX", "net/model.onnx")]),
        ({"c.skops": b""}, [("skops", "c.skops")]),
        (
            {"a.pkl": b"", "b.joblib": b"", "C.PICKLE": b""},
            [("pickle", name) for name in ("C.PICKLE", "a.pkl", "b.joblib")],
        ),
        (
            {"m.json": BOOSTER, "config.json": b'{"learner": 3}', "signature.json": b"{}"},
            [("XGBoost", "m.json")],
        ),
        ({"m.json": b'{\n "version": [1, 7, 6],\n "learner": {'}, [("XGBoost", "m.json")]),
        ({"m.ubj": b"{L" + b"\0" * 7 + b"\x07learner{"}, [("XGBoost", "m.ubj")]),
        ({"m.ubj": b"learner", "m.json": b""}, []),
        ({"saved_model.pb": b"", "variables/variables.index": b""}, [("SavedModel", ".")]),
        (
            {"a/saved_model.pb": b"", "a/assets/x.json": BOOSTER, "x.json": BOOSTER},
            [("SavedModel", "a"), ("XGBoost", "x.json")],
        ),
        (
            {"saved_model.pb": b"", "assets/x.onnx": b"", "net/m.onnx": b""},
            [("SavedModel", "."), ("ONNX", "net/m.onnx")],
        ),
        ({"last.pt": b"epoch 7", "empty.pth": b"", "cut.pt": b"PK\x03\x04"}, []),
        ({"readme.md": b""}, []),
    ],
)
def test_models_are_recognised(files: dict[str, bytes], expected: list[tuple[str, str]]) -> None:
    assert found(files) == expected


def test_a_state_dict_has_the_class_that_is_named_for_it() -> None:
    files = {
        "a.pt": STATE,
        "b.pt": SCRIPT,
        "model_class.json": json.dumps({"class": "own.nets:Net", "arguments": {"n": 3}}).encode(),
    }
    first, second = recognised(files, lambda path: io.BytesIO(files[path]))
    assert first == ModelFormat("state_dict", "a.pt", "own.nets:Net")
    assert str(first) == "state_dict of own.nets:Net (a.pt)"
    assert second == ModelFormat("TorchScript", "b.pt")


def test_a_class_may_be_named_beside_its_state_dict() -> None:
    beside = json.dumps({"class": "own.nets:Inner"}).encode()
    files = {"net/a.pt": STATE, "net/model_class.json": beside, "b.pt": STATE}
    classes = {
        one.path: one.model_class for one in recognised(files, lambda p: io.BytesIO(files[p]))
    }
    assert classes == {"net/a.pt": "own.nets:Inner", "b.pt": None}


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"class": 1}', b'{"class": "own.nets.Net"}', b'{"class": "os:system()"}']
    + [b'{"class": "a:B", "arguments": [1]}', b" " * 2**17],
)
def test_an_odd_class_is_refused(content: bytes) -> None:
    files = {"a.pt": STATE, "model_class.json": content}
    with pytest.raises(StoreError, match=r'must be like {"class": "package.module:Class"') as told:
        found(files)
    assert told.value.kind == "damaged"


def test_one_model_is_chosen() -> None:
    onnx, state = ModelFormat("ONNX", "a.onnx"), ModelFormat("state_dict", "a.pt")
    assert chosen([onnx], None, None, "url") == onnx
    assert chosen([onnx, state], "a.pt", None, "url") == state
    assert chosen([onnx, state], None, ("ONNX", "TorchScript"), "url") == onnx
    with pytest.raises(ConfigError, match=r"several models: ONNX \(a.onnx\).*path='a.onnx'"):
        chosen([onnx, state], None, None, "url")
    with pytest.raises(ConfigError, match=r"no model at 'b' .*; models: ONNX \(a.onnx\)"):
        chosen([onnx], "b", None, "url")
    with pytest.raises(ConfigError, match=r"no model of SavedModel .*; models: none"):
        chosen([], None, ("SavedModel",), "url")


def test_publishers_of_pickles_are_warned() -> None:
    assert pickle_warning(["a.onnx", "b.skops"]) is None
    assert (pickle_warning(["b.joblib", "a.pkl"]) or "").startswith("a.pkl, b.joblib: whoever")
