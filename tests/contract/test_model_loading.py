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
    np.testing.assert_allclose(version.load()(torch.tensor(X)).detach().numpy(), sums(X))


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
    loaded.load_state_dict(version.load())
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
    answer = version.load().signatures["serving_default"](x=tf.constant(X))["y"]
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
