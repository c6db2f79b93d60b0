"""`ModelVersion.load` with the real libraries, and what it refuses to unpickle."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hopsgpu
from hopsgpu.artifacts.models import ModelStore, ModelVersion
from hopsgpu.errors import ConfigError
from tests.served_models import bert

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Publish = Callable[..., ModelVersion]


class Planted:
    """An object that says, by a file, that it was unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    return directory


@pytest.fixture
def publish(tmp_path: Path, files: Path) -> Publish:
    def published(**about: Any) -> ModelVersion:
        return ModelStore(f"file://{tmp_path}/models").publish(files, "net", **about)

    return published


def formats(version: ModelVersion) -> list[tuple[str, str]]:
    return [(one.name, one.path) for one in version.formats]


def linear() -> Any:
    import torch

    net = torch.nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.bias.fill_(0.5)
    return net


def sums(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What `linear()` computes."""
    return np.stack([x.sum(1) + 0.5] * 2, axis=1)


def test_torchscript(files: Path, publish: Publish) -> None:
    import torch

    torch.jit.script(linear()).save(str(files / "net.pt"))
    version = publish()
    assert formats(version) == [("TorchScript", "net.pt")]
    loaded = version.load(trust=True)
    np.testing.assert_allclose(loaded(torch.tensor(X)).detach().numpy(), sums(X))


@pytest.mark.parametrize("zipped", [True, False])
def test_state_dict(files: Path, publish: Publish, zipped: bool) -> None:
    import torch

    torch.save(linear().state_dict(), files / "net.pt", _use_new_zipfile_serialization=zipped)
    named = {"class": "torch.nn:Linear", "arguments": {"in_features": 3, "out_features": 2}}
    (files / "model_class.json").write_text(json.dumps(named))
    version = publish()
    assert formats(version) == [("state_dict", "net.pt")]
    assert version.formats[0].model_class == "torch.nn:Linear"
    loaded = torch.nn.Linear(3, 2)
    loaded.load_state_dict(version.load(trust=["torch.nn:Linear"]))
    np.testing.assert_allclose(loaded(torch.tensor(X)).detach().numpy(), sums(X))


def test_more_than_tensors_is_not_unpickled(files: Path, publish: Publish, tmp_path: Path) -> None:
    import torch

    torch.save({"net": Planted(tmp_path / "ran")}, files / "net.pt")
    version = publish()
    with pytest.raises(ConfigError, match="net.pt has more than tensors.*trust=True"):
        version.load()
    assert not (tmp_path / "ran").exists()
    version.load(trust=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_module_is_no_state_dict(files: Path, publish: Publish, zipped: bool) -> None:
    import torch

    torch.save(linear(), files / "net.pt", _use_new_zipfile_serialization=zipped)
    version = publish()
    assert formats(version) == [("pickled module", "net.pt")]
    with pytest.raises(ConfigError, match=r"net.pt is a whole module.*state_dict\(\).*trust=True"):
        version.load()
    np.testing.assert_allclose(version.load(trust=True)(torch.tensor(X)).detach().numpy(), sums(X))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 5])
def test_checkpoints_of_torch_are_told_from_state_dicts(
    files: Path, publish: Publish, zipped: bool, protocol: int
) -> None:
    import torch

    net = linear()
    adam = torch.optim.Adam(net.parameters())
    net(torch.tensor(X)).sum().backward()
    adam.step()
    state = net.state_dict()
    saved = {
        "state.bin": ("state_dict", state),
        "parameters.pth.tar": ("state_dict", dict(net.named_parameters())),
        "whole.pt": ("torch checkpoint", {"net": state, "adam": adam.state_dict(), "epoch": 3}),
        "tensor.pth": ("torch checkpoint", torch.ones(3)),
        "last.ckpt": (
            "Lightning checkpoint",
            {"state_dict": state, "pytorch-lightning_version": "2.6.6"},
        ),
        "odd.pt": ("pickle", Path("x")),
    }
    for name, (_, value) in saved.items():
        torch.save(
            value,
            files / name,
            pickle_protocol=protocol,
            _use_new_zipfile_serialization=zipped,
        )
    version = publish()
    assert dict((path, name) for name, path in formats(version)) == {
        path: name for path, (name, _) in saved.items()
    }
    if protocol == 2:  # torch itself reads others only with trust
        assert version.load(path="whole.pt")["epoch"] == 3
        assert version.load(path="last.ckpt")["state_dict"].keys() == state.keys()
    with pytest.raises(ConfigError, match="odd.pt is a pickle"):
        version.load(path="odd.pt")
    assert version.load(path="odd.pt", trust=True) == Path("x")


def test_torch_export(files: Path, publish: Publish) -> None:
    import torch

    exported = torch.export.export(linear(), (torch.tensor(X),))
    torch.export.save(exported, files / "net.pt2")
    version = publish()
    assert formats(version) == [("torch.export", "net.pt2")]
    with pytest.raises(ConfigError, match="net.pt2 may have pickles"):
        version.load()
    answer = version.load(trust=True).module()(torch.tensor(X))
    np.testing.assert_allclose(answer.detach().numpy(), sums(X))


@pytest.mark.parametrize("name", ["net.keras", "net.h5"])
def test_keras(files: Path, publish: Publish, name: str) -> None:
    import keras

    net = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    net.save(files / name)
    net.save_weights(files / "net.weights.h5")
    version = publish()
    assert formats(version) == [("Keras", name)]
    with pytest.raises(ConfigError, match=f"{name} names classes and functions"):
        version.load()
    np.testing.assert_allclose(version.load(trust=True)(X), net(X))
    with pytest.raises(ConfigError, match=r"no model of .*Keras.*model.export\(directory\)"):
        version.export("triton")


def test_safetensors(files: Path, publish: Publish) -> None:
    import safetensors.numpy
    import safetensors.torch
    import torch

    safetensors.torch.save_file(linear().state_dict(), files / "net.safetensors", {"format": "pt"})
    safetensors.numpy.save_file({"x": X}, files / "array.safetensors", {"format": "np"})
    version = publish()
    assert formats(version) == [(f, f"{n}.{f}") for n in ("array", "net") for f in ("safetensors",)]
    loaded = torch.nn.Linear(3, 2)
    loaded.load_state_dict(version.load(path="net.safetensors"))
    np.testing.assert_allclose(loaded(torch.tensor(X)).detach().numpy(), sums(X))
    arrays = version.load(path="array.safetensors")
    assert type(arrays["x"]) is np.ndarray and (arrays["x"] == X).all()


@pytest.mark.parametrize("size", ["1GB", "1KB"])
def test_what_save_pretrained_leaves(
    files: Path, publish: Publish, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    inputs, outputs = bert(files)
    if size == "1KB":
        whole = transformers.AutoModelForSequenceClassification.from_pretrained(files)
        (files / "model.safetensors").unlink()
        whole.save_pretrained(files, max_shard_size=size)
    version = publish()
    assert formats(version) == [("transformers", ".")]
    model, tokenizer = version.load()
    assert type(model).__name__ == "BertForSequenceClassification" and not model.training
    given = tokenizer(["good bad", "good"], return_tensors="pt", padding=True)
    assert (given["input_ids"].numpy() == inputs["input_ids"]).all()
    np.testing.assert_allclose(
        model(**given).logits.detach().numpy(), outputs["logits"], rtol=1e-4, atol=1e-6
    )


def test_code_of_a_pretrained_model_runs_only_with_trust(
    files: Path, publish: Publish, tmp_path: Path
) -> None:
    bert(files)
    config = json.loads((files / "config.json").read_text())
    (files / "own.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n"
        "from transformers import BertForSequenceClassification\n"
        "class Own(BertForSequenceClassification):\n    pass\n"
    )
    config["auto_map"] = {"AutoModelForSequenceClassification": "own.Own"}
    (files / "config.json").write_text(json.dumps(config))
    version = publish()
    with pytest.raises(ConfigError, match="names code of its own .config.json: auto_map.*trust"):
        version.load()
    with pytest.raises(ConfigError, match="auto_map"):
        version.export("triton", out=tmp_path / "out")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()
    assert version.load(trust=True).model.num_labels == 3
    assert (tmp_path / "ran").exists()


def test_pickled_weights_of_a_pretrained_model_are_loaded_only_with_trust(
    files: Path, publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    import transformers

    bert(files)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(files)
    (files / "model.safetensors").unlink()
    torch.save(model.state_dict(), files / "pytorch_model.bin")
    version = publish()
    assert "pytorch_model.bin: whoever loads a pickle" in caplog.text
    with pytest.raises(ConfigError, match=r"no weights but pickles \(pytorch_model.bin\)"):
        version.load()
    assert version.load(trust=True).model.num_labels == 3


def test_what_other_libraries_load_is_named(files: Path, publish: Publish) -> None:
    import safetensors.numpy

    (files / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    safetensors.numpy.save_file({"x": X}, files / "adapter_model.safetensors")
    version = publish()
    assert formats(version) == [("PEFT", ".")]
    with pytest.raises(ConfigError, match=r"does not load PEFT.*AutoPeftModel.from_pretrained"):
        version.load()
    with pytest.raises(ConfigError, match=r"models: PEFT .*merge_and_unload"):
        version.export("triton")


@pytest.mark.parametrize("name", ["model.pkl", "model.joblib"])
def test_a_pickle_is_loaded_only_with_trust(
    files: Path, publish: Publish, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (files / name).write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    version = publish()
    assert f"net: {name}: whoever loads a pickle runs the code in it" in caplog.text
    for trust in (False, ["os.mkdir"]):
        with pytest.raises(ConfigError, match=f"{name} is a pickle"):
            version.load(trust=trust)
    assert not (tmp_path / "ran").exists()
    version.load(trust=True)
    assert (tmp_path / "ran").exists()


def test_trust_is_a_list_or_a_truth(files: Path, publish: Publish) -> None:
    (files / "model.pkl").write_bytes(b"")
    for odd in ("sklearn.Thing", 7):
        with pytest.raises(ConfigError, match="must be True, False or a list of names"):
            publish().load(trust=odd)  # type: ignore[arg-type]


def classifier() -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression().fit(X, [0, 0, 1, 1])


def test_joblib(files: Path, publish: Publish) -> None:
    import joblib

    joblib.dump(classifier(), files / "model.joblib")
    assert publish().load(trust=True).predict(X).tolist() == [0, 0, 1, 1]


def test_skops(files: Path, publish: Publish) -> None:
    import skops.io

    skops.io.dump(classifier(), files / "model.skops")
    version = publish()
    assert formats(version) == [("skops", "model.skops")]
    assert version.load().predict(X).tolist() == [0, 0, 1, 1]


def own_sum(x: Any) -> Any:
    return x.sum(axis=1, keepdims=True)


def test_untrusted_types_of_skops_are_named(files: Path, publish: Publish) -> None:
    import skops.io
    from sklearn.preprocessing import FunctionTransformer

    skops.io.dump(FunctionTransformer(own_sum), files / "model.skops")
    version = publish()
    own = f"{own_sum.__module__}.own_sum"
    with pytest.raises(ConfigError, match=f"does not trust by itself: {own}; .*trust=") as told:
        version.load()
    assert f"trust=[{own!r}]" in str(told.value)
    with pytest.raises(ConfigError, match="does not trust by itself"):
        version.load(trust=["another.type"])
    for trust in ([own], True):
        assert version.load(trust=trust).transform(X).shape == (4, 1)


def test_onnx(files: Path, publish: Publish) -> None:
    from onnx import TensorProto, helper, save

    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
    )
    opset = [helper.make_opsetid("", 20)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=10), files / "double.onnx")
    version = publish()
    assert formats(version) == [("ONNX", "double.onnx")]
    np.testing.assert_allclose(version.load().run(None, {"x": X})[0], 2 * X)


@pytest.mark.parametrize("name", ["model.json", "model.ubj"])
def test_xgboost(files: Path, publish: Publish, name: str) -> None:
    import xgboost

    trained = xgboost.XGBRegressor(n_estimators=2).fit(X, X.sum(1))
    trained.save_model(files / name)
    (files / "signature.json").write_text("{}")
    version = publish()
    assert formats(version) == [("XGBoost", name)]
    answer = version.load().predict(xgboost.DMatrix(X))
    np.testing.assert_allclose(answer, trained.predict(X), rtol=1e-6)


def test_saved_model(files: Path, publish: Publish) -> None:
    import tensorflow as tf

    module = tf.Module()
    module.scale = tf.Variable(2.0)
    module.__call__ = tf.function(
        lambda x: {"y": x * module.scale}, input_signature=[tf.TensorSpec([None, 3], tf.float32)]
    )
    tf.saved_model.save(module, str(files), signatures=module.__call__)
    version = publish(signature=(tf.constant(X), {"y": tf.constant(X)}))
    assert formats(version) == [("SavedModel", ".")]
    assert version.manifest["signature"]["inputs"] == [
        {"name": "input", "datatype": "FP32", "shape": [-1, 3]}
    ]
    answer = version.load(trust=True).signatures["serving_default"](x=tf.constant(X))["y"]
    np.testing.assert_allclose(answer.numpy(), 2 * X)


def test_a_signature_is_inferred_from_samples(
    files: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("RANK", "0")  # a context outside a gang sets no variables then

    (files / "notes.txt").write_text("")
    x = torch.zeros(8, 3, requires_grad=True)
    version = publish(signature=({"x": x}, {"y": linear()(x)}))
    expected = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
    }
    assert version.manifest["signature"] == expected
    context = hopsgpu.context()
    assert context.signature({"x": x}, {"y": linear()(x)}) == expected
    (files / "signature.json").write_text((context.model_dir / "signature.json").read_text())
    assert publish().manifest["signature"] == expected
    assert publish(signature={"own": 1}).manifest["signature"] == {"own": 1}


def test_a_signature_that_is_not_json_is_refused(files: Path, publish: Publish) -> None:
    (files / "signature.json").write_text("{")
    with pytest.raises(ConfigError, match=r"signature\.json is not a signature in JSON"):
        publish()


def test_a_version_without_a_model_says_so(files: Path, publish: Publish) -> None:
    (files / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match="has no model that hopsgpu recognises; models: none"):
        publish().load()
