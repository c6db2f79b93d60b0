"""Formats: what is recognised by name and content, without loading anything."""

from __future__ import annotations

import collections
import io
import json
import pickle
import time
import tracemalloc
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import pytest

from hopsgpu.errors import ConfigError, StoreError
from hopsgpu.serving.model_formats import (
    ModelFormat,
    choose_format,
    pickle_warning,
    recognise_formats,
)
from hopsgpu.serving.model_loading import check_trust


def archive(*names: str) -> bytes:
    """An archive as torch writes them, by the names of what is in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as written:
        for name in names:
            written.writestr(f"model/{name}", b"")
    return buffer.getvalue()


def saved(value: Any) -> bytes:
    """What torch.save writes of a value without tensors."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as written:
        written.writestr("model/data.pkl", pickle.dumps(value, 2))
    return buffer.getvalue()


class Planted:
    """An object whose unpickling would fail the test."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


def header(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


STATE = saved({})
SAFE = header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4)
BERT = json.dumps({"model_type": "bert", "architectures": ["BertModel"]}).encode()
SCRIPT = archive("data.pkl", "constants.pkl", "code/__torch__.py")
BOOSTER = b'{"learner":{"attributes":{}}, "version":[3,0,0]}'


def found(files: Mapping[str, bytes]) -> list[tuple[str, str]]:
    opened: list[BinaryIO] = []

    def open_file(path: str) -> BinaryIO:
        opened.append(io.BytesIO(files[path]))
        return opened[-1]

    formats = [(one.name, one.path) for one in recognise_formats(files, open_file)]
    assert all(file.closed for file in opened)
    return formats


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.pt": SCRIPT}, [("TorchScript", "a.pt")]),
        ({"a.pt": STATE, "log.txt": b""}, [("state_dict", "a.pt")]),
        ({"plain.pt": pickle.dumps({"w": 1})}, [("pickle", "plain.pt")]),
        ({"c.pt": saved({"epoch": 3})}, [("torch checkpoint", "c.pt")]),
        ({"c.pt": saved({"net": Planted()})}, [("torch checkpoint", "c.pt")]),
        ({"c.pt": saved([{}])}, [("torch checkpoint", "c.pt")]),
        ({"c.pt": saved({"_extra_state": {}})}, [("state_dict", "c.pt")]),
        ({"c.pt": saved(collections.OrderedDict())}, [("state_dict", "c.pt")]),
        ({"c.pt": saved(Planted())}, [("pickle", "c.pt")]),
        (
            {"l.ckpt": saved({"pytorch-lightning_version": "2"}), "x.ckpt": b"", "y.bin": b"\x80"},
            [("Lightning checkpoint", "l.ckpt")],
        ),
        (
            {"exported.pt": archive("archive_format", "models/model.json")},
            [("torch.export", "exported.pt")],
        ),
        ({"a.pt2": archive("serialized_exported_program.json")}, [("torch.export", "a.pt2")]),
        ({"a.pt2": archive("data/aotinductor/model/x.so")}, []),
        ({"w.safetensors": SAFE, "x.safetensors": b"{}"}, [("safetensors", "w.safetensors")]),
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
        (
            {"config.json": BERT, "model.safetensors": SAFE, "optimizer.pt": STATE}
            | {"training_args.bin": saved(Planted()), "onnx/model.onnx": b"", "own.pkl": b""},
            [("transformers", "."), ("ONNX", "onnx/model.onnx"), ("pickle", "own.pkl")],
        ),
        (
            {"checkpoint-5/config.json": BERT, "checkpoint-5/model.safetensors": SAFE}
            | {"config.json": BERT, "model.safetensors": SAFE},
            [("transformers", "."), ("transformers", "checkpoint-5")],
        ),
        ({"config.json": BERT}, []),
        (
            {"config.json": b"[" * 10**5, "model.safetensors": SAFE},
            [("safetensors", "model.safetensors")],
        ),
        (
            {"net/adapter_config.json": b'{"peft_type": 1}', "net/adapter_model.safetensors": SAFE},
            [("PEFT", "net")],
        ),
        (
            {"model_index.json": b'{"_class_name": "Pipeline"}', "text/config.json": BERT}
            | {"text/model.safetensors": SAFE, "unet/x.bin": STATE},
            [("diffusers", ".")],
        ),
        (
            {"modules.json": b"[]", "config_sentence_transformers.json": b"{}", "config.json": BERT}
            | {"model.safetensors": SAFE},
            [("sentence-transformers", ".")],
        ),
        ({"last.pt": b"epoch 7", "empty.pth": b"", "cut.pt": b"PK\x03\x04"}, []),
        ({"readme.md": b""}, []),
    ],
)
def test_models_are_recognised(files: dict[str, bytes], expected: list[tuple[str, str]]) -> None:
    assert found(files) == expected


def shards(*listed: str) -> bytes:
    return json.dumps({"weight_map": {str(n): name for n, name in enumerate(listed)}}).encode()


def test_weights_in_several_files_are_one_model(caplog: pytest.LogCaptureFixture) -> None:
    first, second, index = "m-1.safetensors", "m-2.safetensors", "m.safetensors.index.json"
    files = {first: SAFE, second: SAFE, index: shards(first, second)}
    assert found(files) == [("safetensors", index)]
    whole = {"config.json": BERT, "model-00001-of-00001.safetensors": SAFE}
    whole["model.safetensors.index.json"] = shards("model-00001-of-00001.safetensors")
    assert found(whole) == [("transformers", ".")]
    for odd in ("../secret.safetensors", "/etc/secret.safetensors", "missing.safetensors"):
        whole["model.safetensors.index.json"] = shards(odd)
        assert found(whole) == [("safetensors", "model-00001-of-00001.safetensors")]
        assert odd in caplog.text


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"model.safetensors": SAFE}, None),
        ({"model.safetensors": SAFE, "pytorch_model.bin": STATE}, None),
        ({"pytorch_model.bin": STATE}, r"has no weights but pickles \(pytorch_model.bin\)"),
        (
            {"model.safetensors": SAFE, "tokenizer_config.json": b'{"auto_map": {}}'},
            r"names code of its own \(tokenizer_config.json: auto_map\)",
        ),
        (
            {"model.safetensors": SAFE}
            | {"config.json": BERT[:-1] + b', "text": [{"attn_implementation": "org/kernel"}]}'},
            r"names code of its own \(config.json: attn_implementation\)",
        ),
        (
            {"model.safetensors": SAFE}
            | {"config.json": BERT[:-1] + b', "attn_implementation": "sdpa"}'},
            None,
        ),
    ],
)
def test_what_runs_code_of_a_pretrained_model_needs_trust(
    files: dict[str, bytes], reason: str | None
) -> None:
    files = {"config.json": BERT, **files}
    (model,) = recognise_formats(files, lambda path: io.BytesIO(files[path]))
    assert model.name == "transformers"
    if reason is None:
        assert model.trust_reason is None
        return
    for trust in (False, ["transformers"]):
        with pytest.raises(ConfigError, match=reason):
            check_trust(model, trust)
    check_trust(model, True)


def test_hostile_archives_cost_little() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as written:
        written.writestr("m/data.pkl", bytes(200 * 2**20))
    files = {"bomb.pt": buffer.getvalue()}
    # A string that claims to be of many bytes, and a list of the archive's that claims to be long.
    files["claim.pt"] = archive_of(b"\x80\x04\x8d" + (2**60).to_bytes(8, "little"))
    # More operations than a state_dict has, and compressed, damaged and unknown entries.
    files["steps.pt"] = archive_of(b"\x80\x02" + b"N0" * 2**21 + b"N.")
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as written:
            written.writestr("m/data.pkl", b"\x80\x02}." * 99)
        damaged = bytearray(buffer.getvalue())
        damaged[50:60] = b"\xff" * 10
        files |= {f"pack{method}.pt": buffer.getvalue(), f"bad{method}.pt": bytes(damaged)}
        files |= {f"bad{method}.keras": bytes(damaged)}
    end = bytearray(archive_of(b"."))
    end[-10:-6] = (2**31).to_bytes(4, "little")
    files["end.pt"] = bytes(end)
    number = b"I" + b"9" * 9999 + b"\n."
    for odd in (b"", b".", b"(", b"R.", b"\x80\x02}(u", b"h\x07.", b"(1", number):
        files[f"odd{len(files)}.pt"] = archive_of(odd)
    begun = time.process_time()
    tracemalloc.start()
    assert found(files) == []
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()
    assert time.process_time() - begun < 5


def archive_of(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as written:
        written.writestr("m/data.pkl", pickled)
    return buffer.getvalue()


def test_a_state_dict_has_the_class_that_is_named_for_it() -> None:
    files = {
        "a.pt": STATE,
        "b.pt": SCRIPT,
        "model_class.json": json.dumps({"class": "own.nets:Net", "arguments": {"n": 3}}).encode(),
    }
    first, second = recognise_formats(files, lambda path: io.BytesIO(files[path]))
    assert (first.name, first.path, first.model_class) == ("state_dict", "a.pt", "own.nets:Net")
    assert first.trust_reason == "names a class to call, own.nets:Net (model_class.json)"
    assert str(first) == "state_dict of own.nets:Net (a.pt)"
    assert (second.name, second.path, second.model_class) == ("TorchScript", "b.pt", None)


def test_a_class_may_be_named_beside_its_state_dict() -> None:
    beside = json.dumps({"class": "own.nets:Inner"}).encode()
    files = {"net/a.pt": STATE, "net/model_class.json": beside, "b.pt": STATE}
    models = recognise_formats(files, lambda path: io.BytesIO(files[path]))
    classes = {model.path: model.model_class for model in models}
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
    assert choose_format([onnx], None, None, "url") == onnx
    assert choose_format([onnx, state], "a.pt", None, "url") == state
    assert choose_format([onnx, state], None, ("ONNX", "TorchScript"), "url") == onnx
    with pytest.raises(ConfigError, match=r"several models: ONNX \(a.onnx\).*path='a.onnx'"):
        choose_format([onnx, state], None, None, "url")
    with pytest.raises(ConfigError, match=r"no model at 'b' .*; models: ONNX \(a.onnx\)"):
        choose_format([onnx], "b", None, "url")
    with pytest.raises(ConfigError, match=r"no model of SavedModel .*; models: none"):
        choose_format([], None, ("SavedModel",), "url")
    with pytest.raises(ConfigError, match=r"models: PEFT \(.\); PEFT \(.\): download\(\) it"):
        choose_format([ModelFormat("PEFT", ".")], None, ("SavedModel",), "url")


def test_publishers_of_pickles_are_warned() -> None:
    assert pickle_warning(["a.onnx", "b.skops"]) is None
    assert (pickle_warning(["b.joblib", "a.pkl"]) or "").startswith("a.pkl, b.joblib: whoever")
    assert "safe_serialization=True" in (pickle_warning(["net/pytorch_model.bin"]) or "")
