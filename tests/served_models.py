"""Published models of small size, in each format, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hopsgpu.artifacts.models import ModelStore, ModelVersion

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 10


@dataclass(frozen=True)
class Published:
    """A version with input `x` and output `y`, and its answer to X."""

    version: ModelVersion
    answer: Any


def xgboost(directory: Path) -> Any:
    import xgboost

    trained = xgboost.XGBRegressor(n_estimators=2).fit(X, X.sum(1))
    trained.save_model(directory / "boost.json")
    return trained.predict(X)


def _classifier() -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=100).fit(X, [0, 0, 1, 1])


def pickled(directory: Path) -> Any:
    import joblib

    joblib.dump(_classifier(), directory / "classifier.joblib")
    return _classifier().predict(X)


def skops(directory: Path) -> Any:
    import skops.io

    skops.io.dump(_classifier(), directory / "classifier.skops")
    return _classifier().predict(X)


def onnx(directory: Path) -> Any:
    """Doubles; its weights lie in a file of their own."""
    from onnx import TensorProto, helper, numpy_helper, save

    two = numpy_helper.from_array(np.full((1, 3), 2, np.float32), "two")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "two"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [two],
    )
    opset = [helper.make_opsetid("", 20)]
    save(
        helper.make_model(graph, opset_imports=opset, ir_version=10),
        directory / "double.onnx",
        save_as_external_data=True,
        size_threshold=0,
        location="weights.bin",
    )
    return 2 * X


def _net() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def torchscript(directory: Path) -> Any:
    import torch

    torch.jit.script(_net()).save(str(directory / "net.pt"))
    return _net()(torch.tensor(X)).detach().numpy()


def state_dict(directory: Path) -> Any:
    import torch

    torch.save(_net().state_dict(), directory / "net.pt")
    (directory / "model_class.json").write_text(
        '{"class": "torch.nn:Linear", "arguments": {"in_features": 3, "out_features": 2}}'
    )
    return _net()(torch.tensor(X)).detach().numpy()


def saved_model(directory: Path) -> Any:
    import tensorflow as tf

    module = tf.Module()
    module.scale = tf.Variable(2.0)
    signature = [tf.TensorSpec([None, 3], tf.float32, name="x")]
    module.serve = tf.function(lambda x: {"y": x * module.scale}, input_signature=signature)
    tf.saved_model.save(module, str(directory), signatures=module.serve)
    return 2 * X


def pickled_module(directory: Path) -> Any:
    import torch

    torch.save(_net(), directory / "net.pt")
    return _net()(torch.tensor(X)).detach().numpy()


MAKERS: Mapping[str, Callable[[Path], Any]] = {
    "xgboost": xgboost,
    "pickle": pickled,
    "skops": skops,
    "onnx": onnx,
    "torchscript": torchscript,
    "state_dict": state_dict,
    "saved_model": saved_model,
    "pickled_module": pickled_module,
}


def bert(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save a small classifier of texts and its tokenizer; return inputs and outputs of a batch."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"[UNK]": 0, "[PAD]": 1, "good": 2, "bad": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]"
    )
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(
        vocab_size=4, num_hidden_layers=1, max_position_embeddings=16, num_labels=3, **sizes
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    given = tokenizer(["good bad", "good"], return_tensors="pt", padding=True)
    named = {name: given[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = model(**named).logits
    return {name: one.numpy() for name, one in named.items()}, {"logits": logits.numpy()}


def publish(store: ModelStore, name: str, scratch: Path) -> Published:
    """Publish the model that MAKERS calls by this name, under this name."""
    directory = scratch / f"files-{name}"
    directory.mkdir()
    answer = MAKERS[name](directory)
    version = store.publish(directory, name, signature=({"x": X}, {"y": answer}))
    return Published(version, answer)
